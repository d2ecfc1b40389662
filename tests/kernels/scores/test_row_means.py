# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of head numbers by the main backward kernel, with means of rows from the forward kernel; emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from test_score_mods import _promotion, reference  # noqa: F401 (a fixture)

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.row_means import mean_plane
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda.launch import launch_p
from jax_fastattn.spec import QKV

B, K = 2, 1

# Some heads attend to the nearest keys, others to the furthest, some to all.
SLOPES = jnp.asarray([0.3, -0.2, 0.05, -0.01], jnp.float32)

# By name: head dim, queries, keys, query heads, and other arguments.
CALLS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "d64-causal": (64, 140, 140, 2, {"is_causal": True}),
    "d128-causal": (128, 70, 140, 2, {"is_causal": True, "query_offset": jnp.array([70, 60])}),
    "d96-window-lengths": (
        96,
        150,
        170,
        4,
        {"local_window_size": (90, 30), "key_value_seq_lengths": jnp.array([170, 31])},
    ),
    "d64-ids": (
        64,
        150,
        170,
        2,
        {"segment_ids": tuple(jnp.arange(n)[None].repeat(B, 0) // 60 for n in (150, 170))},
    ),
    "d64-float16": (64, 70, 140, 2, {"dtype": jnp.float16}),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_slopes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means are those of the reference, gradients are within 1 % of float32, and no kernel of sums runs."""
    head_dim, queries, keys, heads, options = CALLS[name]
    kernels = []

    def bind(*operands: Any, kernel: Any, **params: Any) -> Any:
        kernels.append(kernel)
        return emulated_ops.bind(*operands, kernel=kernel, **params)

    emulated_ops.emulate(monkeypatch)
    monkeypatch.setattr(launch_p, "bind", bind)
    random, options = np.random.default_rng(0), dict(options)
    dtype = options.pop("dtype", jnp.bfloat16)
    shapes = ((B, queries, heads, head_dim), (B, keys, K, head_dim), (B, keys, K, head_dim), (B, queries, heads, head_dim))
    *arrays, dout = (jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)
    spec, operands = canonicalize(*arrays, score_mod=lambda s, b, h, q, k: s - SLOPES[h] * (q - k), **options)
    plane = mean_plane(spec, str(operands.query.dtype), ["head_numbers"])
    assert plane == 0
    spec = replace(spec, mean_plane=plane)
    out, lse, means = cuda.forward(spec, operands)
    taken = operands._replace(row_means=means)
    wanted = [*QKV, "head_numbers"]
    found = cuda.backward(replace(spec, present=taken.present()), taken, out, lse, dout, None, wanted)
    plain = replace(spec, mean_plane=None)
    (_, wanted_lse), gradients = reference(plain, operands, wanted, dout)

    positions = jnp.broadcast_to(jnp.arange(keys, dtype=jnp.float32)[None, :, None, None], (B, keys, K, 8))
    (mean_keys, _), _ = reference(plain, operands._replace(value=positions), ["query"], jnp.zeros((B, queries, heads, 8)))
    live = np.isfinite(np.asarray(wanted_lse))
    np.testing.assert_allclose(np.asarray(means)[live], np.asarray(mean_keys)[..., 0][live], atol=0.6)
    assert not np.asarray(means)[~live].any()
    for name, expected in zip(wanted, gradients, strict=True):
        got, expected = (np.asarray(x.astype(jnp.float32)) for x in (getattr(found, name), expected))
        tolerance = 0.01 if name == "head_numbers" else 2**-6
        np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max(), err_msg=name)
    assert all(kernel.has_row_means and not kernel.sums_rows for kernel in kernels if kernel.op != "prepass")
