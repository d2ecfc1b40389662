# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences as a call without sequences, as kernels take it if it has a mask function, or sums a plane.

Segment ids keep sequences apart, and `packed_scores.py` makes codes take rows of the arrays. What causal and window
show of a sequence becomes two more planes of the mask function: the first and the last key of each query. If a code
reads planes of distances, rows are aligned first (`packed_aligned.py`). Causal and window then say the same of rows as
of places, unless sequences have offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_fastattn.layouts import packed, packed_scores
from jax_fastattn.layouts.packed_aligned import Order, has_distances
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.programs.code import Code, Plane, places
from jax_fastattn.programs.function import Program
from jax_fastattn.spec import OPERANDS, AttentionSpec, Gradients, Operands, Problem

_LIMIT = Plane("query", "i", per_batch=True, per_head=False)
_EVERY_PAIR = Code((("const", "True"),), "b", (0,))


def is_row_masked(spec: AttentionSpec) -> bool:
    """Returns whether kernels take a call as one without sequences."""
    return isinstance(spec.mask_mod, Code) and "sequences" in spec.present


@dataclass(frozen=True)
class RowsCall:
    """A packed call as one without sequences.

    Attributes:
        packed: the operands of the packed call.
        order: the order of the rows, if they are aligned; None if they stay.
        spec, operands: the call without sequences.
    """

    packed: Operands
    order: Order | None
    spec: AttentionSpec
    operands: Operands

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands) -> RowsCall:
        """Returns the call without sequences."""
        order = Order.of(operands) if has_distances(spec) else None
        return cls(operands, order, *by_rows(spec, operands if order is None else order.operands()))

    def results(self, out: jax.Array, lse: jax.Array, *further: jax.Array) -> tuple[jax.Array, ...]:
        """Returns output and log-sum-exp of the packed call, and further results of rows."""
        found = (out, lse, *further)
        out, lse, *further_results = found if self.order is None else map(self.order.results, found)
        return out, padding_lse(self.packed, lse, -jnp.inf), *further_results  # of a sink

    def residuals(
        self, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Returns output, log-sum-exp and cotangents of the call without sequences, given the packed call's."""
        padding = -jnp.inf
        if self.packed.sinks is not None:
            padding = self.packed.sinks[:, None]
            lse = padding_lse(self.packed, lse, padding)
        dlse = None if dlse is None else padding_lse(self.packed, dlse, 0.0)
        if self.order is None:
            return out, lse, dout, dlse
        rows = self.order.rows
        return rows(out), rows(lse, padding), rows(dout), None if dlse is None else rows(dlse)

    def gradients(self, found: Gradients) -> Gradients:
        """Returns the gradients of the packed call."""
        return found if self.order is None else self.order.gradients(found)


def by_rows(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns such a call, in which a query sees the same keys. Rows of no sequence see nothing.

    Args:
        operands: their rows are aligned if a code reads a plane of distances.
    """
    assert operands.sequences is not None
    found, is_aligned = packed.by_token(operands), has_distances(spec)
    keeps_bounds = is_aligned and operands.sequences.shape[2] == 4
    limits = [] if keeps_bounds else _limits(spec, found)
    for code in (spec.score_mod, spec.mask_mod):
        if isinstance(code, Code):
            is_last = code is spec.mask_mod
            found = packed_scores.operands_by_rows(code, operands, found, is_aligned=is_aligned, is_last=is_last)
    found = found._replace(query_offset=None)
    if limits:
        planes = jnp.stack(limits, axis=1)[:, None]
        found = found._replace(query_integers=packed_scores.inserted(found.query_integers, planes))
    return _spec_by_rows(spec, keeps_bounds=keeps_bounds), found


def problem_by_rows(problem: Problem, *, sums_plane: bool = False) -> Problem:
    """Returns the problem of a call by rows; other problems as they are. Planes may be more than the call's.

    Args:
        sums_plane: whether a backward pass sums the gradient of a plane, which kernels of packed sequences do not.
    """
    is_summed = sums_plane and "sequences" in problem.spec.present
    if not (is_row_masked(problem.spec) or is_summed):
        return problem
    is_aligned = has_distances(problem.spec)
    spec = _spec_by_rows(problem.spec, keeps_bounds=is_aligned and not problem.packed_offsets)
    batch, heads = problem.mask_mod_shape
    # Planes of queries are one operand, which `score_mod` may read by head.
    heads = heads if problem.spec.score_mod is None else problem.num_heads
    aligned = problem.query_length + problem.key_length
    return replace(
        problem,
        spec=spec,
        query_length=aligned if is_aligned else problem.query_length,
        key_length=aligned if is_aligned else problem.key_length,
        num_sequences=0,
        packed_offsets=False,
        mask_mod_shape=(max(batch, problem.batch), heads),
        planes=_planes_by_rows(problem, spec, is_aligned=is_aligned),
    )


def _planes_by_rows(problem: Problem, by_rows: AttentionSpec, *, is_aligned: bool) -> tuple[tuple[str, int, int], ...]:
    """Returns `Problem.planes` of a call by rows: places and limits differ by batch entry, and so do aligned rows."""
    before, after = (_side_planes((x.score_mod, x.mask_mod)) for x in (problem.spec, by_rows))
    own = {name for name in after if after[name] > before.get(name, 0) or is_aligned}
    sizes = {name: (entries, heads) for name, entries, heads in problem.planes}
    read = _side_planes((by_rows.score_mod or by_rows.mask_mod,))
    for name in own & {*read}:
        entries, heads = sizes.get(name, (1, 1))
        sizes[name] = max(entries, problem.batch), heads
    return tuple((name, *sizes[name]) for name in sorted(sizes))


def _side_planes(programs: Iterable[Program | None]) -> dict[str, int]:
    """Returns how many planes of queries and of keys programs have, by operand."""
    found: dict[str, int] = {}
    for place in (place for own in places([*programs]) for place in own):
        if place.plane.kind in ("query", "key"):
            found[place.operand] = found.get(place.operand, 0) + 1
    return found


def padding_lse(operands: Operands, lse: jax.Array, padding: jax.Array | float) -> jax.Array:
    """Returns the log-sum-exp `[B, T, N]` with other numbers in rows of no sequence."""
    rows = packed.padding_rows(operands)
    assert rows is not None
    return jnp.where(rows[..., None], padding, lse)


def _limits(spec: AttentionSpec, by_token: Operands) -> list[jax.Array]:
    """Returns the last key, and the first one, that each query sees by causal and window: `[B, T]` each, if any."""
    assert by_token.query_offset is not None
    rows = jnp.arange(by_token.query.shape[1], dtype=jnp.int32)
    position = rows[None] + jnp.clip(by_token.query_offset, -UNBOUNDED, UNBOUNDED)
    left, right = spec.bounds
    found = [] if right is None else [position + min(right, UNBOUNDED)]
    return found if left is None else [*found, position - min(left, UNBOUNDED)]


def _spec_by_rows(spec: AttentionSpec, *, keeps_bounds: bool) -> AttentionSpec:
    is_aligned = has_distances(spec)
    score_mod, mask_mod = (
        packed_scores.code_by_rows(program, is_aligned=is_aligned) if isinstance(program, Code) else program
        for program in (spec.score_mod, spec.mask_mod)
    )
    spec = replace(spec, score_mod=score_mod, mask_mod=mask_mod)
    spec = spec if keeps_bounds else _unbounded(spec)
    planes = (place.operand for own in places((spec.score_mod, spec.mask_mod)) for place in own)
    names = {*spec.present, "query_segment_ids", "key_value_segment_ids", *planes} - {"sequences"}
    return replace(spec, present=tuple(name for name in OPERANDS if name in names))


def _unbounded(spec: AttentionSpec) -> AttentionSpec:
    """Returns a spec whose mask function says what causal and window show."""
    left, right = spec.bounds
    mask_mod = spec.mask_mod
    if left is not None or right is not None:
        mask_mod = _EVERY_PAIR if mask_mod is None else mask_mod
        assert isinstance(mask_mod, Code)
        mask_mod = _with_limits(mask_mod, has_last=right is not None, has_first=left is not None)
    return replace(spec, is_causal=False, window=(None, None), mask_mod=mask_mod)


def _with_limits(code: Code, *, has_last: bool, has_first: bool) -> Code:
    """Returns a code that also compares keys with limits, which are its last planes."""
    instructions, dtypes, planes = [*code.instructions], code.dtypes, [*code.planes]
    (result,) = code.results
    for op in ("le",) * has_last + ("ge",) * has_first:
        key = len(instructions)
        instructions += [("affine", 0, 1, 0), ("plane", len(planes)), (op, key, key + 1), ("and", result, key + 2)]
        planes.append(_LIMIT)
        dtypes, result = dtypes + "iibb", key + 3
    return Code(tuple(instructions), dtypes, (result,), tuple(planes))
