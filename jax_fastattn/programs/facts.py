# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the values of a graph depend on, and which of them XLA should compute ahead of a call.

A number is a plane if it reads a captured array and depends on no index of the pair, on one, or on their distance,
taken as far up as its kind stays the kind of an array that it reads: `slopes[h] * (k - q)` reads a plane of heads and
multiplies, while `table[bucket(k - q), h]` is a plane of distances, bucket included. So is what depends on batch entry
or head alone, and what depends on a query or a key alone and is not linear in it.

In a call of packed sequences the batch entry of a function is the number of a sequence, which a row of the packed array
decides: a number of a sequence is one of its queries, or of its keys where it depends on the key as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_fastattn.programs.code import Kind
from jax_fastattn.programs.trace import Graph, Value

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Facts:
    """What a value depends on.

    Attributes:
        depends: names of arguments, and "distance" for key - query.
        affine: a, b, c of `a * query + b * key + c`; None for other values.
        is_own: whether it becomes a plane, if it has a kind.
        of_sequences: whether batch entries are numbers of packed sequences.
    """

    depends: frozenset[str]
    affine: tuple[int, int, int] | None = None
    is_own: bool = False
    of_sequences: bool = False

    @property
    def kind(self) -> Kind | None:
        """Returns the kind of a plane that could hold it; None for a pair of query and key, and for a score."""
        at = self.depends & {"query", "key", "distance"}
        if "score" in self.depends or len(at) > 1:
            return None
        if self.of_sequences and "batch" in self.depends:
            return None if "distance" in at else "key" if "key" in at else "query"
        return next(iter(at)) if at else "head"  # pyright: ignore[reportReturnType] (the three names are kinds)


def facts(graph: Graph, *, of_sequences: bool = False) -> list[Facts]:
    """Returns the facts of each value; see `Facts.of_sequences`."""
    found: list[Facts] = []
    for value in graph.values:
        found.append(replace(_facts_of(graph, value, found, of_sequences), of_sequences=of_sequences))
    return found


def short_read(graph: Graph, share: tuple[int, int], whole: tuple[int, int]) -> tuple[tuple[int, ...], str, int] | None:
    """Returns a read of a captured array that has the rows of a device's share where a row of the whole is the index.

    Args:
        graph: a function of rows of the whole sequence.
        share, whole: how many queries and keys a device has, and all together.

    Returns:
        the shape of the array, the index "q" or "k", and its axis; None if there is no such read. Reads by other
        indices than a row itself are not found.
    """
    found = facts(graph)
    for value in graph.values:
        if value.op != "dynamic_slice" or found[value.args[0]].kind != "head":
            continue
        shape = graph.values[value.args[0]].shape
        for axis, start in enumerate(value.args[1:]):
            affine = found[counted(graph, start)].affine
            for name, row, own, all_rows in zip("qk", ((1, 0, 0), (0, 1, 0)), share, whole, strict=True):
                if affine == row and shape[axis] == own < all_rows:
                    return shape, name, axis
    return None


def counted(graph: Graph, index: int) -> int:
    """Returns an index as it was before JAX let negative ones count from the end."""
    value = graph.values[index]
    if value.op == "select_n" and graph.values[value.args[0]].op == "lt":
        return graph.values[value.args[0]].args[0]
    return index


def _facts_of(graph: Graph, value: Value, before: Sequence[Facts], of_sequences: bool) -> Facts:
    if value.op == "captured":
        return Facts(frozenset(), is_own=True)
    if value.op == "constant":
        return Facts(frozenset(), affine=None if value.is_float or value.dtype == np.bool_ else (0, 0, value.number))
    if value.primitive is None:
        affine = {"query": (1, 0, 0), "key": (0, 1, 0)}.get(value.op)
        return Facts(frozenset([value.op]), affine, is_own=value.op in ("batch", "head"))
    args = [before[x] for x in value.args]
    affine = _affine(value, args)
    if affine is not None:
        return Facts(_indices(affine), affine)
    depends = frozenset[str]().union(*(x.depends for x in args))
    if value.op in COMPARISONS and args[0].affine is not None and args[1].affine is not None:
        depends = _indices(_combined(args[0].affine, args[1].affine, -1))
    facts = Facts(depends, of_sequences=of_sequences)
    reads = any(graph.values[x].shape for x in value.args)
    is_far_up = any(x.is_own and x.kind == facts.kind for x in args)
    is_bool = value.dtype == np.bool_
    saves = bool(depends) and (facts.kind == "head" or (facts.kind in ("query", "key") and not is_bool))
    return Facts(depends, is_own=reads or is_far_up or (saves and not value.shape))


def _indices(affine: tuple[int, int, int]) -> frozenset[str]:
    a, b, _ = affine
    return frozenset(["distance"] if a == -b != 0 else [x for x, n in (("query", a), ("key", b)) if n])


def _affine(value: Value, args: Sequence[Facts]) -> tuple[int, int, int] | None:
    if value.shape or value.dtype not in (np.int32, np.int64) or not args:
        return None
    forms = [x.affine for x in args if x.affine is not None]
    if len(forms) != len(args):
        return None
    if value.op in ("add", "sub"):
        sign = 1 if value.op == "add" else -1
        return _combined(forms[0], forms[1], sign)
    if value.op == "neg":
        return _combined((0, 0, 0), forms[0], -1)
    if value.op == "mul":
        for x, y in (forms, forms[::-1]):
            if x[:2] == (0, 0):
                return _combined((0, 0, 0), y, x[2])
    return forms[0] if value.op == "convert_element_type" else None


def _combined(x: tuple[int, int, int], y: tuple[int, int, int], factor: int) -> tuple[int, int, int]:
    return x[0] + factor * y[0], x[1] + factor * y[1], x[2] + factor * y[2]
