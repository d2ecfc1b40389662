# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`attention` under `jit` with rows split over a mesh: a ring with no gather, and results split as the query is."""

from __future__ import annotations

import re
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import rings
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import JAX_VERSION, collectives, kinds, partitioner  # noqa: F401 (a fixture)

import jax_fastattn

CAUSAL: dict[str, Any] = {"is_causal": True}
PERMUTE, REDUCE = "collective-permute", "all-reduce"
SPLIT = rings.SPECS | dict.fromkeys(("query", "key", "value", "dout"), P("data", "seq"))
ENDS = jnp.array([[0, 3, 3, 16, 20], [2, 9, 11, 11, 18]])


def make_mesh(data: int = 2, seq: int = 2, tensor: int = 1, kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[: data * seq * tensor]
    return jax.make_mesh((data, seq, tensor), ("data", "seq", "tensor"), axis_types=(kind,) * 3, devices=devices)


def place(mesh: Mesh, arrays: calls.Arrays, specs: dict[str, P]) -> calls.Arrays:
    def sharding(name: str, x: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, P(*(e if size > 1 else None for e, size in zip(specs[name], x.shape, strict=False))))

    return {name: jax.device_put(x, sharding(name, x)) for name, x in arrays.items()}


def run(arrays: calls.Arrays, **options: Any) -> tuple[list[str], Any]:
    """Returns the collectives of output and gradients in the compiled program, and the results."""

    def both(arrays: calls.Arrays) -> Any:
        given = {name: x for name, x in arrays.items() if name != "dout"}
        moved = {name: x for name, x in given.items() if name in rings.MOVED}
        out, pullback = jax.vjp(lambda moved: rings.whole(**options)(given | moved), moved)
        return out, pullback(arrays["dout"])[0]

    compiled = calls.quick_jit(both).lower(arrays).compile()
    return collectives(compiled), compiled(arrays)


def check(arrays: calls.Arrays, mesh: Mesh, specs: dict[str, P] = SPLIT, **options: Any) -> list[str]:
    """Asserts that devices compute what one does, and returns the collectives."""
    with jax.set_mesh(mesh):
        found, results = run(place(mesh, arrays, specs), **options)
    calls.assert_same(jax.device_get(results), jax.device_get(run(arrays, **options)[1]))
    query = NamedSharding(mesh, specs["query"])
    assert results[0].sharding.is_equivalent_to(query, 4)
    assert results[1]["query"].sharding.is_equivalent_to(query, 4)
    return found


# Each step sends one array forward and two backward. If devices help each other, results travel forward, too.
BALANCED = [PERMUTE] * (2 + 2)
STEPS = [PERMUTE] * 3


@kinds
@pytest.mark.usefixtures("partitioner")
def test_causal_rows_are_balanced(kind: AxisType) -> None:
    assert check(rings.draw(20), make_mesh(kind=kind), **CAUSAL) == BALANCED


@pytest.mark.skipif(JAX_VERSION < (0, 9), reason="the other tests run both partitioners there")
def test_gspmd_of_a_newer_jax() -> None:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert check(rings.draw(20), make_mesh(), **CAUSAL) == BALANCED
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.usefixtures("partitioner")
def test_other_numbers_of_keys() -> None:
    """Queries and keys have no factor in common in the rule of the partitioner."""
    assert check(rings.draw(20, keys=12), make_mesh()) == STEPS


@pytest.mark.usefixtures("partitioner")
def test_every_operand() -> None:
    """The only other collectives add up the gradients of sinks, scale and bias."""
    arrays = rings.draw_every_operand()
    found = check(arrays, make_mesh(), local_window_size=(11, 6), logits_soft_cap=3.0)
    assert [x for x in found if x != REDUCE] == STEPS
    assert REDUCE in found


def test_packed_rows() -> None:
    assert check(rings.draw(20) | {"boundaries": ENDS}, make_mesh(), **CAUSAL) == STEPS


def test_packed_rows_that_end_where_their_keys_do() -> None:
    """Sequences have other numbers of queries than of keys; one boundary is where the first device ends."""
    mesh = make_mesh(1, 2)
    arrays = {name: x[0] for name, x in rings.draw(20, batch=1, keys=24).items() if name != "dout"}
    ends = jnp.array([0, 3, 10, 20]), jnp.array([2, 12, 15, 24])

    def run(arrays: calls.Arrays) -> jax.Array:
        boundaries = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
        return jax_fastattn.attention_varlen(**arrays, **boundaries, query_offset="bottom_right", **CAUSAL)

    found = calls.quick_jit(run)(place(mesh, arrays, dict.fromkeys(arrays, P("seq"))))
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("seq")), 3)
    calls.assert_same(jax.device_get(found), jax.device_get(calls.quick_jit(run)(arrays)))


def test_a_window_visits_neighbors() -> None:
    """It ends one row after the device of 10 rows before the last one."""
    assert check(rings.draw(80), make_mesh(1, 8), is_causal=True, local_window_size=(10, None)) == STEPS


def test_query_heads_split_further_than_key_heads() -> None:
    specs = SPLIT | dict.fromkeys(("query", "dout"), P("data", "seq", "tensor")) | {"sinks": P("tensor")}
    arrays = rings.draw(20, heads=(4, 1)) | {"sinks": jnp.array([0.5, -1.0, 2.0, 0.0])}
    found = check(arrays, make_mesh(1, 2, 4), specs, **CAUSAL)
    assert [x for x in found if x != REDUCE] == BALANCED


@pytest.mark.parametrize("name", ["cross", "as-many", "packed", "everything"])
def test_whole_keys_stay_whole(name: str) -> None:
    """A device computes its rows against all keys; the only communication adds up gradients."""
    arrays = rings.draw(
        20, keys=None if name == "packed" else 20 if name == "as-many" else 10 if name == "cross" else 7
    )
    specs = SPLIT | dict.fromkeys(("key", "value"), P("data"))
    options: dict[str, Any] = {} if name == "cross" else CAUSAL
    if name == "packed":
        arrays["boundaries"] = ENDS
    if name == "everything":
        arrays |= {
            "bias": jax.random.normal(jax.random.key(1), (2, 4, 20, 7)),
            "query_offset": jnp.array([-4, -9]),
            "query_seq_lengths": jnp.array([18, 13]),
            "key_value_seq_lengths": jnp.array([6, 5]),
            "sinks": jnp.linspace(-1.0, 1.0, 4),
        }
        options = {"local_window_size": (5, 2)}
    assert set(check(arrays, make_mesh(), specs, **options)) == {REDUCE}


def test_whole_queries_gather_the_keys() -> None:
    """Nothing says over which devices the rows of queries could be split."""
    mesh, specs = make_mesh(), SPLIT | dict.fromkeys(("query", "dout"), P("data"))
    arrays = rings.draw(20, keys=12)
    found, results = run(place(mesh, arrays, specs))
    calls.assert_same(jax.device_get(results), jax.device_get(run(arrays)[1]))
    assert set(found) == {"all-gather"}


IDS = jnp.arange(64).reshape(2, 32) // 9
# Rows that 4 devices do not divide, the arrays that they are cut from, and the permutes of the call.
UNEVEN: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], int]] = {
    "causal": (29, 29, {}, CAUSAL, 4 + 4),  # 8 rows on each device: balanced, in two steps
    "segments": (29, 29, {"query_ids": IDS + 1, "key_ids": jnp.where(IDS == 1, 0, IDS + 1)}, CAUSAL, 4 + 4),
    "packed": (19, 19, {"boundaries": ENDS}, CAUSAL | {"local_window_size": (12, None)}, 3 + 6),
    "everything": (23, 14, rings.draw_every_operand(), {"local_window_size": (11, 6), "logits_soft_cap": 3.0}, 3 + 6),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", UNEVEN)
def test_rows_that_devices_do_not_divide(name: str) -> None:
    """A program may cut split rows to a length that leaves padding, in which XLA leaves what was there: NaN."""
    rows, keys, extra, options, permutes = UNEVEN[name]
    arrays = rings.draw(-4 * (-rows // 4), keys=-4 * (-keys // 4)) | extra
    lengths = dict.fromkeys(("query", "dout", "query_ids"), rows) | dict.fromkeys(("key", "value", "key_ids"), keys)
    arrays |= {x: arrays[x].at[:, lengths[x] :].set(jnp.nan) for x in ("query", "dout", "key", "value")}
    if name == "segments":  # no query sees these keys; the ids of padding are 0, too
        hidden = (arrays["key_ids"] == 0)[:, :, None, None]
        arrays |= {x: jnp.where(hidden, jnp.nan, arrays[x]) for x in ("key", "value")}

    def both(arrays: calls.Arrays) -> Any:
        cut = {x: array[:, : lengths[x]] if x in lengths else array for x, array in arrays.items()}
        cut |= {x: cut[x][:, :, :rows, :keys] for x in ("bias", "mask") if x in cut}
        given = {x: array for x, array in cut.items() if x != "dout" and not x.endswith("_ids")}
        if "key_ids" in cut:
            given["segment_ids"] = cut["query_ids"], cut["key_ids"]
        moved = {x: array for x, array in given.items() if x in rings.MOVED}
        out, pullback = jax.vjp(lambda moved: rings.whole(**options)(given | moved), moved)
        # As long as the arguments, so that results can leave the program split.
        found = pullback(cut["dout"])[0] | {"dout": out}
        tails = {x: [(0, a - b, 0) for a, b in zip(arrays[x].shape, y.shape, strict=True)] for x, y in found.items()}
        return {x: jax.lax.pad(y, jnp.zeros((), y.dtype), tails[x]) for x, y in found.items()}

    mesh, specs = make_mesh(2, 4), SPLIT | dict.fromkeys(("query_ids", "key_ids"), P("data", "seq"))
    compiled = calls.quick_jit(both).lower(place(mesh, arrays, specs)).compile()
    found = collectives(compiled)
    assert (found.count(PERMUTE), set(found) - {REDUCE}) == (permutes, {PERMUTE})
    results = compiled(place(mesh, arrays, specs))
    assert results["query"].sharding.is_equivalent_to(NamedSharding(mesh, SPLIT["query"]), 4)
    calls.assert_same(jax.device_get(results), jax.device_get(calls.quick_jit(both)(arrays)))


def run_plainly(arrays: calls.Arrays) -> jax.Array:
    return jax_fastattn.attention(arrays["query"], arrays["key"], arrays["value"], **CAUSAL)


@pytest.mark.parametrize("order", ["forward-mode", "second"])
def test_other_derivatives(order: str) -> None:
    """A tangent goes through the ring, which runs its forward pass again; second derivatives gather."""
    arrays, mesh = rings.draw(12, batch=1), make_mesh(1, 2)
    given = {name: arrays[name] for name in ("query", "key", "value")}

    def derivative(given: calls.Arrays) -> Any:
        def tangent(given: calls.Arrays) -> Any:
            return jax.jvp(run_plainly, (given,), (jax.tree.map(jnp.cos, given),))

        return tangent(given) if order == "forward-mode" else jax.grad(lambda x: jnp.sum(tangent(x)[1]))(given)

    compiled = calls.quick_jit(derivative).lower(place(mesh, given, SPLIT)).compile()
    found = compiled(place(mesh, given, SPLIT))
    calls.assert_same(jax.device_get(found), jax.device_get(calls.quick_jit(derivative)(given)))
    assert ("all-gather" in collectives(compiled)) == (order == "second")


def test_a_layer_scan_with_remat_by_names() -> None:
    """Of a scan over layers, the backward pass runs no forward kernel again, so it has the permutes of one layer."""
    mesh, arrays = make_mesh(1, 2), rings.draw(12, batch=1, heads=(2, 2))
    policy = jax.checkpoint_policies.save_only_these_names("jax_fastattn_out", "jax_fastattn_lse")

    def loss(x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + jax_fastattn.attention(jnp.sin(x), jnp.cos(x), x, **CAUSAL), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, None, length=3)[0] ** 2)

    x = arrays["query"]
    compiled = calls.quick_jit(jax.grad(loss)).lower(place(mesh, {"query": x}, SPLIT)["query"]).compile()
    assert collectives(compiled).count(PERMUTE) == len(BALANCED)
    calls.assert_same(
        jax.device_get(compiled(place(mesh, {"query": x}, SPLIT)["query"])), jax.device_get(jax.jit(jax.grad(loss))(x))
    )


def test_explain_says_what_travels() -> None:
    mesh = make_mesh(1, 4)
    rows = NamedSharding(mesh, P("data", "seq"))
    query, key = (jax.ShapeDtypeStruct((2, 40, heads, 8), jnp.float32, sharding=rows) for heads in (4, 2))
    for options, order in (({}, "in 4 steps;"), (CAUSAL, "in 3 steps, in which devices without work help others;")):
        note = jax_fastattn.explain(query, key, key, **options).note
        assert "the rows are split over 4 devices of mesh axis seq: ring attention " + order in note
        arrays = rings.draw(40)
        mapped = rings.split(4, arrays, **options)
        sizes = rings.permutes(jax.jit(mapped).lower({x: arrays[x] for x in ("query", "key", "value")}).as_text())
        told = re.search(r"at most (\d+) bytes in (\d+) collective permutes forward", note)
        assert told is not None
        assert (sum(sizes), len(sizes)) == tuple(map(int, told.groups()))
    cut = jax.ShapeDtypeStruct((2, 39, 4, 8), jnp.float32, sharding=rows)  # as within a program
    note = jax_fastattn.explain(cut, cut, cut).note
    assert "4 devices of mesh axis seq, with padding at the end of 39 queries and 39 keys: ring attention" in note
    whole = jax.ShapeDtypeStruct((2, 40, 2, 8), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert "keys are whole: nothing is sent forward" in jax_fastattn.explain(query, whole, whole).note
    assert "the query is whole: keys and values are gathered" in jax_fastattn.explain(whole, key, key).note
    assert jax_fastattn.explain(*(jnp.zeros((2, 8, 2, 8)),) * 3).note == ""
