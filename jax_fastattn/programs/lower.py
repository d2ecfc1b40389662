# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts a graph into planes and code.

`facts.py` says which numbers are planes. The rest becomes instructions, or has no code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.programs.analysis import INEXACT
from jax_fastattn.programs.code import Builder, Code, Plane
from jax_fastattn.programs.evaluation import OPS, evaluate_code
from jax_fastattn.programs.facts import COMPARISONS, Facts, facts
from jax_fastattn.programs.trace import DERIVATIVES, Graph, Value, trace

PAIRS = (
    "a captured array is indexed by query and key together, other than by their difference, or by the score; pass "
    "`bias=` with the array that it would give, of shape `[b, n, T, S]` with axes of size 1 where nothing changes"
)
FLOATS_OF_PAIRS = (
    "a captured array of floats is indexed by query and key together, other than by their difference; compare it with "
    "a number ahead of the call, and index the booleans"
)
DIVISOR = "integers are divided by positive numbers alone that are known when a call is traced"

_WORDS = {"select_n": "select", "add_any": "add"}
_SAME = OPS - {"to_int", "select", "rem"}
# These are right for any integers that int32 holds. Others may leave the range of a narrower type.
_EXACT = (*COMPARISONS, "max", "min", "select", "and", "or", "convert_element_type")
_RESHAPES = ("squeeze", "reshape", "broadcast_in_dim")


class NoCodeError(Exception):
    """A function has no code; the text says why."""


@dataclass(frozen=True)
class Cut:
    """A plane as a value of a graph.

    Attributes:
        value: the number, or of a table the array.
        plane: what a code knows of it.
        starts: of a table, for each axis of the array the value that is its index, or None for an axis that stays.
    """

    value: int
    plane: Plane
    starts: tuple[int | None, ...] = ()


def lower_mask(graph: Graph, *, of_sequences: bool = False) -> tuple[Code, list[Cut]]:
    """Returns the code of a mask function and its planes.

    Args:
        of_sequences: see `Facts.of_sequences`.

    Raises:
        NoCodeError: there is none.
    """
    lowering = _Lowering(graph, has_tables=True, of_sequences=of_sequences)
    result = lowering.lower(graph.results[0])
    return lowering.builder.code([result], [x.plane for x in lowering.cuts]), lowering.cuts


def lower_score(graph: Graph, wide: Any, *, of_sequences: bool = False) -> tuple[Code, list[Cut]]:
    """Returns the code of a score function, its derivatives, and its planes.

    Args:
        wide: the dtype of floats.
        of_sequences: see `Facts.of_sequences`.

    Raises:
        NoCodeError: there is none.
    """
    lowering = _Lowering(graph, of_sequences=of_sequences)
    result = lowering.lower(graph.results[0])
    code = lowering.builder.code([result], [x.plane for x in lowering.cuts])
    return _with_derivatives(code, np.dtype(wide)), lowering.cuts


@functools.lru_cache(maxsize=1024)
def _with_derivatives(code: Code, wide: Any) -> Code:
    """Adds the derivatives of the result by the score and by planes of floats."""
    floats = [i for i, plane in enumerate(code.planes) if plane.dtype == "f"]
    names = [f"plane{i}" for i in range(len(code.planes))]

    def derivatives(score: Any, query: Any, key: Any, *planes: Any) -> list[Any]:
        def value(score: Any, moved: list[Any]) -> Any:
            given = dict(enumerate(planes)) | dict(zip(floats, moved, strict=True))
            leaves = {"score": score, "query": query, "key": key}
            return evaluate_code(code, leaves, list(given.values()))[0]

        found, (dscore, dplanes) = jax.value_and_grad(value, argnums=(0, 1))(score, [planes[i] for i in floats])
        return [found, dscore, *dplanes]

    dtypes = [wide if plane.dtype == "f" else np.int32 for plane in code.planes]
    arguments = {"score": wide, "query": np.int32, "key": np.int32, **dict(zip(names, dtypes, strict=True))}
    # Under a mesh JAX puts reductions and reshards into a derivative.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        graph, _ = trace(derivatives, arguments)
    lowering = _Lowering(graph, has_planes=False)
    results = [lowering.lower(i) for i in graph.results]
    by_plane = dict(zip(floats, results[2:], strict=True))
    ordered = [*results[:2], *(by_plane.get(i, -1) for i in range(len(code.planes)))]
    return lowering.builder.code(ordered, code.planes)


class _Lowering:
    """Makes the code of values of a graph, and finds the planes."""

    def __init__(
        self, graph: Graph, *, has_planes: bool = True, has_tables: bool = False, of_sequences: bool = False
    ) -> None:
        """Makes an empty code.

        Args:
            has_planes: whether what may be a plane is one. The derivatives of a code read the planes of that code.
            has_tables: whether a number may be read of an array at an index that depends on query and key.
            of_sequences: see `Facts.of_sequences`. No plane has numbers of its own for each batch entry then.
        """
        self.builder = Builder()
        self.cuts: list[Cut] = []
        self._has_planes, self._of_sequences = has_planes, of_sequences
        self._graph, self._facts, self._has_tables = graph, facts(graph, of_sequences=of_sequences), has_tables
        self._memo: dict[int, int] = {}

    def lower(self, i: int) -> int:
        """Returns the value of the code that is a value of the graph."""
        if i not in self._memo:
            self._memo[i] = self._lower(i, self._graph.values[i], self._facts[i])
        return self._memo[i]

    def _lower(self, i: int, value: Value, facts: Facts) -> int:
        put, dtype = self.builder.put, _letter(value.dtype)
        if value.op == "constant":
            return self.builder.const(dtype, value.number)
        if value.op == "score":
            return put(dtype, "score")
        if value.primitive is None and value.op.startswith("plane"):
            return put(dtype, "plane", int(value.op[5:]))
        if facts.affine is not None:
            a, b, c = facts.affine
            return self.builder.const("i", c) if a == b == 0 else put("i", "affine", a, b, c)
        if self._has_planes and facts.is_own and facts.kind is not None and not value.shape:
            return self._plane(i, dtype, facts)
        if value.shape or any(self._graph.values[x].shape for x in value.args):
            return self._array(i)
        if self._has_tables and value.op in INEXACT and facts.kind is not None:
            return self._plane(i, dtype, facts)
        found = self._instruction(value, dtype)
        if found is not None:
            return found
        if self._has_planes and facts.kind is not None:  # XLA has every primitive
            return self._plane(i, dtype, facts)
        raise NoCodeError(_no_instruction(value.op, "only arithmetic, comparisons and a few functions have"))

    def _plane(self, i: int, dtype: str, facts: Facts) -> int:
        assert facts.kind is not None
        letter = "f" if dtype == "f" else "i"
        per_batch = "batch" in facts.depends and not self._of_sequences
        self.cuts.append(Cut(i, Plane(facts.kind, letter, per_batch, "head" in facts.depends)))
        return self._as_bool(self.builder.put(letter, "plane", len(self.cuts) - 1), dtype)

    def _as_bool(self, x: int, dtype: str) -> int:
        return self.builder.apply("b", "ne", x, self.builder.const("i", 0)) if dtype == "b" else x

    def _instruction(self, value: Value, dtype: str) -> int | None:
        """Returns the result of instructions for a primitive of numbers; None if it has none."""
        apply, const, op = self.builder.apply, self.builder.const, _WORDS.get(value.op, value.op)
        inputs = [self._graph.values[x] for x in value.args]
        if any(_is_narrow(x.dtype) for x in (value, *inputs)) and op not in _EXACT:
            raise NoCodeError(_no_instruction(value.op, f"it computes {value.dtype}; convert it to int32 first"))
        if op in DERIVATIVES:
            raise NoCodeError(_no_instruction(value.op, "it has a derivative of its own, which instructions lack"))
        if op in ("div", "rem") and dtype == "i" and not self._is_positive(value.args[1]):
            raise NoCodeError(_no_instruction(value.op, DIVISOR))
        if op in _SAME or (op == "rem" and dtype == "i") or (op == "select" and self._chooses(value)):
            return apply(dtype, op, *map(self.lower, value.args))
        if op == "convert_element_type":
            return self._convert(self.lower(value.args[0]), _letter(inputs[0].dtype), dtype, value.dtype)
        if op in _RESHAPES:
            return self.lower(value.args[0])
        if op in ("square", "integer_pow"):
            exponent = dict(value.params).get("y", 2)
            x = found = self.lower(value.args[0])
            if abs(exponent) > 8 or exponent == 0:
                return None
            for _ in range(abs(exponent) - 1):
                found = apply(dtype, "mul", found, x)
            return found if exponent > 0 else apply(dtype, "div", const(dtype, 1), found)
        if op == "one_minus_square":  # of the derivative of tanh
            x = self.lower(value.args[0])
            return apply(dtype, "sub", const(dtype, 1), apply(dtype, "mul", x, x))
        if op == "clamp":
            low, x, high = map(self.lower, value.args)
            return apply(dtype, "min", apply(dtype, "max", x, low), high)
        return None

    def _is_positive(self, i: int) -> bool:
        number = self.builder.number(self.lower(i))
        return number is not None and number > 0

    def _chooses(self, value: Value) -> bool:
        return len(value.args) == 3 and self._graph.values[value.args[0]].dtype == np.bool_

    def _convert(self, x: int, source: str, target: str, dtype: Any) -> int | None:
        apply, const = self.builder.apply, self.builder.const
        if target == "b":
            return x if source == "b" else apply("b", "ne", x, const(source, 0))
        if source == "b":
            return apply(target, "select", x, const(target, 0), const(target, 1))
        if target == "i" and _is_narrow(dtype):
            return None
        if source == target:
            return x
        return apply(target, "to_float" if target == "f" else "to_int", x)

    def _array(self, i: int) -> int:
        """Returns a number of an array that a mask function indexes by query and key together."""
        value = self._graph.values[i]
        while value.op in _RESHAPES:
            value = self._graph.values[value.args[0]]
        if value.op == "dynamic_slice" and self._has_tables and int(np.prod(value.shape)) == 1:
            found = self._table(value)
            if found is not None:
                return found
        values = self._graph.values
        first = next(j for j in self._ancestors(i) if (values[j].shape and self._facts[j].kind is None) or j == i)
        is_read = values[first].op in ("dynamic_slice", "gather") and self._facts[values[first].args[0]].kind == "head"
        if not is_read and values[first].shape:
            shapes = [values[x].shape for x in (*values[first].args, first) if values[x].shape]
            raise NoCodeError(_no_instruction(values[first].op, f"it makes or takes an array of shape {shapes[0]}"))
        raise NoCodeError(FLOATS_OF_PAIRS if self._has_tables else PAIRS)

    def _ancestors(self, i: int) -> list[int]:
        """Returns the values that value i is computed from, in order, and itself."""
        found, ahead = set[int](), [i]
        while ahead:
            j = ahead.pop()
            if j not in found:
                found.add(j)
                ahead += self._graph.values[j].args
        return sorted(found)

    def _table(self, value: Value) -> int | None:
        array, *starts = value.args
        dtype, shape = _letter(self._graph.values[array].dtype), self._graph.values[array].shape
        kinds = [self._facts[x].kind for x in (array, *starts)]
        scores = any("score" in self._facts[x].depends for x in starts)
        if dtype == "f" or kinds[0] != "head" or scores:
            return None
        apply, const = self.builder.apply, self.builder.const
        index, length = const("i", 0), 1
        for size, start, kind in zip(shape, starts, kinds[1:], strict=True):
            if kind != "head":
                i = apply("i", "min", apply("i", "max", self.lower(start), const("i", 0)), const("i", size - 1))
                index, length = apply("i", "add", apply("i", "mul", index, const("i", size)), i), length * size
        fixed = tuple(x if kind == "head" else None for x, kind in zip(starts, kinds[1:], strict=True))
        depends = frozenset[str]().union(*(self._facts[x].depends for x in (array, *fixed) if x is not None))
        self.cuts.append(Cut(array, Plane("table", "i", "batch" in depends, "head" in depends, length), fixed))
        return self._as_bool(self.builder.put("i", "table", len(self.cuts) - 1, index), dtype)


def _letter(dtype: Any) -> str:
    for letter, kind in (("b", np.bool_), ("i", np.integer), ("f", np.floating)):
        if jnp.issubdtype(dtype, kind):
            return letter
    raise NoCodeError(f"a value has dtype {dtype}, and instructions have floats, integers and booleans")


def _is_narrow(dtype: Any) -> bool:
    """Returns whether integers of a dtype are not those of int32; 64 bits hold the same numbers."""
    return jnp.issubdtype(dtype, np.integer) and dtype not in (np.int32, np.int64)


def _no_instruction(name: str, why: str) -> str:
    return (
        f"`{name}` in a score_mod or mask_mod has no instruction: {why}. Functions are evaluated in the kernels one "
        "number at a time; compute what needs it before, and index the result"
    )
