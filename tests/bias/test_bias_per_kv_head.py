# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Biases with one row for each key/value head: every transformation gives what the bias repeated by query head gives.

Its gradient sums those of the query heads of a group. `test_mask_per_kv_head.py` has masks of this shape.
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
from jax.sharding import AxisType
from test_vmap import EXAMPLES, check_against_a_loop, repeats_keys

from jax_fastattn import attention

CASE = dataclasses.replace(calls.EVERYTHING, bias="bkts", mask="kts")
PLAIN = calls.Case(query_length=5, key_length=7, num_kv_heads=3, group=2, head_dim=8, v_head_dim=4, bias="bkts")
ARRAYS = calls.arrays_of(PLAIN.operands(jax.random.key(0)))


@pytest.mark.parametrize("axes", ["bkts", "kts", "ks", "bkt"])
def test_group_shares_the_row_of_its_key_value_head(axes: str) -> None:
    arrays = calls.arrays_of(dataclasses.replace(PLAIN, bias=axes).operands(jax.random.key(0)))
    assert arrays["bias"].shape[1] == 3

    def loss(bias: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention(**arrays | {"bias": bias})))

    def repeated(bias: jax.Array) -> jax.Array:
        return loss(jnp.repeat(bias, 2, axis=1))

    found, expected = (calls.quick_jit(jax.value_and_grad(f))(arrays["bias"]) for f in (loss, repeated))
    assert jnp.any(found[1])
    calls.assert_same(found, expected)
    moved = jax.random.normal(jax.random.key(1), arrays["bias"].shape)

    def second(function: Any) -> Any:
        return calls.quick_jit(lambda x: jax.jvp(jax.grad(function), (x,), (moved,)))(arrays["bias"])

    calls.assert_same(second(loss), second(repeated))


def test_every_argument_next_to_a_bias_per_key_value_head() -> None:
    calls.check(CASE)


def test_unbatched_call_takes_a_bias_per_key_value_head() -> None:
    found = attention(**{name: x[0] for name, x in ARRAYS.items()})
    calls.assert_same(found, attention(**ARRAYS)[0])


def test_wrong_head_count_of_a_bias_raises() -> None:
    text = r"`bias` .* with N = 2, expected 1 or K = 3 as in `key` or N = 6 as in `query`"
    with pytest.raises(ValueError, match=text):
        attention(**ARRAYS | {"bias": jnp.zeros((2, 2, 5, 7))})


@pytest.mark.parametrize(
    "mapped", [("query",), ("query", "bias"), ("query", "bias", "mask", "sinks"), ("bias",), ("key", "bias")], ids=str
)
def test_vmap_with_a_bias_per_key_value_head(mapped: tuple[str, ...]) -> None:
    check_against_a_loop(CASE, mapped)


def test_vmap_over_the_query_repeats_neither_keys_nor_the_bias() -> None:
    arrays = ARRAYS | {"query": jnp.stack([ARRAYS["query"]] * EXAMPLES)}
    run = jax.vmap(lambda arrays: attention(**arrays), in_axes=({x: 0 if x == "query" else None for x in arrays},))
    text = jax.jit(run).lower(arrays).as_text()
    assert not repeats_keys(text, PLAIN)
    assert "2x3x5x7xf32>" in text
    assert not re.search(rf"tensor<{EXAMPLES}x\S*x5x7xf32>", text)


# Key/value heads, the size of a group, the mesh, and the axes of the bias. The last ones split query heads further.
MESHES = {
    "divides": (4, 3, (2, 4), "bkts"),
    "divides-without-batch": (4, 3, (2, 4), "kts"),
    "three-on-two": (3, 2, (2, 2), "bkts"),
    "further": (2, 4, (1, 8), "bkts"),
    "further-without-batch": (2, 2, (2, 4), "ks"),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", MESHES)
def test_bias_per_key_value_head_is_split_as_the_keys_are(name: str) -> None:
    """Devices that share a key/value head, or entries that share the bias, add up their shares of its gradient."""
    num_kv_heads, group, mesh_shape, bias = MESHES[name]
    case = dataclasses.replace(sharding.PLAIN, num_kv_heads=num_kv_heads, group=group, bias=bias, sinks="n")
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    divides = num_kv_heads % mesh_shape[1] == 0
    split = sharding.SPLIT if divides else sharding.WHOLE_KEY_HEADS | {"bias": ("data", None, None, None)}
    compiled, found = sharding.compile_gradients(case, sharding.placed(sharding.make_mesh(*mesh_shape), arrays, split))
    assert "all-gather" not in sharding.collectives(compiled)
    sharding.assert_right_and_split(case, found)


@pytest.mark.skipif(sharding.JAX_VERSION < (0, 9), reason="jax 0.8 fails on custom_partitioning under Explicit")
def test_bias_per_key_value_head_under_explicit_axes() -> None:
    case = dataclasses.replace(sharding.PLAIN, bias="kts")
    mesh = sharding.make_mesh(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        arrays = sharding.placed(mesh, calls.arrays_of(case.operands(jax.random.key(0))))
        _, found = sharding.compile_gradients(case, arrays)
    sharding.assert_right_and_split(case, found)
