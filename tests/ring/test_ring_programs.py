# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The programs of `ring_attention`: what is sent, how much memory they take, and how JAX transforms them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calls
import jax
import jax.export
import jax.numpy as jnp
import pytest
import rings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import JAX_VERSION

from jax_fastattn import ring_attention
from jax_fastattn.ops.ring.merge import RowResults, merge

CAUSAL: dict[str, Any] = {"is_causal": True}
WINDOW: dict[str, Any] = CAUSAL | {"local_window_size": (9, None)}


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(arrays: calls.Arrays) -> Any:
        given = {name: x for name, x in arrays.items() if name != "dout"}
        out, pullback = jax.vjp(function, given)
        return out, pullback(arrays["dout"])[0]

    return run


# 4 devices with 10 rows each of 2 batch entries; a row of the 2 key/value heads of 8 has 128 bytes, key and value.
KEYS = 2 * 10 * 2 * 16 * 4
QUERIES, LSE = 2 * 10 * 4 * 8 * 4, 2 * 10 * 4 * 4  # outputs are as large as queries
SENT: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    # Queries or keys go there, and results go home; the second step has half of the queries.
    "helped": (
        CAUSAL,
        [max(QUERIES, KEYS), QUERIES + LSE, max(QUERIES // 2, KEYS), (QUERIES + LSE) // 2],
        [3 * QUERIES + LSE, max(QUERIES, KEYS), (3 * QUERIES + LSE) // 2, max(QUERIES // 2, KEYS)],
    ),
    # Step 3 meets all 10 rows, and so do the others.
    "causal": (CAUSAL | {"balance": False}, [KEYS] * 3, [KEYS] * 6),
    "zigzag": (CAUSAL | {"layout": "zigzag"}, [KEYS] * 3, [KEYS] * 6),
    # A window of 9 keys before a query: one neighbor, and 9 of its 10 rows.
    "window": (WINDOW, [KEYS * 9 // 10], [KEYS * 9 // 10] * 2),
}


@pytest.mark.parametrize("name", SENT)
def test_what_a_step_sends(name: str) -> None:
    """One permute a step, of key and value together; backward, or if devices help, one more for results."""
    options, forward, backward = SENT[name]
    arrays = rings.draw(40)
    function = rings.split(4, arrays, **options)
    given = {x: array for x, array in arrays.items() if x != "dout"}
    text = jax.jit(function).lower(given).as_text()
    assert sorted(rings.permutes(text)) == sorted(forward)
    both = jax.jit(with_gradients(function)).lower(arrays).as_text()
    assert sorted(rings.permutes(both)) == sorted(forward + backward)
    assert not any(x in both for x in ("all_gather", "all_to_all"))


def temporary_bytes(size: int, **options: Any) -> int:
    """Temporary memory of one of `size` devices that have 64 rows each."""
    arrays = rings.draw(size * 64, batch=1, heads=(2, 1), head_dims=(64, 64))
    rows = NamedSharding(rings.make_mesh(size), P(None, "seq"))
    shapes = {x: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=rows) for x, array in arrays.items()}
    compiled = calls.quick_jit(with_gradients(rings.split(size, arrays, **options))).lower(shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(JAX_VERSION < (0, 9), reason="XLA of jax 0.8 keeps the keys of all steps on a CPU")
@pytest.mark.parametrize(("balance", "most"), [(False, 1.1), (True, 1.4)])
def test_memory_is_linear_in_the_rows_of_a_device(balance: bool, most: float) -> None:
    """Twice the devices and twice the sequence need no more memory on each.

    If devices help, only from six on are operands of a whole step on their way while results of another one are. From
    nine to twelve devices the memory is the same, and 1.45 times that of four.
    """
    four, eight = (temporary_bytes(size, balance=balance, **CAUSAL) for size in (4, 8))
    assert eight < most * four


def test_remat_by_names_in_a_scan_over_layers() -> None:
    """The backward pass of a layer reads the saved output: it sends what a backward pass sends and no more."""
    size, policy = 2, jax.checkpoint_policies.save_only_these_names("jax_fastattn_out", "jax_fastattn_lse")
    x = rings.draw(12, batch=1, heads=(2, 2))["query"]

    def loss(attend: Callable[..., Any], x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + attend({"query": jnp.sin(x), "key": jnp.cos(x), "value": x}), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, None, length=3)[0] ** 2)

    attend = rings.split(size, {"query": x, "key": x, "value": x}, layout="zigzag", **CAUSAL)
    split = calls.quick_jit(jax.grad(functools.partial(loss, attend)))
    assert len(rings.permutes(split.lower(x).as_text())) == 3
    whole = jax.grad(functools.partial(loss, rings.whole(**CAUSAL)))
    calls.assert_same(jax.device_get(split(x)), jax.device_get(calls.quick_jit(whole)(x)))


@pytest.mark.parametrize("mapped", ["all", "query"])
def test_vmap_of_the_batch(mapped: str) -> None:
    arrays = rings.draw(20, batch=3)
    names = ("query", "key", "value") if mapped == "all" else ("query",)
    given = {x: arrays[x] if x in names else arrays[x][:1] for x in ("query", "key", "value")}
    axes = tuple(0 if x in names else None for x in given)

    def local(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (x if mapped == "all" else x[0] for x in (key, value))
        return jax.vmap(functools.partial(ring_attention, axis_name="seq", **CAUSAL), in_axes=axes)(query, key, value)

    rows = P(None, "seq")
    split = jax.shard_map(local, mesh=rings.make_mesh(2), in_specs=rows, out_specs=rows)
    found = calls.quick_jit(with_gradients(lambda x: split(x["query"], x["key"], x["value"])))(
        given | {"dout": arrays["dout"]}
    )
    repeated = {x: jnp.broadcast_to(array, (3, *array.shape[1:])) for x, array in given.items()}
    expected = calls.quick_jit(with_gradients(rings.whole(**CAUSAL)))(repeated | {"dout": arrays["dout"]})
    calls.assert_same(jax.device_get(found[0]), jax.device_get(expected[0]))
    for name in given:
        total = expected[1][name] if name in names else expected[1][name].sum(0, keepdims=True)
        calls.assert_same(jax.device_get(found[1][name]), jax.device_get(total))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_forward_mode(layout: str) -> None:
    arrays = {x: array for x, array in rings.draw(20, batch=1).items() if x != "dout"}
    arrays["sinks"] = jnp.array([0.5, -1.0, 2.0, 0.0])
    tangents = jax.tree.map(jnp.cos, arrays)

    def derivative(function: Callable[..., Any]) -> Any:
        return jax.device_get(calls.quick_jit(lambda x, y: jax.jvp(function, (x,), (y,)))(arrays, tangents))

    calls.assert_same(derivative(rings.split(2, arrays, layout=layout, **CAUSAL)), derivative(rings.whole(**CAUSAL)))


def test_second_derivatives_are_refused() -> None:
    arrays = {x: array for x, array in rings.draw(20, batch=1).items() if x != "dout"}
    function = rings.split(2, arrays, **CAUSAL)
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))
    with pytest.raises(NotImplementedError, match="has no second derivative; use `jax_fastattn"):
        jax.jvp(slope, (arrays,), (arrays,))


def test_export() -> None:
    """A program of `shard_map` can be exported for as many devices."""
    arrays = {x: array for x, array in rings.draw(20).items() if x != "dout"}
    rows = NamedSharding(rings.make_mesh(2), P(None, "seq"))
    function = jax.jit(rings.split(2, arrays, **CAUSAL), in_shardings=rows)
    exported = jax.export.deserialize(jax.export.export(function)(arrays).serialize())
    assert exported.nr_devices == 2
    found = jax.jit(exported.call)(jax.device_put(arrays, rows))
    calls.assert_same(jax.device_get(found), jax.device_get(jax.jit(rings.whole(**CAUSAL))(arrays)))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("options", [CAUSAL, WINDOW, {}], ids=["causal", "window", "full"])
def test_every_block_runs_a_kernel(
    options: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    arrays = rings.draw(4 * 64, batch=1, heads=(4, 1), head_dims=(64, 64), dtype=jnp.bfloat16)
    text = calls.cuda_text(with_gradients(rings.split(4, arrays, layout=layout, **options)), arrays)
    assert "jax_fastattn_launch" in text  # the XLA path would warn, which is an error here


@pytest.mark.parametrize("shape", [(1, 4, 256, 256), (1, 1, 1, 256), (1, 4, 256, 1)], ids=["pairs", "keys", "rows"])
def test_every_block_with_a_bias_runs_a_kernel(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the gradient of the bias, which a warning would say is left to the XLA path."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    arrays = rings.draw(4 * 64, batch=1, heads=(4, 1), head_dims=(64, 64), dtype=jnp.bfloat16)
    arrays |= {"bias": jnp.zeros(shape, jnp.bfloat16)}
    text = calls.cuda_text(with_gradients(rings.split(4, arrays, **CAUSAL)), arrays)
    assert "jax_fastattn_launch" in text


def test_a_fallback_names_the_line_of_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks are lowered with masks and operands of their own."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    calls.refuse_float32(monkeypatch)
    arrays = {x: array for x, array in rings.draw(20).items() if x != "dout"}

    def local(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        # No other call has this scale: a block may look like a call of another test, whose line it would name.
        return ring_attention(query, key, value, axis_name="seq", scale=0.37, **CAUSAL)

    mapped = jax.shard_map(local, mesh=rings.make_mesh(2), in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    with pytest.warns(UserWarning, match=f"for the call at {re.escape(__file__)}:[0-9]+: the dtype is float32"):
        calls.cuda_text(mapped, *arrays.values())


def test_the_tangent_of_rows_that_have_seen_no_key() -> None:
    """The log-sum-exp of both blocks is -inf: a merge keeps it, and its tangent is finite."""
    rows = RowResults(jnp.zeros((1, 2, 1, 4)), jnp.full((1, 2, 1), -jnp.inf))
    moved = RowResults(jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 2, 1)))
    merged, tangent = jax.jvp(merge, (rows, rows), (moved, moved))
    assert (merged.lse == -jnp.inf).all() and not merged.out.any()
    assert not tangent.lse.any() and not tangent.out.any()
