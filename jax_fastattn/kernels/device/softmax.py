# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Scores in registers: soft cap, masks, and reductions along the rows of an accumulator (see `mma.py`).

A kernel keeps scores q . k unscaled and folds `Scaling` into the exponential: one FFMA and one MUFU per score.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.mma import Accumulator, accumulator_row
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.plan import Limits

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# Stands for a scale of 0: small enough to make every finite product vanish, yet -inf times it is still -inf.
_TINY_SCALE = 2.0**-120


@dataclass(frozen=True)
class Scaling:
    """How a product q . k becomes a logit: `logit * log2(e) = factor * tanh(...)`, factor > 0, see `cap_score`.

    Attributes:
        factor: multiplies scores, in base 2.
        inner: with a soft cap, the factor inside of tanh, else None. Negative scales are folded in here; without a cap
            the kernel has to negate q (`tiles.negate_tile`) when `negative` holds.
        negative: whether the scale is negative.
    """

    factor: Float32
    inner: Float32 | None
    negative: Boolean


def scaling(scale: Float32, logits_soft_cap: Float32 | None) -> Scaling:
    """The factors of a launch; `logits_soft_cap` is None for kernels without a cap, and positive otherwise."""
    negative = scale < Float32(0.0)
    if logits_soft_cap is not None:
        return Scaling(logits_soft_cap * LOG2_E, scale / logits_soft_cap * (2 * LOG2_E), negative)
    magnitude = ptx.where(negative, -scale, scale)
    return Scaling(ptx.maximum(magnitude * LOG2_E, Float32(_TINY_SCALE)), None, negative)


def cap_score(score: Float32, inner: Float32) -> Float32:
    """tanh(score * scale / cap) as 1 - 2 / (2^(inner * score) + 1): absolute error 2e-7, two MUFU."""
    return ptx.fma(Float32(-2.0), ptx.reciprocal(ptx.exp2(score * inner) + Float32(1.0)), Float32(1.0))


def cap_score_roughly(score: Float32, inner: Float32) -> Float32:
    """As `cap_score`, by one MUFU: relative error 2^-11, so that at a logit of 8 that of P is 2^-8, as of bfloat16.

    1 - tanh^2 has an absolute error of 2^-10. Not for sinks: their gradient, a sum over all rows, would show that the
    error is not even.
    """
    return ptx.tanh(score * (inner * (0.5 * LN_2)))


class Transform(NamedTuple):
    """From products to logits in base 2, with a scale of any sign: `factor * x`, or `factor * cap(x)`.

    Attributes:
        factor: of what enters the softmax.
        inner: as in `Scaling`.
        exact: which tanh, that of `cap_score` or of `cap_score_roughly`: the same as in the forward pass.
    """

    factor: Float32
    inner: Any
    exact: bool

    @classmethod
    def of(cls, spec: KernelSpec, scale: Float32, logits_soft_cap: Float32) -> "Transform":
        """The factors of a launch."""
        if spec.logits_soft_cap:
            return cls(logits_soft_cap * LOG2_E, scale / logits_soft_cap * (2 * LOG2_E), spec.exact_cap)
        return cls(scale * LOG2_E, None, True)

    def cap(self, score: Float32) -> tuple[Float32, Float32]:
        """tanh of a score, and its slope, 1 - tanh^2."""
        capped = (cap_score if self.exact else cap_score_roughly)(score, self.inner)
        return capped, ptx.fma(-capped, capped, Float32(1.0))


def mask_columns(
    acc: Accumulator,
    m_blocks: int,
    n_blocks: int,
    column: Int32,
    limits: list[Limits],
    *,
    check_low: bool,
    hidden: float = float("-inf"),
) -> None:
    """Replaces what lies outside each row's limits.

    Args:
        acc: the accumulator, changed in place.
        m_blocks: its block rows.
        n_blocks: its block columns.
        column: matrix column of this lane's c0 in the first fragment.
        limits: of each of the lane's `2 m_blocks` rows.
        check_low: whether `low` can lie above the first column of any tile.
        hidden: the value put there.
    """
    for m in range(m_blocks):
        for element in range(4):
            row = limits[accumulator_row(m, element)]
            high = row.high - column
            low = row.low - column
            for n in range(n_blocks):
                index = (m * n_blocks + n) * 4 + element
                at = 8 * n + element % 2
                acc[index] = ptx.where(Int32(at) < high, acc[index], Float32(hidden))
                if check_low:
                    acc[index] = ptx.where(Int32(at) >= low, acc[index], Float32(hidden))


def row_maxima(acc: Accumulator, m_blocks: int, n_blocks: int) -> list[Float32]:
    """Maximum of each of the lane's `2 m_blocks` rows, over all lanes that share the row."""
    maxima = []
    for row in range(2 * m_blocks):
        indices = _row_indices(row, n_blocks)
        best = acc[indices[0]]
        for index in indices[1:]:
            best = ptx.maximum(best, acc[index])
        maxima.append(quad_maximum(best))
    return maxima


def _row_indices(row: int, n_blocks: int) -> list[int]:
    first = row // 2 * n_blocks * 4 + row % 2 * 2
    return [first + 4 * n + half for n in range(n_blocks) for half in range(2)]


def exponentials(
    acc: Accumulator, m_blocks: int, n_blocks: int, factor: Float32, shifts: list[Float32]
) -> list[Float32]:
    """Replaces scores by 2^(factor * score - shift of the row) and returns this lane's sums of its rows.

    Column by column, the order in which the next product consumes them, and with sums as trees: in row order with
    running sums ptxas spilled 80 bytes at 32 x 64 scores and 128 output columns.
    """
    for n in range(n_blocks):
        for m in range(m_blocks):
            for element in range(4):
                index = (m * n_blocks + n) * 4 + element
                shift = shifts[accumulator_row(m, element)]
                acc[index] = ptx.exp2(ptx.fma(acc[index], factor, -shift))
    return [_tree_sum([acc[index] for index in _row_indices(row, n_blocks)]) for row in range(2 * m_blocks)]


def _tree_sum(terms: list[Float32]) -> Float32:
    while len(terms) > 1:
        pairs = [terms[i] + terms[i + 1] for i in range(0, len(terms) - 1, 2)]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0]


def quad_maximum(x: Float32) -> Float32:
    """Maximum over the four lanes that share an accumulator row."""
    x = ptx.maximum(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return ptx.maximum(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_sum(x: Float32) -> Float32:
    """Sum over the four lanes that share an accumulator row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)
