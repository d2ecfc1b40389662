# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences as a call without sequences, as kernels take it if it has a mask function, or sums a plane.

A mask function already takes rows of the arrays (`canonical/packed.py`); `packed_scores.py` makes a score function take
them. Segment ids keep sequences apart, and what causal and window show of a sequence becomes two more planes of the
mask function: the first and the last key of each query.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_fastattn.layouts import packed, packed_scores
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.programs.code import Code, Plane
from jax_fastattn.spec import OPERANDS, AttentionSpec, Operands, Problem

_LIMIT = Plane("query", "i", per_batch=True, per_head=False)
_EVERY_PAIR = Code((("const", "True"),), "b", (0,))


def is_row_masked(spec: AttentionSpec) -> bool:
    """Returns whether kernels take a call as one without sequences."""
    return isinstance(spec.mask_mod, Code) and "sequences" in spec.present


def by_rows(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns such a call, in which a query sees the same keys. Rows of no sequence see nothing."""
    ids = packed.by_token(operands)
    limits = _limits(spec, ids)
    assert packed_scores.has_rows_code(spec.score_mod), spec.score_mod
    if isinstance(spec.score_mod, Code):
        ids = packed_scores.operands_by_rows(spec.score_mod, operands, ids)
    found = ids._replace(query_offset=None)
    if limits:
        found = found._replace(
            query_integers=packed_scores.inserted(found.query_integers, jnp.stack(limits, axis=1)[:, None])
        )
    return _spec_by_rows(spec), found


def problem_by_rows(problem: Problem, *, sums_plane: bool = False) -> Problem:
    """Returns the problem of a call by rows; other problems as they are. Planes may be more than the call's.

    A score function that has no code by rows stays as it is. `support.py` refuses such a call.

    Args:
        sums_plane: whether a backward pass sums the gradient of a plane, which kernels of packed sequences do not.
    """
    is_summed = sums_plane and "sequences" in problem.spec.present
    if not (is_row_masked(problem.spec) or is_summed):
        return problem
    batch, heads = problem.mask_mod_shape
    # Planes of queries are one operand, which `score_mod` may read by head.
    heads = heads if problem.spec.score_mod is None else problem.num_heads
    spec, shape = _spec_by_rows(problem.spec), (max(batch, problem.batch), heads)
    planes, score_mod = problem.planes, problem.spec.score_mod
    if isinstance(score_mod, Code) and packed_scores.has_rows_code(score_mod):
        planes = packed_scores.shapes_by_rows(score_mod, planes, problem.batch)
    elif score_mod is None and problem.spec.bounds != (None, None):
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
    score_mod, mask_mod = spec.score_mod, spec.mask_mod
    if isinstance(score_mod, Code) and packed_scores.has_rows_code(score_mod):
        added |= {f"{side}_integers" for side in packed_scores.added(score_mod)}
        score_mod = packed_scores.code_by_rows(score_mod)
    names = {*spec.present, *added} - {"sequences"}
    if left is not None or right is not None:
        mask_mod = _EVERY_PAIR if mask_mod is None else mask_mod
        assert isinstance(mask_mod, Code)
        mask_mod = _with_limits(mask_mod, has_last=right is not None, has_first=left is not None)
    present = tuple(name for name in OPERANDS if name in names)
    return replace(spec, is_causal=False, window=(None, None), score_mod=score_mod, mask_mod=mask_mod, present=present)


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
