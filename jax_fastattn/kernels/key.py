# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The compile key of a kernel, and the arguments of a launch of it.

A kernel generator receives a `KernelSpec` and nothing else; the cache key is derived from the same dataclass.
Sizes, scale, cap and window widths are run-time scalars (`launch_scalars`), so a new length compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jax_fastattn.kernels.arguments import Scalars, present_buffers
from jax_fastattn.spec import Problem

# Beyond any length: "no bound" where a kernel has one compiled in, and far from int32 overflow when sizes are added.
UNBOUNDED = 1 << 29

# Up to which T and S, and up to which head dims, the Hopper forward has a variant for short problems.
SHORT_LENGTH, SHORT_HEAD_DIM = 2048, 96

# Up to which head dims Hopper has one kernel for all three gradients.
FUSED_HEAD_DIM = 128

# Beyond which head dims CTAs of the Hopper forward walk.
WALKING_HEAD_DIM = 64

# Of a Hopper GPU; decides about speed alone.
_MULTIPROCESSORS = 132

# Up to which mean length of packed sequences, padding counted as one before and one after them, CTAs add in one order.
_ORDERED_MEAN_LENGTH = 1536


@dataclass(frozen=True)
class KernelSpec:
    """Everything that is compiled into one kernel object.

    Attributes:
        op: "forward" or "backward".
        arch: target architecture, such as "sm_80" or "sm_90a"; or one of `support.BORROWED`, whose name has a suffix.
        family: whose kernel it is, "sm80" (portable) or "sm90" (Hopper).
        dtype: "bfloat16" or "float16".
        head_dim, v_head_dim: multiples of 8, at most 256.
        group: query heads per key/value head.
        window_left, window_right: whether that bound exists; causal is a right bound of 0.
        query_seq_lengths, key_value_seq_lengths, dlse: whether that operand is passed.
        query_offset: whether there are offsets: an operand, or where sequences are packed in their records.
        packed: whether rows are those of packed sequences, see `tile_records.py`.
        sinks: whether the forward pass has that operand. In the backward pass it decides about `exact_cap` alone.
        logits_soft_cap: whether logits pass through cap * tanh(x / cap).
        short: in the forward pass, T and S are at most SHORT_LENGTH: few tiles per row, which wants other variants.
            False where there is one variant for all lengths, so that a new length compiles nothing.
        ordered: `adds_in_order`: CTAs that take keys of a head add to sums of dq in one order, so that dq has the same
            bits in every run.
    """

    op: Literal["forward", "backward"]
    arch: str
    dtype: Literal["bfloat16", "float16"]
    head_dim: int
    v_head_dim: int
    group: int = 1
    window_left: bool = False
    window_right: bool = False
    query_seq_lengths: bool = False
    key_value_seq_lengths: bool = False
    query_offset: bool = False
    packed: bool = False
    logits_soft_cap: bool = False
    sinks: bool = False
    dlse: bool = False
    family: Literal["sm80", "sm90"] = "sm80"
    short: bool = False
    ordered: bool = False

    @property
    def gpu_arch(self) -> str:
        """The architecture that the compiler and the GPU know."""
        return self.arch.partition("-")[0]

    @property
    def fused(self) -> bool:
        """Whether one backward kernel computes all gradients, and adds dq up in a buffer; else dq has its own."""
        fusible = self.family == "sm80" or max(self.head_dim, self.v_head_dim) <= FUSED_HEAD_DIM
        return self.op == "backward" and fusible

    @property
    def offset_operand(self) -> bool:
        """Whether offsets are an operand of their own."""
        return self.query_offset and not self.packed

    @property
    def takes_tiles(self) -> bool:
        """Whether CTAs of the forward kernel take tiles by a counter: if they walk, and tiles differ in length."""
        walks = self.family == "sm90" and max(self.head_dim, self.v_head_dim) > WALKING_HEAD_DIM
        return self.op == "forward" and self.packed and walks

    @property
    def hides_first_keys(self) -> bool:
        """Whether there may be keys before those that some query sees; see `plan.live_keys`."""
        return self.window_left and self.query_offset

    @property
    def hides_last_keys(self) -> bool:
        """Whether there may be keys after those that some query sees."""
        return self.window_right or self.key_value_seq_lengths or self.packed

    @property
    def hides_first_queries(self) -> bool:
        """Whether there may be queries before those that see some key; see `plan.live_queries`."""
        return self.window_right and self.query_offset

    @property
    def hides_last_queries(self) -> bool:
        """Whether there may be queries after those that see some key."""
        return self.window_left or self.query_seq_lengths or self.packed

    @property
    def divides_lse(self) -> bool:
        """Whether that kernel takes log-sum-exps, over the scale, off products; with a soft cap off capped logits."""
        return self.family == "sm90" and self.fused and not self.logits_soft_cap

    @property
    def exact_cap(self) -> bool:
        """Whether the tanh of a soft cap has to be exact, see `softmax.cap_score_roughly`."""
        return self.sinks or self.family == "sm80"

    @property
    def uneven(self) -> bool:
        """Whether some tiles see much more than others: the window has one bound."""
        return self.window_left != self.window_right


def adds_in_order(problem: Problem, *, uneven: bool) -> bool:
    """Whether CTAs add to sums of dq in one order: if gradients are to have the same bits, or if that is faster.

    It saves zeros and many additions. It is faster if what the heads in flight read stays in L2 from one tile of keys
    to the next, which takes short heads; and if CTAs that begin together wait for each other less than that saves,
    which takes many tiles of keys for each SM, or later keys that fewer queries see. Of packed sequences
    only the mean length is known.

    Args:
        problem: what is computed.
        uneven: see `KernelSpec.uneven`.
    """
    if problem.spec.deterministic:
        return True
    if problem.num_sequences:
        return max(problem.query_length, problem.key_length) <= _ORDERED_MEAN_LENGTH * problem.num_sequences
    longest = max(problem.query_length, problem.key_length)
    if uneven:
        return longest <= 1024
    key_tiles = problem.batch * problem.num_kv_heads * -(-problem.key_length // 128)
    return longest <= 512 and key_tiles >= 2 * _MULTIPROCESSORS


def kernel_spec(problem: Problem, op: Literal["forward", "backward"], arch: str, *, dlse: bool = False) -> KernelSpec:
    """The compile key for a problem that `unsupported_reasons` lets through."""
    spec = problem.spec
    left, right = spec.bounds
    largest = max(problem.head_dim, problem.v_head_dim)
    packed = problem.num_sequences > 0
    family = "sm90" if arch == "sm_90a" else "sm80"
    key = KernelSpec(
        op=op,
        arch=arch,
        dtype=problem.dtype,  # pyright: ignore[reportArgumentType] (unsupported_reasons admits these two only)
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        group=problem.group,
        window_left=left is not None,
        window_right=right is not None,
        query_seq_lengths="query_seq_lengths" in spec.present,
        key_value_seq_lengths="key_value_seq_lengths" in spec.present,
        query_offset="query_offset" in spec.present or problem.packed_offsets,
        packed=packed,
        logits_soft_cap=spec.logits_soft_cap is not None,
        sinks="sinks" in spec.present and (op == "forward" or (family == "sm90" and spec.logits_soft_cap is not None)),
        dlse=dlse,
        family=family,
    )
    short = largest <= SHORT_HEAD_DIM and max(problem.query_length, problem.key_length) <= SHORT_LENGTH
    return replace(
        key,
        short=short and family == "sm90" and op == "forward",
        # Of the portable kernel it is not known where one order is faster.
        ordered=key.fused and (spec.deterministic if family == "sm80" else adds_in_order(problem, uneven=key.uneven)),
    )


def launch_buffers(spec: KernelSpec) -> dict[str, str | None]:
    """Returns the dtype of each buffer of a launch by name, in order, see `present_buffers`; None if it is left out."""
    return {name: buffer and buffer.dtype for name, buffer in present_buffers(spec).items()}


def launch_scalars(problem: Problem, multiprocessors: int) -> Scalars:
    """Returns the run-time scalars of a launch.

    Args:
        problem: the sizes; of packed sequences, which are then all in one batch entry, their number is the batch.
        multiprocessors: how many the GPU has.
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
        scale=problem.spec.scale,
        logits_soft_cap=problem.spec.logits_soft_cap or 0.0,
    )
