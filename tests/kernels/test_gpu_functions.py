# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout and functions of scores on a GPU, by the kernels of both families: exact masks, and random calls."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import combinations, compare, draw_sizes
from testing.borrow import portable_forward, portable_kernel
from testing.poison import poison
from testing.random_dropout import has_random_dropout, with_few_queries, with_random_dropout
from testing.random_functions import (
    assert_planes_are_close,
    has_random_score,
    with_a_plane,
    with_random_score,
)

import jax_fastattn
from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.support import gradient_reasons, unsupported_reasons
from jax_fastattn.ops import vjp
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.spec import AttentionSpec, Operands, Problem

pytestmark = pytest.mark.gpu

KEY, RATE = jax.random.key(5), 0.3

# Each is of another kind, so it has kernels of its own. A third to a half have neither function nor dropout.
DRAWS = 150
FAMILIES = ("the GPU's own", "portable")


def drawn(seed: int) -> list[Case]:
    """Returns the calls of a run: those of `DRAWS` random ones that have dropout or a function of scores."""
    found = combinations.combined_draws(seed, DRAWS, DRAWS, draw_sizes.LARGE)
    return [with_few_queries(case) for case in found if _has_kernels(case)]


def _has_kernels(case: Case) -> bool:
    """Returns whether a case has dropout or a function of scores, in a call that kernels take."""
    if case.packed is not None and case.mask_mod is not None:
        return False
    return has_random_dropout(case) or has_random_score(case)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is not test_random_calls:
        return
    found = [(case, FAMILIES[i % 2]) for i, case in enumerate(drawn(metafunc.config.getoption("--seed")))]
    metafunc.parametrize(("case", "family"), found, ids=[f"{family}-{case}" for case, family in found])


def _choose(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "portable":
        monkeypatch.setattr(cuda, "kernel_spec", portable_kernel)
        monkeypatch.setattr(cuda, "forward_spec", portable_forward)


# Arguments of `attention` by case, beside the head dim, the dtype and the precision of products.
MASKS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "d64": (64, "bfloat16", "default", {}),
    "d64-causal": (64, "float16", "default", {"is_causal": True}),
    # Signs of weights say nothing of dropout.
    "d64-function": (64, "bfloat16", "default", {"score_mod": lambda score, *at: -0.5 * score}),
    "d96": (96, "bfloat16", "default", {"broadcast_dropout": True}),
    "d128": (128, "bfloat16", "default", {}),
    "d128-window": (128, "bfloat16", "default", {"local_window_size": (300, 20), "deterministic": True}),
    "d192": (192, "bfloat16", "default", {}),
    "d256": (256, "bfloat16", "default", {"is_causal": True}),
    "three-products": (64, "float32", "default", {}),
    "one-product": (128, "float32", "tensorfloat32", {}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MASKS)
def test_kernels_keep_what_the_mask_keeps(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight is an element of the output, and of the gradient of the values, of identity matrices.

    With blocks of an identity as values and cotangents, 12 million decisions of each pass are read.
    """
    _choose(family, monkeypatch)
    head_dim, dtype, precision, options = MASKS[name]
    batch, heads, queries, keys = shape = (2, 4, 1100, 1333)
    random = jax.random.split(jax.random.key(0))
    query, key = (
        0.1 * jax.random.normal(x, (batch, rows, heads, head_dim), dtype)
        for x, rows in zip(random, (queries, keys), strict=True)
    )

    def block(first: Any, rows: int) -> jax.Array:
        found = jax.nn.one_hot(jnp.arange(rows) - first, head_dim, dtype=dtype)
        return jnp.broadcast_to(found[None, :, None], (batch, rows, heads, head_dim))

    @jax.jit
    def kept(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        def call(value: jax.Array) -> jax.Array:
            dropout = {"dropout_rate": RATE, "dropout_key": KEY}
            return jax_fastattn.attention(query, key, value, implementation="cuda", **dropout, **options)

        out, pull = jax.vjp(call, block(first, keys))
        (dvalue,) = pull(block(first, queries))
        return jnp.moveaxis(out, 1, 2) != 0, jnp.moveaxis(dvalue, 1, 2) != 0

    wanted = jax_fastattn.dropout_mask(KEY, RATE, shape, broadcast=options.get("broadcast_dropout", False))
    seen = _seen(queries, keys, options)
    wanted = np.broadcast_to(wanted, shape) & seen
    of_forward, of_backward = np.zeros(shape, bool), np.zeros(shape, bool)
    with jax.default_matmul_precision(precision):
        for first in range(0, keys, head_dim):
            out, dvalue = map(np.asarray, kept(jnp.int32(first)))
            of_forward[..., first : first + head_dim] = out[..., : keys - first]
            if first < queries:
                of_backward[:, :, first : first + head_dim] = dvalue.swapaxes(2, 3)[:, :, : queries - first]
    for found in (of_forward, of_backward):
        wrong = int((found != wanted).sum())
        assert wrong == 0, f"{wrong} of {wanted.size} decisions are wrong"


def _seen(queries: int, keys: int, options: dict[str, Any]) -> np.ndarray:
    distances = np.arange(queries)[:, None] - np.arange(keys)[None, :]
    left, right = options.get("local_window_size", (keys, 0 if options.get("is_causal") else keys))
    return (distances <= left) & (-distances <= right)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _results(
    spec: AttentionSpec,
    family: str,
    names: tuple[str, ...],
    operands: Operands,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> compare.Results:
    del family  # part of the cache key

    def function(*arrays: jax.Array) -> tuple[Any, jax.Array]:
        out, lse = vjp.attend(spec, operands._replace(**dict(zip(names, arrays, strict=True))), True)
        return out if dlse is None else (out, lse), lse

    if not names:
        return compare.Results(*vjp.attend(spec, operands, True))
    found, pullback, lse = jax.vjp(function, *(getattr(operands, name) for name in names), has_aux=True)
    gradients = pullback(dout if dlse is None else (dout, dlse))
    out = found if dlse is None else found[0]
    return compare.Results(out, lse, **{f"d{name}": x for name, x in zip(names, gradients, strict=True)})


def test_random_calls(case: Case, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradient of a plane, if a kernel sums it, and without gradients, if they take the XLA path."""
    spec, operands, *cotangents = combinations.inputs(case)
    spec, operands = with_random_dropout(case, *with_random_score(case, spec, operands))
    names = with_a_plane(Problem.of(spec, operands), combinations.wanted(case), case.draw or 0)
    expected = jax.tree.map(np.asarray, combinations.expected(case, spec, operands, *cotangents, names=names))
    if case.dtype == "float32" and case.precision == "default" and (case.draw or 0) // 2 % 2 == 0:
        case, spec = (dataclasses.replace(x, precision="tensorfloat32") for x in (case, spec))
    _choose(family, monkeypatch)
    spec = dataclasses.replace(spec, implementation="cuda")
    operands, dout, dlse = poison(spec, operands, *cotangents, turn=case.draw or 0)
    problem = Problem.of(spec, operands)
    if case.dtype == "float32" and (reasons := unsupported_reasons(problem, ffi.arch())):
        pytest.skip(f"its tiles do not fit this GPU: {reasons}")
    names = () if gradient_reasons(problem, names) else names
    if not names:
        expected = [compare.Results(x.out, x.lse) for x in expected]
    first, second = (jax.tree.map(np.asarray, _results(spec, family, names, operands, dout, dlse)) for _ in range(2))
    compare.assert_within_budget(*assert_planes_are_close(first, *expected), rounding=combinations.rounding(case))
    kernel = (portable_kernel if family == "portable" else kernel_spec)(problem, "backward", ffi.arch() or "")
    any_order = {"dquery", "dscale"} if kernel.config.adds_dq and not kernel.ordered else set()
    compare.assert_same_bits(first, second, any_order)


# Slopes of both signs: heads with a negative one attend far away, where the gradient is a difference of large numbers.
SLOPES = jnp.array([0.5, 0.02, -0.004, -0.05])
ROWS = 2176
# By name: a function, and the array whose gradient is compared.
CAPTURED: dict[str, tuple[Any, Any]] = {
    "slopes": (lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), SLOPES),
    "temperature": (lambda x: lambda s, b, h, q, k: s * x[h], jnp.array([1.0, 0.3, -0.7, 2.0])),
    "buckets": (lambda x: lambda s, b, h, q, k: s + x[jnp.minimum(jnp.abs(k - q) // 40, 31), h], (32, 4)),
    "distances": (lambda x: lambda s, b, h, q, k: s + x[k - q + ROWS, h], (2 * ROWS, 4)),
    "table-times-score": (lambda x: lambda s, b, h, q, k: s * (1 + 0.5 * jnp.tanh(x[k - q + ROWS])), (2 * ROWS,)),
    "keys": (lambda x: lambda s, b, h, q, k: s - SLOPES[h] * (q - k) + x[h, k], (4, ROWS)),
    "tokens": (lambda x: lambda s, b, h, q, k: s * x[b, q], (2, ROWS)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captured_arrays(
    name: str, documents: bool, head_dim: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest error is within 1 % of the largest gradient in float32, and two runs give the same bits."""
    _choose(family, monkeypatch)
    make, given = CAPTURED[name]
    random = jax.random.split(jax.random.key(7), 5)
    query, key, value, dout = (
        jax.random.normal(x, (2, ROWS, heads, head_dim), jnp.bfloat16)
        for x, heads in zip(random[:4], (4, 2, 2, 4), strict=True)
    )
    captured = 1 + 0.3 * jax.random.normal(random[4], given) if isinstance(given, tuple) else given
    ids = np.stack([np.searchsorted(ends, np.arange(ROWS), "right") for ends in ((700, 1500), (64, 2000))])
    options = {"segment_ids": (jnp.asarray(ids, jnp.int32),) * 2} if documents else {}

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(implementation: str, captured: jax.Array, *arrays: jax.Array) -> jax.Array:
        def loss(captured: jax.Array) -> jax.Array:
            with jax.numpy_dtype_promotion("standard"):  # as in the functions of users
                out = jax_fastattn.attention(
                    *arrays, score_mod=make(captured), deterministic=True, implementation=implementation, **options
                )
            return (out * dout.astype(out.dtype)).sum(dtype=jnp.float32)

        return jax.grad(loss)(captured)

    first, second = (np.asarray(gradient("cuda", captured, query, key, value)) for _ in range(2))
    single = (x.astype(jnp.float32) for x in (query, key, value))
    with jax.default_matmul_precision("highest"):
        wanted = np.asarray(gradient("xla", captured, *single))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, wanted, atol=0.01 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_causal_function_gives_the_bits_of_the_flag(
    head_dim: int, kv_heads: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, dk and dv; the sum of dq may have another order, and without `deterministic` sums of heads in groups."""
    _choose(family, monkeypatch)
    random = jax.random.split(jax.random.key(3), 4)
    *arrays, dout = (
        jax.random.normal(x, (2, ROWS, heads, head_dim), jnp.bfloat16)
        for x, heads in zip(random, (4, kv_heads, kv_heads, 4), strict=True)
    )

    def results(**options: Any) -> list[np.ndarray]:
        def call(*arrays: jax.Array) -> jax.Array:
            return jax_fastattn.attention(*arrays, implementation="cuda", deterministic=kv_heads < 4, **options)

        out, pull = jax.vjp(jax.jit(call), *arrays)
        return [np.asarray(x.astype(jnp.float32)) for x in (out, *pull(dout)[1:])]

    found, wanted = results(mask_mod=lambda b, h, q, k: q >= k), results(is_causal=True)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
