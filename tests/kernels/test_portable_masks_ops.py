# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls with masks and segment ids that run the portable kernels, from canonical operands to gradients; emulated."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from emulated_launch import MULTIPROCESSORS
from test_masks_ops import CASES, B, N, T, draw

from jax_fastattn import ffi
from jax_fastattn.ops import cuda
from jax_fastattn.ops.launch import launch_p
from jax_fastattn.reference import attention_reference
from jax_fastattn.testing.poison import poison

pytestmark = pytest.mark.slow


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(ffi, "arch", lambda: arch)
    monkeypatch.setattr(ffi, "multiprocessors", lambda: MULTIPROCESSORS)
    monkeypatch.setattr(launch_p, "bind", emulated_ops.bind)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("bnts-dead-keys", "sm_80"),
        ("b11s", "sm_80"),
        ("b1t1-cap", "sm_86"),
        ("1kts-window", "sm_80"),
        ("ts-lengths", "sm_86"),
        ("bkts-sinks", "sm_80"),
        ("ids-causal-mask", "sm_80"),
        ("d192v128", "sm_86"),
    ],
)
@pytest.mark.usefixtures("_emulated")
def test_call(name: str) -> None:
    """Residuals of the gradients are those of the forward kernel."""
    spec, operands = draw(CASES[name])
    dout = np.random.default_rng(1).standard_normal((B, T, N, operands.value.shape[3]))
    dout = jnp.asarray(dout, jnp.bfloat16)
    poisoned, poisoned_dout, *_ = poison(spec, operands, dout)
    differentiated = ("query", "key", "value", *(["sinks"] if operands.sinks is not None else []))
    out, lse = cuda.forward(spec, poisoned)
    found = cuda.backward(spec, poisoned, out, lse, poisoned_dout, None, differentiated)

    def loss(*given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        results = attention_reference(spec, operands._replace(**dict(zip(differentiated, given, strict=True))))
        return (results[0] * dout.astype(jnp.float32)).sum(), results

    single = [getattr(operands, x).astype(jnp.float32) for x in differentiated]
    gradients, wanted = jax.grad(loss, argnums=tuple(range(len(single))), has_aux=True)(*single)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(wanted[1]), atol=1e-4, rtol=1e-4)
    results = {"out": (out, wanted[0], 2**-7)}
    results |= {x: (getattr(found, x), y, 2**-6) for x, y in zip(differentiated, gradients, strict=True)}
    for of, (got, expected, tolerance) in results.items():
        got, expected = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
        np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max() + 1e-5, err_msg=of)
