# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The primitive that is one launch of a compile key: a custom call, on one device; and the numbers that it takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_fastattn import ffi
from jax_fastattn._compat import Primitive
from jax_fastattn.kernels.arguments.scalars import BIAS_SCALARS, VISIT_SCALARS, Scalars
from jax_fastattn.kernels.bias_shapes import BiasPlanes, bias_pitch
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.ops.cuda import ahead
from jax_fastattn.spec import Problem

launch_p = Primitive("jax_fastattn_launch")
launch_p.multiple_results = True


@launch_p.def_abstract_eval
def _abstract(*_: Any, results: Any, **params: Any) -> list[jax.core.ShapedArray]:
    del params
    return [jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in results]


def _lower(ctx, *operands, kernel, ints, floats, results):  # type: ignore[no-untyped-def]
    del results
    return ffi.custom_call(ctx, kernel, operands, ints, floats, ahead.foreseen)


# It is not inlined: identical calls, as a model's layers make them, share one function and carry their kernel once.
mlir.register_lowering(launch_p, _lower, platform="cuda", inline=False)


def launch(*operands: Any, kernel: KernelSpec, **params: Any) -> list[jax.Array]:
    """Binds the custom call under a name for profiles, in the words of `explain`: `jax_fastattn_sm90_forward`."""
    ahead.collect(kernel)
    name = kernel.op if kernel.op == "prepass" else f"{kernel.family}_{kernel.op}"
    with jax.named_scope(f"jax_fastattn_{name}"):
        return launch_p.bind(*operands, kernel=kernel, **params)


# Next to collectives, a CTA of a forward launch takes this many pairs of query and key at head dim 128: some 0.1 ms.
_PAIRS_OF_CTA = 1 << 20

# This is far more than there are tiles, and far less than an int32 holds.
_MOST_BLOCKS = 1 << 20


def persistent_blocks(problem: Problem, multiprocessors: int) -> int:
    """Returns up to how many CTAs a forward launch has where they are persistent: one for each SM, or more.

    A collective runs next to the block of a ring, and holds some SMs. CTAs that find no SM begin when others end, so
    none may take long. Other launches have one CTA for each SM, which is a little faster. So have launches with a
    left window bound, packed sequences or lists, whose rows see fewer keys than there are.

    Args:
        multiprocessors: the number that the GPU has.
    """
    left, right = problem.spec.bounds
    sees_fewer = {"mask", "query_segment_ids", "sequences"} & {*problem.spec.present}
    if not problem.spec.is_part or left is not None or sees_fewer or problem.spec.mask_mod is not None:
        return multiprocessors
    pairs = problem.batch * problem.num_heads * problem.query_length * problem.key_length
    pairs = pairs * max(problem.head_dim, problem.v_head_dim) // 128 // (1 if right is None else 2)
    return max(multiprocessors, min(pairs // _PAIRS_OF_CTA, _MOST_BLOCKS))


def launch_scalars(
    problem: Problem,
    multiprocessors: int,
    visit: tuple[int | None, ...] = (None,) * len(VISIT_SCALARS),
    side_heads: int | None = None,
    bias_parts: int | None = None,
) -> Scalars:
    """Returns the run-time scalars of a launch.

    Args:
        problem: the sizes. Packed sequences are all in one batch entry, and their number is the batch.
        multiprocessors: how many the GPU has; for a forward launch, `persistent_blocks`.
        visit: the scalars of lists, see `lists.Planes`.
        side_heads, bias_parts: see `Scalars`.
    """
    left, right = problem.spec.bounds
    return Scalars(
        batch=problem.num_sequences or problem.batch,
        query_length=problem.query_length,
        key_length=problem.key_length,
        num_heads=problem.num_heads,
        window_left=UNBOUNDED if left is None else min(left, UNBOUNDED),
        window_right=UNBOUNDED if right is None else min(right, UNBOUNDED),
        sinks_stride=problem.num_heads if problem.sinks_per_batch else 0,
        multiprocessors=multiprocessors,
        **dict(zip(VISIT_SCALARS, visit, strict=True)),
        side_heads=side_heads,
        pages=problem.pages or None,
        **_bias_scalars(problem),
        bias_parts=bias_parts,
        scale=problem.spec.scale,
        logits_soft_cap=problem.spec.logits_soft_cap or 0.0,
    )


def _bias_scalars(problem: Problem) -> dict[str, int | None]:
    """Returns the scalars of a bias by name."""
    shape = problem.bias_shape
    if shape is None:
        return dict.fromkeys(BIAS_SCALARS)
    planes = BiasPlanes.of(shape, problem.num_heads)
    numbers = (planes.batch, planes.head, planes.kv_head, planes.count, bias_pitch(shape, problem.key_length))
    return dict(zip(BIAS_SCALARS, numbers, strict=True))
