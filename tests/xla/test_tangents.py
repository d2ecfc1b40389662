# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents and second derivatives of the XLA path, at once and in chunks, against those of the reference."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.poison import poison

from jax_fastattn.canonical import packed as canonical_packed
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import DIFFERENTIABLE, AttentionSpec, Operands
from jax_fastattn.xla import chunks, tangents
from jax_fastattn.xla import passes as xla

# Chunks that divide no length of the cases.
SMALL = dataclasses.replace(chunks.CPU, whole=0, block=8, chunk=3, min_chunk=2)
TUNINGS = {"at-once": chunks.CPU, "in-chunks": SMALL}

EVERYTHING = dataclasses.replace(calls.EVERYTHING, dtype="float64")
CASES = {
    "everything": EVERYTHING,
    "no-cap": dataclasses.replace(EVERYTHING, logits_soft_cap=None),
    "lengths": dataclasses.replace(
        EVERYTHING, logits_soft_cap=None, segments=0, query_seq_lengths=(3, 4), key_value_seq_lengths=(5, 0), bias="ns"
    ),
    "window": dataclasses.replace(
        EVERYTHING, logits_soft_cap=None, segments=0, mask=None, sinks=None, window=(2, None), bias=None
    ),
}
Moved = dict[str, jax.Array]


@pytest.fixture
def x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def differentiable(operands: Operands) -> Moved:
    return {name: x for name in DIFFERENTIABLE if (x := getattr(operands, name)) is not None}


def moved(operands: Operands, seed: int) -> Moved:
    """A tangent of every operand that has one."""
    given = differentiable(operands)
    keys = jax.random.split(jax.random.key(seed), len(given))
    return {name: jax.random.normal(k, x.shape, x.dtype) for k, (name, x) in zip(keys, given.items(), strict=True)}


def widened(operands: Operands, dtype: Any) -> Operands:
    return operands._replace(**{name: x.astype(dtype) for name, x in differentiable(operands).items()})


def finite(results: Any, lse: jax.Array) -> Any:
    """Log-sum-exps of -inf do not move."""
    out, dlse = results
    return out, jnp.where(jnp.isfinite(lse), dlse, 0.0)


def reference_of(spec: AttentionSpec, operands: Operands) -> Any:
    return lambda given: attention_reference(spec, operands._replace(**given))


def derivatives(spec: AttentionSpec, operands: Operands, u: Moved, w: Moved, dout: Any, dlse: Any) -> dict[str, Any]:
    """What the three functions should give, by `jax.jvp` and `jax.grad` of the reference."""
    f, (_, lse) = reference_of(spec, operands), attention_reference(spec, operands)
    given = {name: getattr(operands, name) for name in u}

    def loss(given: Any) -> jax.Array:
        out, lse = f(given)
        total = jnp.sum(out * dout)
        return total if dlse is None else total + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) * dlse)

    return {
        "tangent": finite(jax.jvp(f, (given,), (u,))[1], lse),
        "second_tangent": finite(jax.jvp(lambda x: jax.jvp(f, (x,), (u,))[1], (given,), (w,))[1], lse),
        "second_backward": jax.jvp(jax.grad(loss), (given,), (u,))[1],
    }


def ours(
    tuning: chunks.Tuning, spec: AttentionSpec, operands: Operands, u: Moved, w: Moved, dout: Any, dlse: Any
) -> dict[str, Any]:
    out, lse = xla.forward(spec, operands)
    gradients = tangents.second_backward(spec, operands, out, lse, dout, dlse, u, tuning=tuning)
    return {
        "tangent": tangents.tangent(spec, operands, out, lse, u, tuning),
        "second_tangent": tuple(tangents.second_tangent(spec, operands, out, lse, u, w, tuning)),
        "second_backward": {name: getattr(gradients, name) for name in u},
    }


def check(spec: AttentionSpec, operands: Operands, dout: Any, dlse: Any) -> None:
    """Compares all three functions, at once and in chunks, in float64."""
    u, w = calls.quick_jit(lambda x: (moved(x, 3), moved(x, 4)))(operands)
    arguments = operands, u, w, dout, dlse
    expected = calls.quick_jit(functools.partial(derivatives, spec))(*arguments)
    assert all(np.any(x) for x in jax.tree.leaves(expected))
    for tuning in TUNINGS.values():
        calls.assert_same(calls.quick_jit(functools.partial(ours, tuning, spec))(*arguments), expected, 1e-9)


@pytest.mark.numbers
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_second_derivatives_in_float64(case: calls.Case) -> None:
    spec, operands, cotangents = case.spec(), case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    check(spec, widened(operands, jnp.float64), *cotangents)


@pytest.mark.usefixtures("x64")
def test_packed_sequences() -> None:
    query, key, value = calls.quick_jit(lambda key: [x[0].astype(jnp.float64) for x in EVERYTHING.operands(key)[:3]])(
        jax.random.key(0)
    )
    starts = jnp.array([0, 2, 5]), jnp.array([0, 4, 7])
    spec, operands = canonical_packed.canonicalize(
        query, key, value, *starts, sinks=jnp.linspace(-1.0, 2.0, 6), query_offset=0, is_causal=True
    )
    dout, dlse = calls.quick_jit(EVERYTHING.cotangents)(jax.random.key(1))
    check(spec, operands, dout[:1], None if dlse is None else dlse[:1])


@pytest.mark.numbers
@pytest.mark.parametrize("which", ["query", "key", "scale", "bias", "key-sinks"])
def test_moving_all_logits_of_a_row_alike_in_bfloat16(which: str) -> None:
    """dout is 0 without sinks. In chunks it is what `dlse out` leaves of a sum, and `out` is rounded."""
    name, _, sinks = which.partition("-")
    case = calls.Case(
        query_length=40, key_length=150, num_kv_heads=2, group=2, head_dim=16, dtype="bfloat16", is_causal=True,
        query_offset=(110, 90), scale=0.25, scale_is_array=True, bias="nts", sinks="n" if sinks else None,
    )  # fmt: skip
    spec, operands = case.spec(), case.operands(jax.random.key(0))
    operands = operands._replace(key=jnp.broadcast_to(operands.key[:, :1], operands.key.shape))
    x = getattr(operands, name)
    u = {name: 10 * x if name in ("query", "key") else jnp.full_like(x, 10.0)}
    # The logits are bilinear in these two, so that a second derivative moves all of a row alike, too.
    w = {other: getattr(operands, other) for other in ("query", "key") if other != name}
    out, lse = calls.quick_jit(functools.partial(xla.forward, spec))(operands)
    tuning = dataclasses.replace(SMALL, chunk=32, block=1 << 12)
    first = jax.jit(functools.partial(tangents.tangent, spec, tuning=tuning))(operands, out, lse, u)
    second = jax.jit(functools.partial(tangents.second_tangent, spec, tuning=tuning))(operands, out, lse, u, w)

    f, wide = reference_of(spec, widened(operands, jnp.float32)), widened(operands, jnp.float32)
    given = {n: getattr(wide, n) for n in u | w}
    still = {n: jnp.zeros_like(y) for n, y in given.items()}
    along_u, along_w = (still | {n: y.astype(given[n].dtype) for n, y in move.items()} for move in (u, w))
    slope = lambda given: jax.jvp(f, (given,), (along_u,))[1]
    expected_first, expected_second = jax.jit(lambda: jax.jvp(slope, (given,), (along_w,)))()
    assert np.max(np.abs(expected_first[1])) > 5
    for found, expected in ((first, expected_first), (second, expected_second)):
        for x, y in zip(found, expected, strict=True):
            bound = 2e-3 + 2.0**-7 * np.max(np.abs(y))
            np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=bound)


def test_invisible_rows_are_not_read_in_chunks() -> None:
    """NaN in rows of operands, and of tangents alone; some queries see their sink alone, some nothing."""
    case = dataclasses.replace(CASES["lengths"], dtype="float32")
    spec, operands, (dout, dlse) = case.spec(), case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    x, u, w = operands, moved(operands, 3), moved(operands, 4)
    bad, bad_dout, bad_dlse = poison(spec, x, dout, dlse)
    assert np.isnan(bad.query).any()
    bad_u, bad_w = (differentiable(poison(spec, x._replace(**z), dout, dlse)[0]) for z in (u, w))
    run = calls.quick_jit(functools.partial(ours, SMALL, spec))
    expected = run(x, u, w, dout, dlse)
    for arguments in ((bad, bad_u, bad_w), (x, bad_u, w), (x, u, bad_w)):
        calls.assert_same(run(*arguments, bad_dout, bad_dlse), expected, 1e-6)


def test_the_bound_on_logits_counts_the_planes_of_an_op() -> None:
    """With as many logits as a forward pass computes at once, a tangent and a second derivative loop over chunks."""
    operands = calls.Case(query_length=64, key_length=64, num_kv_heads=2, group=1, head_dim=8).operands(
        jax.random.key(0)
    )
    spec, u = AttentionSpec(scale=1.0), moved(operands, 3)
    logits = operands.query.shape[0] * 2 * 64 * 64
    out, lse = xla.forward(spec, operands)

    def loops(whole: int, function: Any, *arguments: Any) -> bool:
        tuning = dataclasses.replace(chunks.CPU, whole=whole, block=1, chunk=32, min_chunk=16)
        run = functools.partial(function, spec, tuning=tuning)
        return re.search(r"\b(while|scan)\[", str(jax.make_jaxpr(run)(operands, *arguments))) is not None

    assert [loops(logits * n, xla.forward) for n in (0, 1)] == [True, False]
    assert [loops(logits * n, tangents.tangent, out, lse, u) for n in (1, 4, 5)] == [True, True, False]
    for second in (tangents.second_tangent, tangents.second_backward):
        last = (u, u) if second is tangents.second_tangent else (out, lse, u)
        assert [loops(logits * n, second, out, lse, *last) for n in (5, 9, 10)] == [True, True, False]


def test_chunks_add_up_tangents_alone() -> None:
    """XLA does not always see that nothing reads sums of gradients next to those of their tangents."""
    operands = calls.Case(query_length=64, key_length=64, num_kv_heads=2, group=1, head_dim=8).operands(
        jax.random.key(0)
    )
    spec, u = AttentionSpec(scale=1.0), moved(operands, 3)
    results = xla.forward(spec, operands)
    tuning = dataclasses.replace(chunks.CPU, whole=0, block=1, chunk=32, min_chunk=16)
    run = functools.partial(tangents.second_backward, spec, tuning=tuning)
    jaxpr = jax.make_jaxpr(run)(operands, *results, results[0], None, u, results)
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    sums = [[x for x in eqn.outvars if getattr(x.aval, "ndim", 0)] for eqn in loops]
    assert [len(x) for x in sums] == [2, 3]  # weights and their tangents; tangents of query, key and value


# One key a chunk.
ONE_KEY = dataclasses.replace(chunks.CPU, whole=0, block=1, chunk=1, min_chunk=1)


@pytest.mark.parametrize("tuning", [chunks.CPU, ONE_KEY], ids=TUNINGS)
@pytest.mark.parametrize("logit", [2.0, 50.0, 100.0, 640.0, 1600.0])
def test_weights_that_do_not_add_up_to_one_lose_digits_of_large_tangents(logit: float, tuning: chunks.Tuning) -> None:
    """Errors in float32 are at most four times those of `jax.nn`, or an ulp of the greatest term. Logits are exact.

    A query's gradient along its first element is `ds logit - ds (logit - 1.5)`, where ds is the gradient along the
    second one.
    """
    spec, dout = AttentionSpec(scale=1.0), np.array([1.0, -1.0]).reshape(1, 1, 1, 2)

    def arrays(dtype: Any) -> tuple[Operands, Moved, Moved, jax.Array]:
        query, key, value = (np.array(x) for x in ([1.0, 0.0], [[logit, 0.0], [logit - 1.5, 1.0]], np.eye(2)))
        rows, directions = (1, 2, 1, 2), ([0.0, 100.0], [100.0, 3.0])
        x = Operands(
            *(jnp.asarray(x.reshape(y), dtype) for x, y in ((query, (1, 1, 1, 2)), (key, rows), (value, rows)))
        )
        u, w = ({"query": jnp.asarray(y, dtype).reshape(1, 1, 1, 2)} for y in directions)
        return x, u, w, jnp.asarray(dout, dtype)

    def of(x: Operands, u: Moved, w: Moved, dout: jax.Array, attend: Any) -> dict[str, jax.Array]:
        f = lambda query: attend(query, x.key, x.value)
        slope = lambda query: jax.jvp(f, (query,), (u["query"],))[1]
        of_query = jax.grad(lambda query: jnp.sum(f(query) * dout))
        return {
            "tangent": slope(x.query),
            "second_tangent": jax.jvp(slope, (x.query,), (w["query"],))[1],
            "second_backward": jax.jvp(of_query, (x.query,), (u["query"],))[1],
        }

    with jax.enable_x64(True):
        x, u, w, c = arrays(jnp.float64)
        exact = of(x, u, w, c, lambda *y: attention_reference(spec, x._replace(query=y[0]))[0])
    exact = {name: np.asarray(y) for name, y in exact.items()}
    x, u, w, c = arrays(jnp.float32)
    theirs = of(x, u, w, c, functools.partial(jax.nn.dot_product_attention, scale=1.0))
    found = ours(tuning, spec, x, u, w, c, None)
    found = {name: found[name]["query"] if name == "second_backward" else found[name][0] for name in exact}

    def errors(results: dict[str, jax.Array], name: str) -> np.ndarray:
        return np.abs(np.asarray(results[name], np.float64) - exact[name])

    for name, y in exact.items():
        terms = np.abs(y[..., 1:]) * [logit, 1.0] if name == "second_backward" else np.abs(y)
        assert np.all(errors(found, name) <= 4 * np.max(errors(theirs, name)) + 2.0**-23 * terms), name
