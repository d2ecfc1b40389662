# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of head numbers by the main backward kernel, with mean keys from the forward kernel; emulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from test_score_mods import reference
from testing.poison import poison

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.sums.row_means import mean_plane
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.spec import QKV

# Some heads attend to the nearest keys, others to the furthest ones.
SLOPES = jnp.asarray([0.3, -0.2, 0.05, -0.01], jnp.float32)

# By name: head dims of query and value, queries, keys, query heads of the one key/value head, and other arguments.
CALLS: dict[str, tuple[tuple[int, int], int, int, int, dict[str, Any]]] = {
    "d64": ((64, 64), 160, 130, 2, {}),  # full tiles with keys past the end
    "d64-causal": ((64, 64), 140, 140, 2, {"is_causal": True}),
    "d128-causal": ((128, 128), 70, 140, 2, {"is_causal": True, "query_offset": jnp.array([70])}),
    "d96-window-lengths": (
        (96, 96),
        150,
        170,
        4,
        {"local_window_size": (90, 30), "key_value_seq_lengths": jnp.array([131])},
    ),
    "d64-ids": ((64, 64), 150, 170, 2, {"segment_ids": tuple(jnp.arange(n)[None] // 60 for n in (150, 170))}),
    "d64-lengths": ((64, 64), 140, 110, 2, {"query_seq_lengths": jnp.array([101])}),
    "d64-float16": ((64, 64), 70, 140, 2, {"dtype": jnp.float16}),
}

# Warps of these portable kernels share keys, with two products of dS and with one.
PORTABLE_CALLS = {
    "d256-lengths": ((256, 256), 70, 100, 2, {"query_seq_lengths": jnp.array([61])}),
    "d256v128": ((256, 128), 50, 70, 2, {"is_causal": True, "query_offset": jnp.array([20])}),
}
RUNS = [
    *((name, arch) for name in CALLS for arch in ("sm_80", "sm_90a")),
    ("d128-causal", "sm_86"),
    ("d256-lengths", "sm_80"),
    ("d256v128", "sm_86"),
]


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    ("name", "arch"), [pytest.param(*x, marks=() if x[0] == "d64" else pytest.mark.slow) for x in RUNS]
)
def test_gradients_of_slopes(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 % of float32, without a kernel of sums, with poison in everything that no result depends on.

    Values have a mean, which makes the errors of delta large: without means of rows the gradients would be off by 10 to
    50 %. They grow with the key, so that all rows of a head add up.
    """
    (head_dim, v_head_dim), queries, keys, heads, options = (CALLS | PORTABLE_CALLS)[name]
    kernels = []

    def bind(*operands: Any, kernel: Any, **params: Any) -> Any:
        kernels.append(kernel)
        return emulated_ops.bind(*operands, kernel=kernel, **params)

    emulated_ops.emulate(monkeypatch, arch, bind=bind)
    random, options = np.random.default_rng(0), dict(options)
    dtype = options.pop("dtype", jnp.bfloat16)
    shapes = [(1, n, h, d) for d in (head_dim, v_head_dim) for n, h in ((queries, heads), (keys, 1))]
    query, key, dout, value = (random.standard_normal(shape) for shape in shapes)
    value = value + 4.0 + np.linspace(0.0, 4.0, keys)[:, None, None]
    *arrays, dout = (jnp.asarray(x, dtype) for x in (query, key, value, dout + 0.25))
    plain, operands = canonicalize(*arrays, score_mod=lambda s, b, h, q, k: s - SLOPES[h] * (q - k), **options)
    plane = mean_plane(plain, str(operands.query.dtype), ["head_numbers"])
    assert plane == 0
    spec = replace(plain, mean_plane=plane)
    poisoned, poisoned_dout, _ = poison(plain, operands, dout)
    out, lse, means = cuda.forward(spec, poisoned)
    taken, wanted = poisoned._replace(row_means=means), [*QKV, "head_numbers"]
    found = cuda.backward(replace(spec, present=taken.present()), taken, out, lse, poisoned_dout, None, wanted)
    (_, expected_lse), gradients = reference(plain, operands, wanted, dout)
    positions = jnp.broadcast_to(jnp.arange(keys, dtype=jnp.float32)[None, :, None, None], (1, keys, 1, 8))
    no_cotangent = jnp.zeros((1, queries, heads, 8))
    (mean_keys, _), _ = reference(plain, operands._replace(value=positions), ["query"], no_cotangent)
    live = np.isfinite(np.asarray(expected_lse))
    np.testing.assert_allclose(np.asarray(means)[live], np.asarray(mean_keys)[..., 0][live], atol=0.6)
    padding = np.arange(queries) >= options.get("query_seq_lengths", [queries])[0]
    assert not np.asarray(means)[~live & ~padding[None, :, None]].any()
    for operand, gradient in zip(wanted, gradients, strict=True):
        got, expected = (np.asarray(x.astype(jnp.float32)) for x in (getattr(found, operand), gradient))
        tolerance = 0.01 if operand == "head_numbers" else 2**-4
        np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max(), err_msg=operand)
    passes = [kernel for kernel in kernels if kernel.op != "prepass"]
    assert [kernel.op for kernel in passes] == ["forward", "backward"]
    assert all(kernel.has_row_means and not kernel.sums_rows for kernel in passes)
