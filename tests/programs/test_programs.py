# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`score_mod` and `mask_mod` of `attention` on the XLA path, against functions that are evaluated pair by pair."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import mods
import numpy as np
import pytest
from calls import assert_same, quick_jit
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mods import MASKS, SCORES, B, D, K, N, S, T
from testing.combinations import in_chunks

from jax_fastattn import (
    and_masks,
    attention,
    attention_varlen,
    causal,
    explain,
    or_masks,
    paged_attention,
)
from jax_fastattn.canonical import programs as canonical_programs
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.ops.forward import attend_op
from jax_fastattn.programs import lower
from jax_fastattn.programs.code import Code
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import AttentionSpec, Operands

# A function of each kind, with and without code; the others are a sweep.
PAIRS = [("alibi", "documents"), ("t5", "heads"), ("temperature", "blocks"), ("pairs", "sorted")]
SWEEP = [
    ("both signs", "causal"),
    ("keys", "dilated"),
    ("rows", "causal"),
    ("a number", "blocks"),
    ("erf", "documents"),
]
CHUNKED = [("t5", "heads"), ("pairs", "sorted")]
CASES = [
    pytest.param(*x, in_parts, marks=[] if x in PAIRS and in_parts == (x in CHUNKED) else pytest.mark.numbers)
    for x in (*PAIRS, *SWEEP)
    for in_parts in (False, True)
]
TANGENT = 0.3


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_of(score: str, mask: str, attend: Callable[..., Any] = attention) -> Callable[..., jax.Array]:
    """Returns a function of query, key, value and the captured array."""
    weights = jax.random.normal(jax.random.key(1), (B, T, N, D))

    def loss(given: dict[str, jax.Array], captured: jax.Array) -> jax.Array:
        out = attend(**given, score_mod=SCORES[score][0](captured), mask_mod=MASKS[mask])
        return jnp.sum(out * weights)

    return loss


def by_oracle(query: Any, key: Any, value: Any, score_mod: Any, mask_mod: Any) -> jax.Array:
    return mods.oracle(AttentionSpec(D**-0.5), Operands(query, key, value), score_mod, mask_mod)[0]


@pytest.mark.parametrize(("score", "mask", "in_parts"), CASES)
def test_values_gradients_and_second_derivatives(score: str, mask: str, in_parts: bool) -> None:
    """A Hessian-vector product has the gradient and, in its tangents, forward mode of everything."""
    given, captured = mods.draw(), mods.array(score)
    moved = jax.tree.map(lambda x: TANGENT * jnp.cos(x), (given, captured))

    def derivatives(attend: Any) -> Any:
        loss = loss_of(score, mask, attend)
        first = jax.value_and_grad(loss, argnums=(0, 1))
        return lambda *primals: (jax.jvp(loss, primals, moved), jax.jvp(first, primals, moved))

    with in_chunks() if in_parts else contextlib.nullcontext():
        found = quick_jit(derivatives(attention))(given, captured)
    assert_same(found, quick_jit(derivatives(by_oracle))(given, captured), 5e-5)


@pytest.mark.parametrize("score", ["t5", pytest.param("erf", marks=pytest.mark.numbers)])
def test_beside_everything_else(score: str) -> None:
    """Bias, cap, sinks, mask, ids, lengths, a window, offsets, grouped heads, and the gradient of the log-sum-exp."""
    case = calls.EVERYTHING
    spec, operands, (dout, dlse) = case.spec(), case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    table = jax.random.normal(jax.random.key(2), (16, 6)) / 2
    arrays = calls.arrays_of(operands)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + k + b) % 3 != h % 3

    def of(table: jax.Array) -> Callable[..., Any]:
        if score == "erf":
            return lambda s, b, h, q, k: jax.lax.erf(s) * table[h, b]
        return lambda s, b, h, q, k: s + table[jnp.clip(k - q, -8, 7) + 8, h]

    def loss(run: Any) -> Any:
        def function(given: Any, table: jax.Array) -> jax.Array:
            out, lse = run(arrays | given, of(table))
            return jnp.sum(out * dout) + jnp.sum(jnp.where(lse > -1e29, lse, 0.0) * dlse)

        return jax.value_and_grad(function, argnums=(0, 1))

    def ours(given: Any, score_mod: Any) -> Any:
        return attention(**given, **calls.options_of(spec), return_residual=True, score_mod=score_mod, mask_mod=mask)

    def theirs(given: Any, score_mod: Any) -> Any:
        sinks, factor = given["sinks"][None], given["scale"][None, None]
        own = {name: x for name, x in given.items() if name in Operands._fields}
        return mods.oracle(spec, operands._replace(**own | {"sinks": sinks, "scale": factor}), score_mod, mask)

    given = {name: arrays[name] for name in calls.DIFFERENTIABLE}
    found, expected = (quick_jit(loss(run))(given, table) for run in (ours, theirs))
    assert_same(found[1], expected[1], 5e-5)


@pytest.mark.parametrize(("score", "mask"), [("t5", "blocks"), ("pairs", "sorted")])
def test_the_reference_evaluates_programs(score: str, mask: str) -> None:
    options = {"score_mod": SCORES[score][0](mods.array(score)), "mask_mod": MASKS[mask]}
    spec, operands = canonicalize(**mods.draw(), **options)
    assert_same(quick_jit(lambda x: attention_reference(spec, x)[0])(operands), by_oracle(**mods.draw(), **options))


POISONED = {
    "keys": lambda x: lambda s, b, h, q, k: s + x["heads"][h] * x["keys"][b, k],
    "rows": lambda x: lambda s, b, h, q, k: s * jnp.log1p(x["rows"][b, q]) * x["heads"][h],
    "distances": lambda x: lambda s, b, h, q, k: s + x["distances"][k - q + T - 1] * x["heads"][h],
    "pairs": lambda x: lambda s, b, h, q, k: s * x["pairs"][q, k] + x["heads"][h] * x["pairs"][q, k],
}


@pytest.mark.parametrize("in_parts", [False, pytest.param(True, marks=pytest.mark.numbers)], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", POISONED)
def test_nan_at_a_pair_that_nobody_sees_reaches_nothing(name: str, in_parts: bool) -> None:
    """Neither a result nor a gradient of any other array or element, whose own gradient is 0."""
    given, keys = mods.draw(), jax.random.split(jax.random.key(5), 5)
    shapes = {"heads": (N,), "keys": (B, S), "rows": (B, T), "distances": (T + S - 1,), "pairs": (T, S)}
    arrays = {x: 1 + jax.random.uniform(key, shape) for key, (x, shape) in zip(keys, shapes.items(), strict=True)}
    arrays = {x: arrays[x] for x in ("heads", name)}
    query, key = np.indices((T, S))
    hidden = {
        "keys": np.arange(S) >= 20,
        "rows": np.arange(T) >= 17,
        "distances": np.arange(T + S - 1) > T - 1,
        "pairs": (query < key) | (key >= 20) | (query >= 17),
    }[name]
    lengths = {"query_seq_lengths": jnp.full(B, 17), "key_value_seq_lengths": jnp.full(B, 20)}
    weights = jax.random.normal(jax.random.key(1), (B, T, N, D))

    def loss(given: Any, arrays: Any) -> jax.Array:
        out = attention(**given, **lengths, score_mod=POISONED[name](arrays), mask_mod=MASKS["causal"])
        return jnp.sum(out * weights)

    def derivatives(*primals: Any) -> Any:
        gradient = jax.grad(loss, argnums=(0, 1))
        return jax.value_and_grad(loss, argnums=(0, 1))(*primals), jax.jvp(gradient, primals, primals)[1]

    with in_chunks() if in_parts else contextlib.nullcontext():
        run = quick_jit(derivatives)
        clean = run(given, arrays)
        # The tangent of a poisoned element is poisoned, too.
        found = run(given, arrays | {name: jnp.where(hidden, jnp.nan, arrays[name])})
    assert_same(found, clean)
    assert not found[0][1][1][name][..., hidden].any()


def test_a_score_of_minus_infinity_hides_and_rows_of_them_are_empty() -> None:
    given = mods.draw()

    def hiding(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return jnp.where((q >= k) & (q != 3), jnp.log(jnp.exp(s)), -jnp.inf)

    def loss(given: Any, **options: Any) -> Any:
        out, lse = attention(**given, **options, return_residual=True)
        return jnp.sum(out**2), (out, lse)

    run = quick_jit(jax.value_and_grad(lambda x: loss(x, score_mod=hiding), has_aux=True))
    (_, (out, lse)), found = run(given)
    shown = quick_jit(jax.grad(lambda x: loss(x, mask_mod=lambda b, h, q, k: (q >= k) & (q != 3))[0]))(given)
    assert not out[:, 3].any() and (lse[:, 3] == -jnp.inf).all()
    assert_same(found, shown)


def test_the_order_is_scale_bias_score_cap_mask() -> None:
    """With numbers that tell every other order apart."""
    ones, value = jnp.ones((1, 1, 1, 1)), jnp.array([1.0, 2.0, 5.0]).reshape(1, 3, 1, 1)
    key = jnp.array([1.0, -2.0, 3.0]).reshape(1, 3, 1, 1)
    out, lse = attention(
        ones,
        key,
        value,
        jnp.array([0.5, 0.25, 2.0]).reshape(1, 1, 1, 3),
        scale=2.0,
        logits_soft_cap=4.0,
        return_residual=True,
        score_mod=lambda s, b, h, q, k: s * s,
        mask_mod=lambda b, h, q, k: k < 2,
    )
    logits = 4 * np.tanh(np.array([(2 * 1 + 0.5) ** 2, (2 * -2 + 0.25) ** 2]) / 4)
    weights = np.exp(logits)
    np.testing.assert_allclose(lse, np.log(weights.sum()), rtol=1e-6)
    np.testing.assert_allclose(out, weights @ [1.0, 2.0] / weights.sum(), rtol=1e-6)


def test_masks_and_flags_agree_to_the_bit() -> None:
    given = mods.draw()
    offsets = jnp.array([3, -2])
    for mask, options in [
        (causal(), {"is_causal": True}),
        (causal(5), {"is_causal": True, "query_offset": 5}),
        (causal(offsets), {"is_causal": True, "query_offset": offsets}),
        (and_masks(causal(2**31 - 1), lambda b, h, q, k: q - k <= 4), {"local_window_size": (4, None)}),
    ]:
        calls_of_both = ({"mask_mod": mask}, options)
        found, expected = (attention(**given, **x, return_residual=True) for x in calls_of_both)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)
    both = or_masks(MASKS["documents"], lambda b, h, q, k: k < 2)
    pairs = np.asarray(
        jax.vmap(jax.vmap(lambda q, k: both(0, 0, q, k), (None, 0)), (0, None))(*map(jnp.arange, (T, S)))
    )
    expected = attention(**given, mask=jnp.asarray(pairs))
    np.testing.assert_array_equal(attention(**given, mask_mod=both)[0], expected[0])
    assert not attention(**given, mask_mod=or_masks()).any()
    np.testing.assert_array_equal(attention(**given, mask_mod=and_masks()), attention(**given))


@pytest.mark.parametrize("where", ["vmap", "shard_map"])
def test_a_causal_function_is_the_flag_in_transformations(where: str) -> None:
    """Rows are those of an example, and of a device's share: the same bits."""
    given = {x: jnp.stack([y, -0.5 * y]) for x, y in mods.draw().items()}
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def run(**options: Any) -> Any:
        call = lambda given: attention(**given, return_residual=True, **options)
        if where == "vmap":
            return jax.vmap(call)(given)
        share = lambda given: jax.tree.map(lambda x: x[None], call({x: y[0] for x, y in given.items()}))
        return jax.jit(jax.shard_map(share, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(given)

    for x, y in zip(run(mask_mod=lambda b, h, q, k: q >= k), run(is_causal=True), strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_offset_is_captured_and_added() -> None:
    """`q` is a row of `query`: a token that is decoded has to add where it stands."""
    given, slopes, at = mods.draw(), mods.array("alibi"), jnp.int32(11)
    one = given | {"query": given["query"][:, 11:12]}
    whole = attention(**given, is_causal=True, score_mod=SCORES["alibi"][0](slopes))
    found = attention(
        **one, is_causal=True, query_offset=at, score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - (q + at))
    )
    assert_same(found[:, 0], whole[:, 11])


@pytest.mark.parametrize("x64", [False, True])
def test_floats_are_float32_and_gradients_have_the_dtype_of_the_array(x64: bool) -> None:
    """JAX's promotion rounds positions to 8 bits, and with x64 computes numbers of NumPy in float64."""
    given, slopes = mods.draw(), mods.array("alibi").astype(jnp.bfloat16)

    def loss(slopes: Any, convert: bool) -> Any:
        used = slopes.astype(jnp.float32) if convert else slopes
        factor = np.float32(0.75) if convert else np.float64(0.75)
        out = attention(**given, score_mod=lambda s, b, h, q, k: s + factor * (used[h] * (260 + q - k)))
        return jnp.sum(out**2), out

    with jax.enable_x64(x64):
        found, expected = (
            quick_jit(jax.grad(functools.partial(loss, convert=x), has_aux=True))(slopes) for x in (False, True)
        )
    np.testing.assert_array_equal(found[1], expected[1])
    assert found[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[0].astype(jnp.float32), expected[0].astype(jnp.float32))


def test_float64_operands_have_functions_in_float64() -> None:
    with jax.enable_x64(True):
        given = mods.draw(jnp.float64)
        for score in ("temperature", "erf"):
            options = {"score_mod": SCORES[score][0](mods.array(score, jnp.float64)), "mask_mod": MASKS["heads"]}
            assert_same(attention(**given, **options), by_oracle(**given, **options), 1e-12)


def test_bfloat16_operands_have_scores_in_float32() -> None:
    given, seen = mods.draw(jnp.bfloat16), list[Any]()

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        seen.append((s.dtype, q.dtype))
        return s + 1e-3 * q

    assert attention(**given, score_mod=mod).dtype == jnp.bfloat16
    assert seen == [(jnp.float32, jnp.int32)]


def mapped(given: Any, captured: Any, mask: str, score: str) -> Any:
    return attention(**given, score_mod=SCORES[score][0](captured), mask_mod=MASKS[mask])


VMAPPED = {
    "captured": ({"query": None, "key": None, "value": None}, 0),
    "query": ({"query": 0, "key": None, "value": None}, None),
    "query and captured": ({"query": 0, "key": None, "value": None}, 0),
    "all": ({"query": 0, "key": 0, "value": 0}, 0),
}


@pytest.mark.parametrize(
    ("score", "axes"),
    [
        ("keys", "captured"),
        ("rows", "query"),
        ("erf", "query and captured"),
        *(pytest.param(*x, marks=pytest.mark.numbers) for x in itertools.product(("keys", "rows", "erf"), VMAPPED)),
    ],
)
def test_vmap_keeps_batch_entries_and_heads(score: str, axes: str) -> None:
    """The mapped axis becomes a part of the batch, or of the heads, which functions must not see."""
    of_arrays, of_captured = VMAPPED[axes]
    given, captured = mods.draw(), mods.array(score)
    stacked = {x: jnp.stack([y, -0.5 * y, 2 * y]) if of_arrays[x] == 0 else y for x, y in given.items()}
    arrays = jnp.stack([captured, 2 * captured, -captured]) if of_captured == 0 else captured

    def gradient(given: Any, captured: Any) -> Any:
        loss = lambda *x: jnp.sum(mapped(*x, mask="heads", score=score) ** 2)
        return jax.value_and_grad(loss, argnums=(0, 1))(given, captured)

    found = quick_jit(jax.vmap(gradient, in_axes=(of_arrays, of_captured)))(stacked, arrays)
    for i in range(3):
        own = {x: y[i] if of_arrays[x] == 0 else y for x, y in stacked.items()}
        assert_same(jax.tree.map(lambda x, i=i: x[i], found), gradient(own, arrays[i] if of_captured == 0 else arrays))


MESHES = {"batch": P("x"), "heads": P(None, None, "x"), "rows": P(None, "x")}


@pytest.mark.parametrize("split", MESHES)
@pytest.mark.parametrize("score", ["t5", pytest.param("erf", marks=pytest.mark.numbers)])
def test_a_mesh_keeps_batch_entries_heads_and_rows(split: str, score: str) -> None:
    given, captured = mods.draw(), mods.array(score)

    def gradient(given: Any, captured: Any) -> Any:
        loss = lambda *x: jnp.sum(mapped(*x, mask="documents", score=score) ** 2)
        return jax.value_and_grad(loss, argnums=(0, 1))(given, captured)

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    placed = {x: jax.device_put(y[:, :24], NamedSharding(mesh, MESHES[split])) for x, y in given.items()}
    plain = {x: y[:, :24] for x, y in given.items()}
    assert_same(quick_jit(gradient)(placed, captured), quick_jit(gradient)(plain, captured))


@pytest.mark.slow
@pytest.mark.parametrize("score", ["t5", "rows", "erf"])
def test_eight_devices_split_entries_rows_and_heads(score: str) -> None:
    given, captured = {x: y[:, :24] for x, y in mods.draw().items()}, mods.array(score)

    def gradient(given: Any, captured: Any) -> Any:
        loss = lambda *x: jnp.sum(mapped(*x, mask="documents", score=score) ** 2)
        return jax.value_and_grad(loss, argnums=(0, 1))(given, captured)

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("x", "y", "z"))
    placed = {x: jax.device_put(y, NamedSharding(mesh, P("x", "y", "z"))) for x, y in given.items()}
    assert_same(quick_jit(gradient)(placed, captured), quick_jit(gradient)(given, captured))


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="jax 0.8 splits no call by Explicit axes")
def test_a_captured_array_may_be_split_by_an_explicit_mesh() -> None:
    """A gather along an axis that is split raised an error of JAX."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    given, slopes = mods.draw(), mods.array("alibi")
    expected = quick_jit(jax.grad(lambda x: jnp.sum(mapped(given, x, mask="causal", score="alibi") ** 2)))(slopes)
    with jax.set_mesh(mesh):
        placed = {x: jax.device_put(y, NamedSharding(mesh, P("x"))) for x, y in given.items()}
        split = jax.device_put(slopes, NamedSharding(mesh, P("x")))
        run = quick_jit(jax.grad(lambda x: jnp.sum(mapped(placed, x, mask="causal", score="alibi") ** 2)))
        found = np.asarray(run(split))
    assert_same(jnp.asarray(found), expected)


@pytest.mark.parametrize("checks", [True, False])
def test_inside_shard_map_functions_have_the_indices_of_the_share(checks: bool) -> None:
    """With captured arrays that are split, and with one that all devices share."""
    given, captured, of_all = mods.draw(), mods.array("rows"), jnp.float32(0.5)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def call(given: Any, captured: Any, of_all: Any) -> Any:
        mod = lambda s, b, h, q, k: s * (of_all + captured[b, q]) + 0.1 * b
        return attention(**given, score_mod=mod, mask_mod=lambda b, h, q, k: (q >= k) | (of_all > captured[b, 0]))

    share = jax.shard_map(call, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=P("x"), check_vma=checks)

    def gradient(run: Any) -> Any:
        return jax.value_and_grad(lambda *x: jnp.sum(run(*x) ** 2), argnums=(0, 1, 2))

    def by_entry(given: Any, captured: Any, of_all: Any) -> Any:
        parts = [call({x: y[i : i + 1] for x, y in given.items()}, captured[i : i + 1], of_all) for i in range(B)]
        return jnp.concatenate(parts)

    found = quick_jit(gradient(share))(given, captured, of_all)
    assert_same(found, quick_jit(gradient(by_entry))(given, captured, of_all))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("checks", [True, False])
def test_functions_have_code_inside_shard_map(checks: bool, kind: AxisType) -> None:
    """Under a mesh JAX put sums and reshards into their derivatives, which have no instruction: no kernel ran them."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    # The codes of functions that were traced elsewhere are kept.
    canonical_programs._lowered.cache_clear()
    lower._with_derivatives.cache_clear()
    slopes, found = mods.array("alibi"), list[Any]()

    def call(x: jax.Array) -> jax.Array:
        functions = {"score_mod": SCORES["alibi"][0](slopes), "mask_mod": MASKS["documents"]}
        spec, _ = canonicalize(x, x, x, **functions)
        found.extend([spec.score_mod, spec.mask_mod])
        return x

    share = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=checks)
    rows = NamedSharding(mesh, P("x"))
    jax.eval_shape(share, jax.ShapeDtypeStruct((2 * B, T, N, D), jnp.float32, sharding=rows))
    assert all(isinstance(x, Code) for x in found)
    functions = {"score_mod": SCORES["alibi"][0](slopes), "mask_mod": MASKS["documents"]}
    spec, _ = canonicalize(**mods.draw(), **functions)
    assert found == [spec.score_mod, spec.mask_mod]


def test_new_equal_functions_compile_nothing_and_other_values_count() -> None:
    given = mods.draw()

    def call(slope: float) -> jax.Array:
        slopes = jnp.full(N, slope)
        return attention(**given, score_mod=lambda s, b, h, q, k: s + slopes[h] * (k - q), mask_mod=MASKS["causal"])

    first, known = call(0.0), attend_op.jitted.cache_info().misses
    for _ in range(20):
        second = call(0.5)
    assert attend_op.jitted.cache_info().misses == known
    np.testing.assert_array_equal(first, attention(**given, is_causal=True))
    assert not np.array_equal(first, second)


def test_a_captured_array_that_nobody_differentiates_costs_no_gradient() -> None:
    given, captured = mods.draw(), mods.array("t5")

    def text(differentiated: bool) -> str:
        def loss(given: Any, captured: Any) -> Any:
            captured = captured if differentiated else jax.lax.stop_gradient(captured)
            return jnp.sum(attention(**given, score_mod=SCORES["t5"][0](captured)))

        return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(given, captured))

    assert "wanted=('query', 'key', 'value')" in text(False)
    assert "wanted=('query', 'key', 'value', 'distance_numbers')" in text(True)


def test_scan_remat_and_export_take_functions() -> None:
    given, tables = mods.draw(), jnp.stack([mods.array("t5"), -mods.array("t5")])
    for x in ("key", "value"):
        given[x] = jnp.concatenate([given[x], given[x]], axis=2)[:, :T]

    def layer(x: jax.Array, table: jax.Array) -> tuple[jax.Array, None]:
        return attention(x, given["key"], given["value"], score_mod=SCORES["t5"][0](table)), None

    def loss(query: jax.Array, tables: jax.Array, scan: bool) -> jax.Array:
        if scan:
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), query, tables)[0] ** 2)
        return jnp.sum(layer(layer(query, tables[0])[0], tables[1])[0] ** 2)

    gradients = [quick_jit(jax.grad(functools.partial(loss, scan=x), argnums=(0, 1))) for x in (True, False)]
    found, expected = (run(given["query"], tables) for run in gradients)
    assert_same(found, expected)
    exported = jax.export.export(jax.jit(lambda *x: layer(*x)[0]))(given["query"], tables[0])
    assert_same(exported.call(given["query"], tables[0]), layer(given["query"], tables[0])[0])


def test_symbolic_lengths_take_functions() -> None:
    batch, length = jax.export.symbolic_shape("b, t")
    shapes = {x: jax.ShapeDtypeStruct((batch, length, n, D), jnp.float32) for x, n in (("query", N), ("key", K))}
    arrays = shapes["query"], shapes["key"], shapes["key"]
    table = mods.array("t5")

    def call(query: Any, key: Any, value: Any) -> Any:
        return attention(
            query, key, value, score_mod=SCORES["t5"][0](table), mask_mod=lambda b, h, q, k: (q + b) // 2 >= k
        )

    exported = jax.export.export(jax.jit(call))(*arrays)
    given = {x: y[:, :T] for x, y in mods.draw().items()}
    assert_same(exported.call(given["query"], given["key"], given["value"]), call(**given))


@pytest.mark.parametrize("reads_table", [False, True])
def test_packed_sequences_count_from_their_starts(reads_table: bool) -> None:
    """Against a call for each sequence. Row 0 of the queries and rows from 19 on are padding.

    Args:
        reads_table: whether the mask function reads floats of distances.
    """
    starts, starts_k = (1, 6, 6, 19), (0, 9, 12, 30)
    given = {name: x[0] for name, x in mods.draw().items()}
    arrays = {
        "slopes": jax.random.normal(jax.random.key(8), (len(starts) - 1, N)) / 4,
        "tokens": jax.random.normal(jax.random.key(9), (T,)),
        "table": mods.array("t5"),
    }

    def score_mod(arrays: Any) -> Callable[..., Any]:
        def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            s = s * (1 + arrays["slopes"][b, h]) + arrays["tokens"][jnp.array(starts)[b] + q]
            return 2 * jnp.tanh(s) + arrays["table"][jnp.clip(k - q, -8, 7) + 8, h]

        return mod

    def few(h: Any, q: Any, k: Any) -> Any:
        return mods.array("t5")[jnp.clip(k - q, -8, 7) + 8, h] < 0.2 if reads_table else True

    def packed(given: Any, arrays: Any) -> jax.Array:
        boundaries = jnp.array(starts), jnp.array(starts_k)
        mask = lambda b, h, q, k: ((q >= k) | (b == 2)) & few(h, q, k)
        arrays_of = given["query"], given["key"], given["value"]
        return attention_varlen(*arrays_of, *boundaries, score_mod=score_mod(arrays), mask_mod=mask)

    def one_by_one(given: Any, arrays: Any) -> jax.Array:
        found, mod = [jnp.zeros((1, N, D))], score_mod(arrays)
        for i in range(3):
            rows, keys = slice(*starts[i : i + 2]), slice(*starts_k[i : i + 2])
            own = given["query"][rows], given["key"][keys], given["value"][keys]
            numbered = lambda s, b, h, q, k, i=i: mod(s, i, h, q, k)
            mask = {"mask_mod": lambda b, h, q, k: few(h, q, k)} if reads_table else {}
            found.append(attention(*own, is_causal=i != 2, score_mod=numbered, **mask))
        return jnp.concatenate([*found, jnp.zeros((T - starts[-1], N, D))])

    found, expected = (
        quick_jit(jax.value_and_grad(lambda *x, run=run: jnp.sum(run(*x) ** 2), argnums=(0, 1)))(given, arrays)
        for run in (packed, one_by_one)
    )
    assert_same(found, expected)


SIZES_OF_NOTHING = [{"T": 0}, {"S": 0}, {"B": 0}]


@pytest.mark.parametrize("sizes", SIZES_OF_NOTHING, ids=str)
def test_sizes_of_zero(sizes: dict[str, int]) -> None:
    b, t, s = (sizes.get(x, n) for x, n in (("B", 2), ("T", 3), ("S", 4)))
    table = mods.array("t5")
    run = lambda q, k, table: attention(q, k, k, score_mod=SCORES["t5"][0](table), mask_mod=MASKS["causal"])
    arrays = jnp.ones((b, t, N, D)), jnp.ones((b, s, K, D)), table
    assert not run(*arrays).any()
    assert not jax.grad(lambda *x: run(*x).sum(), argnums=2)(*arrays).any()


def without_code(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return jnp.sort(jnp.stack([s, 1.0 * q]))[0]


def test_the_kernels_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    given = {x: y.astype(jnp.bfloat16) for x, y in mods.draw().items()}
    options: dict[str, Any] = {"score_mod": without_code, "mask_mod": MASKS["sorted"]}
    calls.lower_for_cuda(monkeypatch, tmp_path)
    with pytest.raises(NotImplementedError) as caught:
        calls.cuda_text(lambda x: attention(**x, **options, implementation="cuda"), given)
    assert "`score_mod` has no code, because `" in str(caught.value)
    assert "`mask_mod` has no code, because `" in str(caught.value)
    with pytest.warns(UserWarning, match="takes the XLA path for the call at .*test_programs.py.*`score_mod`"):
        text = calls.cuda_text(lambda x: attention(**x, **options), given)
    assert "jax_fastattn_launch" not in text
    found = explain(**given, **options, arch="sm_90a")
    assert found.implementation == "xla" and found.reasons[0].startswith("`score_mod` has no code, because ")
    assert "`score_mod` is evaluated as it stands, because `" in found.note
    assert "`mask_mod` is evaluated as it stands, because `" in found.note and "has no instruction" in found.note


def test_functions_that_may_be_no_numbers_need_full_tiles() -> None:
    """Past the last query a kernel evaluates them, too."""
    weights = jnp.ones(T)
    wild: list[Callable[..., Any]] = [
        lambda s, b, h, q, k: s + jnp.log(1.0 * (T - q) * (k + 1)),
        lambda s, b, h, q, k: s / (1 + jnp.abs(s)),
        lambda s, b, h, q, k: jnp.where(weights[q] > 0.01 * k, s, -s),
    ]
    for mod in (*wild, lambda s, b, h, q, k: jnp.where(q > k, 5 * jnp.tanh(s / 5), -jnp.inf)):
        shapes = [jax.ShapeDtypeStruct((B, length, N, 64), jnp.bfloat16) for length in (T, 128)]
        found = [explain(x, x, x, score_mod=mod, arch="sm_90a") for x in shapes]
        assert found[1].implementation == "cuda"
        is_refused = f"past the last query, and 128 does not divide {T}" in found[0].advice
        assert is_refused == (mod in wild)


def test_gradients_of_captured_arrays_run_kernels_or_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """If no kernel computes one that is wanted, the backward pass takes the XLA path."""
    given = {x: y.astype(jnp.bfloat16) for x, y in mods.draw().items()}
    calls.lower_for_cuda(monkeypatch, tmp_path)

    def launches(name: str, *, is_wanted: bool = True, **options: Any) -> int:
        def loss(given: Any, captured: Any) -> jax.Array:
            return attention(**given, score_mod=SCORES[name][0](captured), **options).sum()

        text = calls.cuda_text(jax.grad(loss, argnums=(0, 1) if is_wanted else 0), given, mods.array(name))
        return text.count("stablehlo.custom_call @jax_fastattn_launch")

    assert launches("alibi") == launches("alibi", is_wanted=False) == launches("t5") == 2
    with pytest.warns(UserWarning, match="gradients of arrays .* numbers of heads next to a bias of pairs"):
        assert launches("alibi", bias=jnp.ones((1, 1, T, S))) == 1
    with pytest.raises(NotImplementedError, match="numbers of distances next to a bias of pairs"):
        launches("t5", bias=jnp.ones((1, 1, T, S)), implementation="cuda")


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_pages_refuse_functions(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; `attention` has it"):
        paged_attention(*[jnp.ones((2, 2, 2, 8))] * 3, **{name: MASKS["causal"]})  # pyright: ignore


def test_a_captured_key_of_random_numbers_and_complex_numbers_are_read_for_pairs() -> None:
    """They are no numbers of instructions. The XLA path evaluates such functions."""
    given, key = mods.draw(), jax.random.key(0)
    phases = jnp.exp(1j * jnp.arange(float(max(T, S))))

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return jax.random.bernoulli(jax.random.fold_in(key, q * S + k), 0.8) | (q == k)

    def mod(phases: jax.Array) -> Any:
        return lambda s, b, h, q, k: s + (phases[q] * phases[k].conj() * 1j).real

    shown = np.asarray(mods.of_pairs(mask)(*map(jnp.asarray, np.indices((B, N, T, S), np.int32))))
    assert 0.5 < shown.mean() < 1
    assert_same(attention(**given, mask_mod=mask), attention(**given, mask=jnp.asarray(shown)))
    bias = jnp.asarray(-np.sin(np.arange(T)[:, None] - np.arange(S)), jnp.float32)[None, None]
    assert_same(attention(**given, score_mod=mod(phases)), attention(**given, bias=bias))
    gradient = jax.grad(lambda x: attention(**given, score_mod=mod(x)).sum())(phases)
    assert gradient.dtype == phases.dtype and jnp.isfinite(gradient).all() and gradient.any()
    assert "`mask_mod` is evaluated as it stands, because `" in explain(**given, mask_mod=mask, arch="sm_90a").note
