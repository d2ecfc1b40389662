# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What is computed in JAX around the backward kernels, from statistics in the layout of each of them. No GPU needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import ffi
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops import cuda
from jax_fastattn.reference import attention_reference
from jax_fastattn.testing.cases import Case
from jax_fastattn.testing.compare import evaluate
from jax_fastattn.testing.poison import poison, visible_rows


@pytest.mark.parametrize("sinks", ["n", "bn"])
@pytest.mark.parametrize(("arch", "head_dim"), [("sm_80", 64), ("sm_90a", 64), ("sm_90a", 192)])
def test_dlse_of_rows_that_see_nothing_reaches_the_gradient_of_sinks(
    arch: str, head_dim: int, sinks: str, monkeypatch: pytest.MonkeyPatch, key: jax.Array
) -> None:
    """Row statistics are 0 there. Cotangents of padding rows, and `dout` of rows that see nothing, are NaN."""
    case = Case(
        num_kv_heads=2,
        group=2,
        query_length=13,
        key_length=11,
        head_dim=head_dim,
        is_causal=True,
        query_offset=(-5, 2),
        query_seq_lengths=(11, 13),
        sinks=sinks,
        dlse=True,
    )
    spec, operands, (dout, dlse) = case.spec(), case.operands(key), case.cotangents(key)
    sees, _, _ = visible_rows(spec, operands)
    found = evaluate(attention_reference, spec, operands, dout, dlse)

    def launch(kernel: KernelSpec, problem: Any, given: Any, shapes: Any) -> dict[str, jax.Array]:
        del problem, given
        delta = jnp.where(sees, (found.out * dout).sum(-1) - dlse, 0.0).swapaxes(1, 2)
        lse = jnp.where(sees, found.lse, jnp.inf).swapaxes(1, 2)
        gradients = {name: jnp.zeros(shapes[name]) for name in ("dq", "dk", "dv")}
        return gradients | {"stats": calls.stored_stats(kernel, lse, delta, shapes["stats"])}

    monkeypatch.setattr(ffi, "arch", lambda: arch)
    monkeypatch.setattr(cuda, "_launch", launch)
    low = dataclasses.replace(case, dtype="bfloat16")
    poisoned, dout_in, dlse_in = poison(spec, operands, dout, dlse)
    half = (x.astype(jnp.bfloat16) for x in poisoned[:3])
    poisoned = poisoned._replace(**dict(zip(("query", "key", "value"), half, strict=True)))
    gradients = cuda.backward(low.spec(), poisoned, found.out, found.lse, dout_in, dlse_in)
    np.testing.assert_allclose(gradients.sinks, found.dsinks, rtol=1e-5, atol=1e-5)
