# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences with a mask function as a call without sequences, as kernels take it.

The function already takes rows of the arrays (`canonical/packed.py`). Segment ids keep sequences apart, and what causal
and window show of a sequence becomes two more planes of the function: the first and the last key of each query.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_fastattn.layouts import packed
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.programs.code import Code, Plane
from jax_fastattn.spec import OPERANDS, AttentionSpec, Operands, Problem

_LIMIT = Plane("query", "i", per_batch=True, per_head=False)


def is_row_masked(spec: AttentionSpec) -> bool:
    """Returns whether kernels take a call as one without sequences."""
    return isinstance(spec.mask_mod, Code) and "sequences" in spec.present


def by_rows(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns such a call, in which a query sees the same keys. Rows of no sequence see nothing."""
    ids = packed.by_token(operands)
    limits = _limits(spec, ids)
    found = ids._replace(query_offset=None)
    if limits:
        stack, before = jnp.stack(limits, axis=1)[:, None], operands.query_integers
        if before is not None:
            shape = jnp.broadcast_shapes(before.shape[:2], stack.shape[:2])
            parts = [jnp.broadcast_to(x, (*shape, *x.shape[2:])) for x in (before, stack)]
            stack = jnp.concatenate(parts, axis=2)
        found = found._replace(query_integers=stack)
    return _spec_by_rows(spec), found


def problem_by_rows(problem: Problem) -> Problem:
    """Returns the problem of a call by rows; other problems as they are. Planes may be more than the call's."""
    if not is_row_masked(problem.spec):
        return problem
    batch, heads = problem.mask_mod_shape
    # Planes of queries are one operand, which `score_mod` may read by head.
    heads = heads if problem.spec.score_mod is None else problem.num_heads
    spec, shape = _spec_by_rows(problem.spec), (max(batch, problem.batch), heads)
    planes = problem.planes
    if problem.spec.bounds != (None, None) and problem.spec.score_mod is None:
        # Limits are planes of batch entries.
        sizes = {name: sizes for name, *sizes in planes}
        entries, members = sizes.get("query_integers", (1, 1))
        sizes["query_integers"] = [max(entries, problem.batch), members]
        planes = tuple((name, *sizes[name]) for name in sorted(sizes))
    return replace(problem, spec=spec, num_sequences=0, packed_offsets=False, mask_mod_shape=shape, planes=planes)


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


def _spec_by_rows(spec: AttentionSpec) -> AttentionSpec:
    left, right = spec.bounds
    added = {"query_segment_ids", "key_value_segment_ids"}
    added |= set() if left is None and right is None else {"query_integers"}
    names = {*spec.present, *added} - {"sequences"}
    assert isinstance(spec.mask_mod, Code)
    code = _with_limits(spec.mask_mod, has_last=right is not None, has_first=left is not None)
    present = tuple(name for name in OPERANDS if name in names)
    return replace(spec, is_causal=False, window=(None, None), mask_mod=code, present=present)


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
