# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What XLA's compiler for GPUs makes of programs with attention calls, for described H100s: no GPU takes part.

It merges and fuses otherwise than XLA for CPUs. How often kernels run, and what is copied around them, shows only here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import calls
import described
import jax
import jax.numpy as jnp
import layers
import pytest
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention

pytestmark = pytest.mark.gpu_compiler

# Launches of a run in the gradient: prepasses, and attention kernels. XLA for GPUs merges equal prepasses of one
# computation; unlike XLA for CPUs it moves nothing out of a loop.
GRADIENTS = {
    "unrolled": (2, 2 * layers.LAYERS),
    # In the backward pass the mask of a layer comes out of a barrier. Nobody needs the output of the last layer.
    "unrolled-checkpoint": (1 + 2 * layers.LAYERS, 3 * layers.LAYERS - 1),
    "scan": (2 * layers.LAYERS, 2 * layers.LAYERS),
    "scan-unrolled": (2, 2 * layers.LAYERS),
    "checkpoint": (3 * layers.LAYERS, 3 * layers.LAYERS),
    "checkpoint-prevent-cse": (3 * layers.LAYERS, 3 * layers.LAYERS),
}


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)


def launches(function: Any, arrays: Sequence[Any]) -> dict[str, int]:
    """Returns how many launches of each kind a run of the compiled function makes."""
    return layers.launches(text_of(described.compiled(function, *arrays)))


def text_of(program: Any) -> str:
    text = program.as_text()
    if text is None:
        pytest.skip(f"compiled, but jax {jax.__version__} gives no text of a program for described GPUs")
    return text


def stack_arrays(size: int = 1, batch: int = 2) -> list[jax.ShapeDtypeStruct]:
    """Returns x, weights and mask of the stacks, the batch split over so many GPUs."""
    specs = P("data"), P(), P("data")
    mesh = described.make_mesh(size)
    return [described.place(x, mesh, spec) for x, spec in zip(layers.shapes(batch), specs, strict=True)]


@pytest.mark.parametrize("name", layers.STACKS)
def test_launches_of_a_forward_pass(name: str) -> None:
    prepasses = 1 if "unrolled" in name else layers.LAYERS
    assert launches(layers.STACKS[name], stack_arrays()) == {"prepass": prepasses, "attention": layers.LAYERS}


@pytest.mark.parametrize("name", layers.STACKS)
def test_launches_of_a_gradient(name: str) -> None:
    prepasses, kernels = GRADIENTS[name]
    found = launches(layers.gradient(layers.STACKS[name]), stack_arrays())
    assert found == {"prepass": prepasses, "attention": kernels}


def test_launches_under_a_mesh() -> None:
    """Each device makes the lists of its own batch entries, once in each pass."""
    prepasses, kernels = GRADIENTS["unrolled"]
    found = launches(layers.gradient(layers.STACKS["unrolled"]), stack_arrays(size=2, batch=4))
    assert found == {"prepass": prepasses, "attention": kernels}


# Of each of two GPUs: 128 MiB of queries, in bfloat16.
RING_SHAPES = [(1, 32768, heads, 128) for heads in (32, 8, 8)]
QUERY_BYTES = 16384 * 32 * 128 * 2


@pytest.mark.parametrize(
    ("options", "most"),
    [
        # The rows that see keys of the other GPU are few, and are updated in the results.
        ({"local_window_size": (4095, 0)}, 0.75),
        ({"is_causal": True}, 2.2),
    ],
    ids=["window", "causal"],
)
def test_rows_of_two_gpus(options: dict[str, Any], most: float) -> None:
    """Nothing is gathered, and temporaries of a forward pass take at most so many times what the queries take."""
    mesh = described.make_mesh(2, "seq")
    arrays = [described.place(jax.ShapeDtypeStruct(x, jnp.bfloat16), mesh, P(None, "seq")) for x in RING_SHAPES]

    def loss(*arrays: jax.Array) -> jax.Array:
        return attention(*arrays, **options).astype(jnp.float32).sum()

    forward = described.compiled(functools.partial(attention, **options), *arrays)
    assert forward.memory_analysis().temp_size_in_bytes < most * QUERY_BYTES
    for program in (forward, described.compiled(jax.grad(loss, (0, 1, 2)), *arrays)):
        text = text_of(program)
        assert "jax_fastattn_launch" in text
        assert "all-gather" not in text


@pytest.mark.parametrize("size", [2, 3, 4])
def test_permutes_of_helpers_are_hidden(size: int) -> None:
    """While a permute runs, a kernel does: opening, a step, or closing, forward and backward."""
    mesh = described.make_mesh(size, "seq")
    shapes = [(1, size * 4096, heads, 128) for heads in (32, 8, 8, 32)]
    arrays = [described.place(jax.ShapeDtypeStruct(x, jnp.bfloat16), mesh, P(None, "seq")) for x in shapes]

    def both(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
        out, pullback = jax.vjp(functools.partial(attention, is_causal=True), query, key, value)
        return out, pullback(dout)

    text = text_of(described.compiled(both, *arrays))
    entry = text[text.index("\nENTRY") :]  # operations in the order in which they run
    # Slices of rows are fused into a launch.
    marks = {
        "kernel": r'"jax_fastattn_launch"|calls=%?dynamic-slice-fusion',
        "start": r" collective-permute-start\(",
        "done": r" collective-permute-done\(",
        "exposed": r" collective-permute\(",
    }
    order = [name for line in entry.splitlines() for name, mark in marks.items() if re.search(mark, line)]
    assert order.count("start") == order.count("done") == 4 * (size // 2)
    assert order.count("kernel") == 2 * (size // 2 + 2)
    assert " ".join(order).count("start kernel done") == order.count("start")
    assert "exposed" not in order


def test_a_donated_cache_is_written_in_place() -> None:
    """A step of decoding copies no key/value cache: temporaries are less than a tenth of it."""
    mesh = described.make_mesh(1)
    shapes = [((8, 1, 32, 128), jnp.bfloat16), *[((8, 8192, 8, 128), jnp.bfloat16)] * 2, ((8,), jnp.int32)]
    arrays = [described.place(jax.ShapeDtypeStruct(*x), mesh, P()) for x in shapes]

    def step(query: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> Any:
        new = query[:, 0, ::4]
        keys, values = (x.at[jnp.arange(8), lengths].set(new) for x in (keys, values))
        out = attention(query, keys, values, key_value_seq_lengths=lengths + 1)
        return keys, values, out

    program = described.compiled(step, *arrays, donate_argnums=(1, 2))
    cache_bytes = 2 * 8 * 8192 * 8 * 128 * 2
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < cache_bytes / 10
    assert memory.alias_size_in_bytes == cache_bytes


def test_a_float32_bias_is_written_down_once() -> None:
    """Two terms in bfloat16 take what it takes itself. XLA would write down a byte for each pair besides."""
    mesh = described.make_mesh(1)
    shapes = [*[((2, 4096, 8, 128), jnp.bfloat16)] * 3, ((1, 8, 4096, 4096), jnp.float32)]
    arrays = [described.place(jax.ShapeDtypeStruct(*x), mesh, P()) for x in shapes]
    temporaries = described.compiled(attention, *arrays).memory_analysis().temp_size_in_bytes
    assert temporaries < 1.1 * arrays[3].size * 4
