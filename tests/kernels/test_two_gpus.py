# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels on two GPUs: with collectives in one program, with a mask or ids that a mesh splits, split rows, dropout."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from testing.combinations import inputs
from testing.poison import poison

import jax_fastattn
from jax_fastattn.cases.case import Case

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import sys
import parallel
found = parallel.block(int(sys.argv[1]), 512)
assert not found["gathered"], found
assert max(found["relative_difference"].values()) < 0.01, found
"""


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kv_heads", (1, 3))
def test_kernels_that_are_first_used_beside_a_collective(kv_heads: int) -> None:
    """Two H100s waited for each other for ever where a kernel was loaded while a collective ran."""
    command = [sys.executable, "-c", PROGRAM, str(kv_heads)]
    subprocess.run(command, cwd=BENCHMARKS, timeout=300, check=True)


_BASE = Case("bfloat16", 4, 257, 321, num_kv_heads=2, group=2, head_dim=64)
# Each hides rows from everybody.
CASES = {
    "mask": Case(**vars(_BASE) | {"mask": "bnts", "mask_density": 0.01}),
    "broadcast-mask": Case(**vars(_BASE) | {"mask": "ts", "mask_density": 0.003}),
    "ids": Case(**vars(_BASE) | {"segments": 4, "is_causal": True}),
}
# How a mesh of two devices splits axes, by letter.
SPLITS = {"batch": "B", "heads": "NK"}


@functools.partial(jax.jit, static_argnames=("is_causal", "implementation"))
def gradients(arrays: dict[str, jax.Array], dout: jax.Array, **options: Any) -> list[jax.Array]:
    """Returns output and gradients of the public call."""

    def attend(*qkv: jax.Array) -> jax.Array:
        ids = (arrays["query_segment_ids"], arrays["key_value_segment_ids"]) if "query_segment_ids" in arrays else None
        return jax_fastattn.attention(*qkv, mask=arrays.get("mask"), segment_ids=ids, **options)

    out, pullback = jax.vjp(attend, *(arrays[name] for name in ("query", "key", "value")))
    return [out, *pullback(dout)]


@pytest.mark.numbers
@pytest.mark.parametrize("implementation", ["xla", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_masks_and_ids_are_split(name: str, split: str, implementation: str) -> None:
    """Two devices compute what one does, without exchanging activations; NaN in hidden rows stays there."""
    case = CASES[name]
    spec, operands, dout, _ = inputs(case)
    poisoned, dout, _ = poison(spec, operands, dout)
    assert np.isnan(np.asarray(poisoned.query)).any() and np.isnan(np.asarray(poisoned.key)).any()
    axes = {"query": "BTNH", "key": "BSKH", "value": "BSKH", "mask": "BNTS", "dout": "BTNH"}
    axes |= {"query_segment_ids": "BT", "key_value_segment_ids": "BS"}
    devices = jax.devices("cpu" if implementation == "xla" else "gpu")[:2]
    arrays = {x: array for x, array in poisoned._asdict().items() if array is not None} | {"dout": dout}
    results, programs = [], []
    for count in (1, 2):
        mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:count])
        placed = {}
        for of, array in arrays.items():
            sizes = zip(axes[of], array.shape, strict=True)
            layout = P(*("x" if letter in SPLITS[split] and size > 1 else None for letter, size in sizes))
            placed[of] = jax.device_put(array, NamedSharding(mesh, layout))
        options = {"is_causal": case.is_causal, "implementation": implementation}
        program = gradients.lower(placed, placed["dout"], **options).compile()
        results.append([np.asarray(jnp.asarray(x, jnp.float32)) for x in program(placed, placed["dout"])])
        programs.append(program.as_text() or "")
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(two, one, atol=0.01 * np.abs(one).max())
        assert np.abs(one).max() > 0.1
    assert not any(word in programs[1] for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    if implementation == "cuda":
        assert all(program.count('custom_call_target="jax_fastattn_launch"') == 4 for program in programs)


# What runs on two devices that have half of the rows each, and the collectives that it needs.
ROWS = P(None, "x")
LONG = {
    "automatic": (None, {}, "collective-permute"),
    "zigzag": (jax_fastattn.ring_attention, {"layout": "zigzag"}, "collective-permute"),
    "window": (jax_fastattn.ring_attention, {"local_window_size": (100, 0)}, "collective-permute"),
    "all-to-all": (jax_fastattn.all_to_all_attention, {}, "all-to-all"),
}


def _split(function: Any, options: dict[str, Any], shared: dict[str, Any], mesh: Mesh) -> Any:
    """Returns attention over rows that a mesh splits: a function inside of `shard_map`, or for None under `jit`."""
    if function is None:
        return functools.partial(jax_fastattn.attention, **shared)
    is_zigzag, local = "layout" in options, functools.partial(function, axis_name="x", **shared, **options)

    def split(*qkv: jax.Array) -> jax.Array:
        mapped = jax.shard_map(lambda *x: local(*x), mesh=mesh, in_specs=ROWS, out_specs=ROWS)
        out = mapped(*(jax_fastattn.zigzag(x, 2) if is_zigzag else x for x in qkv))
        return jax_fastattn.unzigzag(out, 2) if is_zigzag else out

    return split


@pytest.mark.numbers
@pytest.mark.parametrize("implementation", ["xla", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize("name", LONG)
def test_rows_are_split(name: str, implementation: str) -> None:
    """Two devices compute what one does, forward and backward, and gather nothing."""
    function, options, collective = LONG[name]
    case = Case(**vars(_BASE) | {"query_length": 512, "key_length": 512})
    _, operands, dout, _ = inputs(case)
    arrays = [operands.query, operands.key, operands.value, dout]
    devices = jax.devices("cpu" if implementation == "xla" else "gpu")[:2]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    shared = {"is_causal": True, "implementation": implementation}
    is_zigzag = "layout" in options

    def whole(*qkv: jax.Array) -> jax.Array:
        window = {x: y for x, y in options.items() if x == "local_window_size"}
        return jax_fastattn.attention(*qkv, **shared, **window)

    def run(attend: Any, placed: list[jax.Array]) -> tuple[list[np.ndarray], str]:
        def both(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> list[jax.Array]:
            out, pullback = jax.vjp(attend, query, key, value)
            return [out, *pullback(dout)]

        program = jax.jit(both).lower(*placed).compile()
        return [np.asarray(jnp.asarray(x, jnp.float32)) for x in program(*placed)], program.as_text() or ""

    expected, _ = run(whole, jax.device_put(arrays, devices[0]))
    found, program = run(_split(function, options, shared, mesh), jax.device_put(arrays, NamedSharding(mesh, ROWS)))
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, atol=0.02 * np.abs(one).max())
        assert np.abs(one).max() > 0.1
    assert collective in program
    assert is_zigzag or "all-gather" not in program


@pytest.mark.numbers
@pytest.mark.parametrize("implementation", [pytest.param("cuda", marks=pytest.mark.multi_gpu)])
@pytest.mark.parametrize("name", ["automatic", "ring", "zigzag", "all-to-all"])
def test_masks_of_split_rows(name: str, implementation: str) -> None:
    """Two devices keep what `dropout_mask` keeps, forward and backward.

    Values and cotangents are blocks of an identity, so that each weight is an element of the output and of the gradient
    of the values.
    """
    batch, rows, heads, head_dim, rate, key = 2, 512, 4, 64, 0.3, jax.random.key(5)
    function, options, _ = LONG[name] if name != "ring" else (jax_fastattn.ring_attention, {}, "")
    devices = jax.devices("cpu" if implementation == "xla" else "gpu")[:2]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    placed = NamedSharding(mesh, ROWS)
    shared = {"is_causal": True, "implementation": implementation, "dropout_rate": rate, "dropout_key": key}
    shape = batch, rows, heads, head_dim
    query, keys = (0.1 * jax.random.normal(x, shape, jnp.bfloat16) for x in jax.random.split(jax.random.key(0)))

    split = _split(function, options, shared, mesh)

    def attend(*qkv: jax.Array) -> jax.Array:
        return split(*(jax.lax.with_sharding_constraint(x, placed) for x in qkv))

    @jax.jit
    def kept(query: jax.Array, keys: jax.Array, first: jax.Array) -> list[jax.Array]:
        block = jax.nn.one_hot(jnp.arange(rows) - first, head_dim, dtype=query.dtype)
        block = jnp.broadcast_to(block[None, :, None], shape)
        out, pull = jax.vjp(lambda value: attend(query, keys, value), block)
        return [jnp.moveaxis(x, 1, 2) != 0 for x in (out, *pull(block))]

    query, keys = jax.device_put((query, keys), placed)
    found = [jax.device_get(kept(query, keys, jnp.int32(first))) for first in range(0, rows, head_dim)]
    of_forward, of_backward = (np.concatenate(x, axis=-1) for x in zip(*found, strict=True))
    wanted = np.tril(jax_fastattn.dropout_mask(key, rate, (batch, heads, rows, rows)))
    for seen in (of_forward, of_backward.swapaxes(2, 3)):
        wrong = int((seen != wanted).sum())
        assert wrong == 0, f"{wrong} of {wanted.size} decisions are wrong"
