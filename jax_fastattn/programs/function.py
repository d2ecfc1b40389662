# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A function that has no code: the XLA path evaluates it as it stands, for all pairs of a block.

The arrays that it captures become tables, and batch entry and head two planes of numbers, as `vmap` and meshes renumber
both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.programs import analysis
from jax_fastattn.programs.code import Code, Plane
from jax_fastattn.programs.facts import COMPARISONS
from jax_fastattn.programs.trace import Graph, Value, evaluate

# Where a pair does not count, a function is differentiated at this score and captured number: most functions have a
# finite derivative there, and 0 times it is 0.
HARMLESS = 0.5


@dataclass(frozen=True)
class Function:
    """A function as a graph.

    Attributes:
        graph: of `score_mod` or `mask_mod`.
        planes: batch entries, heads, and a table for each captured array.
        reason: why there is no code.
        has_first_rows: whether the last planes are numbers that are added to "query" and "key", see `parts.py`.
    """

    graph: Graph
    planes: tuple[Plane, ...]
    reason: str
    has_first_rows: bool = False

    @classmethod
    def of(cls, graph: Graph, reason: str) -> Function:
        """Makes a function of a graph."""
        indices = Plane("head", "i", True, False), Plane("head", "i", False, True)
        found = [_kept_as(x) for x in _captured(graph)]
        tables = [Plane("table", "f" if _is_float(x) else "i", False, False, x.size) for x in found]
        return cls(graph, (*indices, *tables), reason)

    def arrays(self, captured: Sequence[Any], batch: int, heads: int, wide: Any) -> list[jax.Array]:
        """Returns the planes `[b, n, L]`."""
        tables = [x.astype(wide if _is_float(x) else jnp.int32) for x in map(_numbers, captured)]
        indices = jnp.arange(batch, dtype=jnp.int32)[:, None, None], jnp.arange(heads, dtype=jnp.int32)[None, :, None]
        return [*indices, *(x.reshape(1, 1, -1) for x in tables)]

    def evaluate(
        self, shape: tuple[int, ...], leaves: Mapping[str, Any], planes: Sequence[Any], counts: jax.Array | None = None
    ) -> jax.Array:
        """Returns the function of all pairs `[B, K, G, t, s]`.

        Args:
            shape: of the result.
            leaves: "query" and "key", and "score" of a score function, each in a shape that broadcasts.
            planes: two that broadcast, then tables `[b, n, L]`, and first rows, which broadcast, too. `vmap` may have
                made n of 1.
            counts: which pairs count. Others are evaluated at `HARMLESS`.
        """
        wide = leaves["score"].dtype if "score" in leaves else jnp.float32
        if self.has_first_rows:
            *planes, query, key, _ = planes
            leaves = {**leaves, "query": leaves["query"] + query, "key": leaves["key"] + key}
        batch, head, *tables = planes
        numbers = {**leaves, "batch": batch, "head": head, **({} if counts is None else {"counts": counts})}
        rows = shape[0], int(np.prod(shape[1:-2])), -1
        pairs = {name: jnp.broadcast_to(x, shape).reshape(rows) for name, x in numbers.items()}

        def at(pair: dict[str, jax.Array], captured: list[jax.Array]) -> jax.Array:
            def harmless(x: jax.Array) -> jax.Array:
                return jnp.where(pair["counts"], x, jnp.asarray(HARMLESS, x.dtype))

            read = harmless if "counts" in pair else None
            given = {"score": read(pair["score"])} if read is not None else {}
            return evaluate(self.graph, self.graph.results, pair | given, captured, wide, read)[0]

        def of_head(pairs: dict[str, jax.Array], tables: list[jax.Array]) -> jax.Array:
            shaped = zip(tables, _captured(self.graph), strict=True)
            captured = [_restored(x, y, wide) for x, y in shaped]
            return jax.vmap(at, in_axes=(0, None))(pairs, captured)

        def mapped(function: Any, axis: int) -> Any:
            """Maps over batch entries or heads. A table that is the same for all of them is not repeated."""
            own = [0 if x.shape[axis] != 1 else None for x in tables]

            def call(pairs: dict[str, jax.Array], tables: list[jax.Array]) -> jax.Array:
                given = [x if i == 0 else x[0] for x, i in zip(tables, own, strict=True)]
                return jax.vmap(function, in_axes=(0, own))(pairs, given)

            return call

        return mapped(mapped(of_head, 1), 0)(pairs, tables).reshape(shape)


Program = Code | Function


def words(name: str, program: Program | None) -> str:
    """Says how the function of an argument was understood; an empty string without one."""
    if program is None:
        return ""
    if isinstance(program, Function):
        return f"`{name}` is evaluated as it stands, because {program.reason}"
    kinds = ", ".join(plane.kind for plane in program.planes)
    text = f"`{name}` has {_counted(len(program.planes), 'plane')}{f' ({kinds})' * bool(kinds)}"
    text += f" and {len(program.instructions)} instructions"
    if name == "score_mod":
        needed = program.needed(program.results[:1])
        products = sum(program.instructions[i][0] == "mul" and program.dtypes[i] == "f" for i in needed)
        text += f" ({_counted(products, 'product')})"
        if factor := analysis.scale_factor(program):
            text += f", and its factor of a {factor} is folded into the scale"
        if analysis.terms(program) is not None:
            text += ", and adds a term to the score"
    changes = _changes(name, program)
    return f"{text}; if `{name}` is slow: {'; '.join(changes)}" if changes else text


def _changes(name: str, code: Code) -> list[str]:
    """Returns what to change in a function that is slow in the kernels."""
    kinds = {plane.kind for plane in code.planes}
    if name == "score_mod":
        learned = any(plane.dtype == "f" and plane.kind != "key" for plane in code.planes)
        found = {
            "`jax.lax.stop_gradient` of what it captures saves a kernel of the backward pass": learned,
            "a formula of `k - q` reads nothing, while a number of each distance is read for each score": (
                "distance" in kinds
            ),
        }
    else:
        compares_floats = any(
            op in COMPARISONS and code.dtypes[operands[0]] == "f" for op, *operands in code.instructions
        )
        found = {
            "without `h`, all heads share lists and bits": any(plane.per_head for plane in code.planes),
            "comparisons of positions, or of an integer of a query with one of a key, decide tiles as a whole, while "
            "floats, and arrays read by `k - q` or by pairs, are looked up for each pair": (
                compares_floats or bool(kinds & {"distance", "table"})
            ),
        }
    return [text for text, is_true in found.items() if is_true]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _captured(graph: Graph) -> list[Value]:
    return sorted((x for x in graph.values if x.op == "captured"), key=lambda x: x.index)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _numbers(x: jax.Array) -> jax.Array:
    """Returns an array as floats, integers or booleans: of a random key its data, of complex numbers two parts."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return jnp.stack([x.real, x.imag], -1) if jnp.issubdtype(x.dtype, np.complexfloating) else x


def _kept_as(value: Value) -> Any:
    """Returns shape and dtype of what `_numbers` makes of a captured array."""
    return jax.eval_shape(_numbers, jax.ShapeDtypeStruct(value.shape, value.dtype))


def _restored(flat: jax.Array, value: Value, wide: Any) -> jax.Array:
    """Returns the captured array of which `_numbers` made a table, with floats in the dtype `wide`."""
    kept = _kept_as(value)
    x = flat.reshape(kept.shape).astype(wide if _is_float(kept) else kept.dtype)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        impls: list[Any] = []
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), value.dtype))
        return jax.random.wrap_key_data(x, impl=impls[0])
    return jax.lax.complex(x[..., 0], x[..., 1]).astype(value.dtype) if kept.shape != value.shape else x
