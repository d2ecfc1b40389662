# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Partitioning under a mesh: batch and heads split, everything else is whole on each device.

One description serves Shardy (`sharding_rule`), GSPMD (`infer_sharding_from_operands`) and the partition callback:
a string of axis letters per array, as in spec.py; `N` and `K` are the query and key/value heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_fastattn._compat import Primitive
from jax_fastattn.ops import abstract

OPERAND_AXES = {
    "query": "BTNH",
    "key": "BSKH",
    "value": "BSKD",
    "bias": "BNTS",
    "mask": "BNTS",
    "query_seq_lengths": "B",
    "key_value_seq_lengths": "B",
    "query_offset": "BT",
    "query_segment_ids": "BT",
    "key_value_segment_ids": "BS",
    "sinks": "BN",
    "scale": "BN",
}


sum_shares_p = Primitive("jax_fastattn_sum_shares")
sum_shares_p.def_abstract_eval(lambda shares: abstract.like(shares, shares.shape[1:]))
mlir.register_lowering(
    sum_shares_p,
    lambda ctx, shares: abstract.lower_on_one_device(lambda x: (x.sum(axis=0),), ctx, shares),
)


def partitioned(
    local: Callable[..., Any], operand_axes: Sequence[str], result_axes: Sequence[str]
) -> Callable[..., Any]:
    """`local`, which works on any number of batch entries and heads, run by each device on its own.

    A result whose batch or head axis is of size 1 while that axis is split is a sum over it: the shares are added up.

    Args:
        local: one device's share of the work, from arrays to results.
        operand_axes, result_axes: axis letters of each array; trailing letters that an array lacks are ignored.
    """

    def split(mesh: Mesh, arg_shapes: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """Mesh axes that split "B" and "N" (and "K" with it), as the query is split; only where that divides evenly."""
        query, key = arg_shapes[0], arg_shapes[1]
        spec = tuple(query.sharding.spec) + (None,) * (4 - len(query.sharding.spec))
        sizes = {"B": query.shape[0], "N": key.shape[2]}
        found = {"B": _names(spec[0]), "N": _names(spec[2])}
        return {letter: axes if sizes[letter] % _size(mesh, axes) == 0 else () for letter, axes in found.items()}

    def shardings(mesh: Mesh, axes: dict[str, tuple[str, ...]], letters: str, shape: Sequence[int]) -> NamedSharding:
        names = [
            axes.get("N" if letter == "K" else letter, ()) if size > 1 else ()
            for letter, size in zip(letters, shape, strict=False)
        ]
        return NamedSharding(mesh, PartitionSpec(*(name or None for name in names)))

    def unsplit_axes(axes: dict[str, tuple[str, ...]], letters: str, shape: Sequence[int]) -> tuple[str, ...]:
        return tuple(n for letter, size in zip(letters, shape, strict=True) if size == 1 for n in axes.get(letter, ()))

    def infer(mesh: Mesh, arg_shapes: Sequence[Any], result_shapes: Sequence[Any]) -> list[NamedSharding]:
        axes = split(mesh, arg_shapes)
        return [shardings(mesh, axes, a, x.shape) for a, x in zip(result_axes, result_shapes, strict=True)]

    def partition(mesh: Mesh, arg_shapes: Sequence[Any], result_shapes: Sequence[Any]) -> Any:
        axes = split(mesh, arg_shapes)
        args = tuple(shardings(mesh, axes, a, x.shape) for a, x in zip(operand_axes, arg_shapes, strict=True))

        def lower(*arrays: jax.Array) -> Any:
            results = zip(result_axes, result_shapes, local(*arrays), strict=True)
            return [_sum_over(x, unsplit_axes(axes, letters, whole.shape)) for letters, whole, x in results]

        return mesh, lower, infer(mesh, arg_shapes, result_shapes), args

    def rule(mesh: Mesh, operand_types: Sequence[Any], result_types: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        del mesh
        return shardy_rule(
            [(a, tuple(t.shape)) for a, t in zip(operand_axes, operand_types, strict=True)],
            [(a, tuple(t.shape)) for a, t in zip(result_axes, result_types, strict=True)],
        )

    function = custom_partitioning(local)
    function.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return function


def shardy_rule(
    operands: Sequence[tuple[str, tuple[int, ...]]], results: Sequence[tuple[str, tuple[int, ...]]]
) -> tuple[str, dict[str, Any]]:
    """The einsum-like rule that says which axes are the same, and that all but batch and heads stay whole.

    Query heads are key/value heads times the group, `(k g)`. An axis of size 1 that broadcasts has a factor of its own.
    """
    num_heads, num_kv_heads = operands[0][1][2], operands[1][1][2]
    grouped = num_heads > num_kv_heads > 1
    heads = {"N": "(k g)" if grouped else "k" if num_kv_heads > 1 else "g", "K": "k"}
    fresh = itertools.count()
    sizes = {"B": operands[0][1][0], "N": num_heads, "K": num_kv_heads}

    def term(letters: str, shape: tuple[int, ...]) -> str:
        factors = []
        for letter, size in zip(letters, shape, strict=False):
            alone = letter not in "BNK" or size != sizes[letter] or (letter == "K" and num_kv_heads == 1)
            factors.append(f"i{next(fresh)}" if alone else heads.get(letter, letter.lower()))
        return " ".join(factors) if factors else ""

    arrows = [", ".join(term(*x) for x in group) for group in (operands, results)]
    options = {"g": num_heads // num_kv_heads} if grouped else {}
    return " -> ".join(arrows), options


def _sum_over(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Sum of the devices' shares."""
    if not names:
        return x
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        # XLA refuses the lowering of a psum here: jax puts sharding constraints into its reduction (up to jax 0.12).
        return sum_shares_p.bind(jax.lax.all_gather(x, names))
    return jax.lax.psum(x, names)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _size(mesh: Mesh, names: tuple[str, ...]) -> int:
    size = 1
    for name in names:
        size *= mesh.shape[name]
    return size
