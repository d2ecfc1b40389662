# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Stacks of layers whose attention calls share one mask, and how often a run of the compiled stack launches kernels.

Tests with XLA for CPUs and for GPUs have these stacks in common. `tests/test_merged_prepasses.py` says what XLA does.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn import attention

LAYERS = 3

# A layer maps x `[B, T, N, H]` to its like, given a weight `[H, H]` of its own and a mask that all layers share.
Layer = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def layer(x: jax.Array, weight: jax.Array, mask: jax.Array) -> jax.Array:
    query = x @ weight
    return x + attention(query, x, x, mask=mask, implementation="cuda") @ weight


def unrolled(layer: Layer, x: jax.Array, weights: jax.Array, mask: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = layer(x, weights[i], mask)
    return x


def scanned(layer: Layer, x: jax.Array, weights: jax.Array, mask: jax.Array, unroll: int = 1) -> jax.Array:
    return jax.lax.scan(lambda x, weight: (layer(x, weight, mask), None), x, weights, unroll=unroll)[0]


STACKS: dict[str, Callable[..., jax.Array]] = {
    "unrolled": functools.partial(unrolled, layer),
    "unrolled-checkpoint": functools.partial(unrolled, jax.checkpoint(layer)),
    "scan": functools.partial(scanned, layer),
    "scan-unrolled": functools.partial(scanned, layer, unroll=LAYERS),
    "checkpoint": functools.partial(scanned, jax.checkpoint(layer, prevent_cse=False)),
    "checkpoint-prevent-cse": functools.partial(scanned, jax.checkpoint(layer)),
}


def shapes(batch: int = 2) -> list[jax.ShapeDtypeStruct]:
    """Returns x, weights and mask."""
    return [
        jax.ShapeDtypeStruct((batch, 512, 4, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((LAYERS, 64, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, 1, 512, 512), jnp.bool),
    ]


def gradient(stack: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns a function of x, weights and mask: the gradients of the former two."""

    def loss(x: jax.Array, weights: jax.Array, mask: jax.Array) -> jax.Array:
        return stack(x, weights, mask).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1))


def launches(compiled: str) -> dict[str, int]:
    """Returns how many launches of each kind one run of a compiled program makes.

    Args:
        compiled: the optimized HLO, in which every loop is a loop over the layers.

    Returns:
        The numbers of launches of "prepass", all of whose results are int32, and of "attention".
    """
    parts = re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \(.*\{\n)", compiled)
    bodies = {re.match(r"(?:ENTRY )?%?([\w.-]+)", part)[1]: part for part in parts}  # pyright: ignore[reportOptionalSubscript]
    entry = next(name for name, part in bodies.items() if part.startswith("ENTRY "))

    def count(name: str) -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        for line in bodies[name].splitlines():
            if 'custom_call_target="jax_fastattn_launch"' in line:
                dtypes = set(re.findall(r"(\w+)\[", line.partition(" custom-call(")[0].partition(" = ")[2]))
                found["prepass" if dtypes == {"s32"} else "attention"] += 1
            for kind, called in re.findall(r"\b(body|calls|to_apply)=%?([\w.-]+)", line):
                for what, number in count(called).items():
                    found[what] += number * (LAYERS if kind == "body" else 1)
        return found

    return dict(count(entry))
