# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Masks with one row for each key/value head: every transformation gives what the mask repeated by query head gives.

That they mean what the reference means, in chunks too, is tested where `cases.CPU_CASES` is.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import test_sharding as sharding
from jax.sharding import AxisType, PartitionSpec
from test_flax import bind
from test_vmap import EXAMPLES, check_against_a_loop, repeats_keys

from jax_fastattn import attention
from jax_fastattn.ops.sharding import own_letters

CASE = dataclasses.replace(calls.EVERYTHING, mask="bkts")
PLAIN = calls.Case(query_length=5, key_length=7, num_kv_heads=3, group=2, head_dim=8, v_head_dim=4, mask="bkts")
Q, K, V, _, MASK, *_ = PLAIN.operands(jax.random.key(0))


def results(arrays: calls.Arrays) -> Any:
    out, vjp = jax.vjp(lambda *x: attention(*x, mask=arrays["mask"]), *(arrays[x] for x in ("query", "key", "value")))
    return out, *vjp(jnp.sin(out))


@pytest.mark.parametrize("axes", ["bkts", "kts", "ks", "bkt"])
def test_group_shares_the_row_of_its_key_value_head(axes: str) -> None:
    case = dataclasses.replace(PLAIN, mask=axes)
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    assert arrays["mask"].shape[1] == 3
    repeated = arrays | {"mask": jnp.repeat(arrays["mask"], 2, axis=1)}
    calls.assert_same(jax.jit(results)(arrays), jax.jit(results)(repeated), tolerance=0.0)


def test_every_argument_beside_a_mask_per_key_value_head() -> None:
    calls.check(CASE)


def test_unbatched_call_takes_a_mask_per_key_value_head() -> None:
    found = attention(Q[0], K[0], V[0], mask=MASK[0])
    calls.assert_same(found, attention(Q, K, V, mask=MASK)[0])
    calls.assert_same(found, attention(Q[0], K[0], V[0], mask=MASK[:1]))


WRONG = {
    "heads": (Q, jnp.ones((2, 2, 5, 7), bool), r"with N = 2, expected 1 or K = 3 as in `key` or N = 6 as in `query`"),
    "unbatched-heads": (Q[0], jnp.ones((2, 5, 7), bool), r"with N = 2, expected 1 or K = 3 as in `key` or N = 6"),
    # Three dimensions may be [B, T, S] as well.
    "batched-call": (Q, jnp.ones((3, 5, 7), bool), r"with N = 3, expected 1 or N = 6 as in `query`; it must"),
    "one-key-value-head": (Q, jnp.ones((2, 3, 5, 7), bool), r"with N = 3, expected 1 or N = 6 as in `query`; it must"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_head_count_of_a_mask_raises(name: str) -> None:
    query, mask, text = WRONG[name]
    key, value = (x[:, :, :1] if name.startswith("one") else x if query is Q else x[0] for x in (K, V))
    with pytest.raises(ValueError, match=text):
        attention(query, key, value, mask=mask)


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("mask", "mapped"),
    [
        ("bkts", ("query",)),
        ("kts", ("query", "mask")),
        ("bkts", ("query", "bias", "mask", "sinks")),
        ("bkts", ("mask",)),
        ("ks", ("key", "mask")),
    ],
    ids=str,
)
def test_vmap_with_a_mask_per_key_value_head(mask: str, mapped: tuple[str, ...]) -> None:
    check_against_a_loop(dataclasses.replace(CASE, mask=mask), mapped)


@pytest.mark.parametrize("mask", ["bkts", "kts"])
@pytest.mark.parametrize("group", [2, 1])
def test_vmap_over_the_query_repeats_neither_keys_nor_the_mask(group: int, mask: str) -> None:
    """The mapped axis becomes query heads, which share the rows of their key/value heads."""
    case = dataclasses.replace(PLAIN, group=group, mask=mask)
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    arrays["query"] = jnp.stack([arrays["query"]] * EXAMPLES)
    run = jax.vmap(lambda arrays: attention(**arrays), in_axes=({x: 0 if x == "query" else None for x in arrays},))
    text = jax.jit(run).lower(arrays).as_text()
    assert not repeats_keys(text, case)
    assert "5x7xi1>" in text
    assert not re.search(rf"tensor<{EXAMPLES}x\S*xi1>", text)


@pytest.mark.parametrize("mapped", [False, True], ids=["shared", "mapped"])
def test_vmap_of_vmap_with_a_mask_per_key_value_head(mapped: bool) -> None:
    queries, masks = (jnp.stack([jnp.roll(x, i, 3) for i in range(EXAMPLES)]) for x in (Q, MASK))
    queries = jnp.stack([queries, -queries])
    axis = 0 if mapped else None
    inner = jax.vmap(lambda query, mask: attention(query, K, V, mask=mask), in_axes=(0, axis))
    found = jax.jit(jax.vmap(inner, in_axes=(0, None)))(queries, masks if mapped else MASK)
    for i in range(2):
        for j in range(EXAMPLES):
            one = attention(queries[i, j], K, V, mask=masks[j] if mapped else MASK)
            calls.assert_same(found[i, j], one)


# Key/value heads, the size of a group, and the mesh: as in `test_sharding`, the last ones split query heads further.
MESHES = {
    "divides": (4, 3, (2, 4)),
    "three-on-two": (3, 2, (2, 2)),
    "further": (2, 4, (1, 8)),
    "further-with-batch": (2, 2, (2, 4)),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", MESHES)
def test_mask_per_key_value_head_is_split_as_the_keys_are(name: str) -> None:
    num_kv_heads, group, mesh_shape = MESHES[name]
    case = dataclasses.replace(sharding.PLAIN, num_kv_heads=num_kv_heads, group=group, mask="bkts", sinks="n")
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    divides = num_kv_heads % mesh_shape[1] == 0
    split = sharding.SPLIT if divides else sharding.WHOLE_KEY_HEADS | {"mask": ("data", None, None, None)}
    compiled, found = sharding.compile_gradients(case, sharding.placed(sharding.make_mesh(*mesh_shape), arrays, split))
    assert "all-gather" not in sharding.collectives(compiled)
    sharding.assert_right_and_split(case, found)


def test_letters_of_a_mask_per_key_value_head() -> None:
    """An axis of size 1 broadcasts, whatever the number of key/value heads."""
    shapes = {(2, 3, 5, 7): "BKTS", (2, 6, 5, 7): "BNTS", (2, 1, 5, 7): "BNTS"}
    assert {shape: own_letters("BNTS", shape, (6, 3)) for shape in shapes} == shapes
    assert own_letters("BNTS", (2, 1, 5, 7), (6, 1)) == own_letters("BNTS", (2, 6, 5, 7), (6, 6)) == "BNTS"
    assert own_letters("VBNTS", (4, 2, 3, 5, 7), (6, 3)) == "VBKTS"


@pytest.mark.skipif(sharding.JAX_VERSION < (0, 9), reason="jax 0.8 fails on custom_partitioning under Explicit")
@pytest.mark.parametrize("mapped", [(), ("mask",), ("query",), ("query", "mask")], ids=str)
def test_mask_per_key_value_head_under_explicit_axes(mapped: tuple[str, ...]) -> None:
    case = dataclasses.replace(sharding.PLAIN, mask="bkts")
    one_device = calls.arrays_of(case.operands(jax.random.key(0)))
    one_device |= {name: jnp.stack([jnp.roll(one_device[name], i, 2) for i in range(3)]) for name in mapped}
    run = jax.vmap(results, in_axes=({name: 0 if name in mapped else None for name in one_device},))
    run = calls.quick_jit(run if mapped else results)
    expected = jax.device_get(run(one_device))

    def put(name: str, x: jax.Array) -> jax.Array:
        heads = ("data", "model") if name == "mask" else ("data", None, "model")
        return jax.device_put(x, PartitionSpec(*(None,) * (name in mapped), *heads))

    with jax.set_mesh(sharding.make_mesh(kind=AxisType.Explicit)):
        found = run({name: put(name, x) for name, x in one_device.items()})
    calls.assert_same(jax.device_get(found), expected)


def test_flax_takes_a_mask_per_key_value_head() -> None:
    """With dropout, too."""
    queries, keys, values = (jnp.stack([x, -x]) for x in (Q, K, Q[:, :3].repeat(3, 1)[:, :7, :3]))
    mask = jnp.stack([MASK, ~MASK]).at[..., 0].set(True)
    whole = jnp.repeat(mask, 2, axis=-3)
    calls.assert_same(bind()(queries, keys, values, mask=mask), bind()(queries, keys, values, mask=whole))
    dropout = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0)}
    found = bind()(queries, keys, values, mask=mask, **dropout)
    calls.assert_same(found, bind()(queries, keys, values, mask=whole, **dropout))
