# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the preprocess kernels of both families compute for a query row: (lse_scaled, delta), and its term of dsinks.

The families say how a row is read, and where its numbers lie.
"""

from dataclasses import dataclass
from typing import Protocol, final

import cutlass
from cutlass import Boolean, Float32, Int32

from jax_fastattn.kernels.bias_shapes import VAGUE_LSE
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.products import MemoryWords, Native, Pair
from jax_fastattn.kernels.device.rests import Rests
from jax_fastattn.kernels.device.softmax import LN_2, LOG2_E
from jax_fastattn.kernels.features import sinks
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.units import Units


class Delta(Protocol):
    """Where the delta of a row comes from."""

    def value(self) -> Float32:
        """Returns delta, what dS subtracts from dP, of a row that sees some key."""
        ...

    def of_sink(self) -> Float32:
        """Returns what the gradient of a sink takes for delta, of any row."""
        ...


@final
@dataclass(frozen=True)
class OutputDelta:
    """Delta of the output and the cotangents.

    Attributes:
        product: rowsum(out * dout).
        dlse: the cotangent of the log-sum-exp; None if there is none.
        seen: whether the product is a number, else it counts as 0; None if it is one in any case.
    """

    product: Float32
    dlse: Float32 | None
    seen: Boolean | None = None

    def value(self) -> Float32:
        """Returns rowsum(out * dout) - dlse."""
        return self._less_dlse(self.product)

    def of_sink(self) -> Float32:
        """Returns rowsum(out * dout) - dlse, which is -dlse for a row that sees no key."""
        return self._less_dlse(self.product if self.seen is None else ptx.where(self.seen, self.product, Float32(0.0)))

    def _less_dlse(self, product: Float32) -> Float32:
        return product if self.dlse is None else product - self.dlse


@final
@dataclass(frozen=True)
class GivenDelta:
    """Delta that is an operand.

    Attributes:
        delta: the number of the row, see `Buffers.delta`.
    """

    delta: Float32

    def value(self) -> Float32:
        """Returns the number."""
        return self.delta

    def of_sink(self) -> Float32:
        """Returns the number, of any row."""
        return self.delta


class LseScale(Protocol):
    """How the other backward kernels read a log-sum-exp."""

    def scaled(self, lse: Float32, live: Boolean) -> Float32:
        """Returns a scaled log-sum-exp. If its row has no weights, which is not `live` then, it makes P vanish."""
        ...


@final
@dataclass(frozen=True)
class Base2:
    """The log-sum-exp in base 2; +inf for rows without weights.

    Attributes:
        log2_factor: the binary logarithm of a factor that P gets; None if it gets none.
    """

    log2_factor: Float32 | float | None = None

    def scaled(self, lse: Float32, live: Boolean) -> Float32:
        """Returns the log-sum-exp in base 2, less the logarithm of the factor."""
        if self.log2_factor is None:
            # The other order takes two more instructions.
            return ptx.where(live, lse, Float32(float("inf"))) * LOG2_E
        return ptx.where(live, lse * LOG2_E - self.log2_factor, Float32(float("inf")))


@final
@dataclass(frozen=True)
class InProducts:
    """The log-sum-exp as a product q . k; for rows without weights an infinity with the sign of the scale.

    Attributes:
        scale: the factor from products to logits.
        log2_factor: see `Base2`.
    """

    scale: Float32
    log2_factor: Float32 | float | None = None

    def scaled(self, lse: Float32, live: Boolean) -> Float32:
        """Returns the product q . k of which the log-sum-exp is the logit, rounded once.

        The forward pass multiplied a product by log2(e) scale, and then by log(2). What undoes both is a reciprocal in
        two parts: the rounding of one part alone would shift all logits alike, by 0.01 at logits of 1e5.
        """
        scale = nonzero(self.scale)
        factor = scale * LOG2_E
        high = factor * LN_2
        low = ptx.fma(factor, Float32(LN_2), -high)
        reciprocal = Float32(1.0) / high
        rest = ptx.fma(-reciprocal, low, ptx.fma(-reciprocal, high, Float32(1.0))) * reciprocal
        product = ptx.fma(lse, reciprocal, lse * rest)
        if self.log2_factor is not None:
            product = product - self.log2_factor * LN_2 * reciprocal
        return ptx.where(live, product, Float32(float("inf")) * scale)


def nonzero(scale: Float32) -> Float32:
    """Returns the scale, or a tiny one instead of 0 that a log-sum-exp can be divided by."""
    tiny = Float32(1e-30)
    return ptx.where(cutlass.max(scale, -scale) < tiny, tiny, scale)


def weighable(lse: Float32, live: Boolean) -> tuple[Float32, Boolean]:
    """Returns the log-sum-exp from which a backward pass with a bias computes weights, and whether the row has some.

    A row has none from `-VAGUE_LSE` on downwards, as if it saw no key, and weights of NaN from `VAGUE_LSE` on upwards.

    Args:
        lse: the log-sum-exp of the forward pass.
        live: whether the row sees some key.
    """
    hidden = lse <= Float32(-VAGUE_LSE)
    live = Boolean(live & (hidden == Boolean(False)))
    return ptx.where(lse >= Float32(VAGUE_LSE), Float32(float("nan")), lse), live


@dataclass(frozen=True)
class ReadRow:
    """What a preprocess kernel has read of a row.

    Attributes:
        live: whether it sees some key.
        lse: its log-sum-exp, of which a sink is part.
        delta: where its delta comes from.
    """

    live: Boolean
    lse: Float32
    delta: Delta

    def sink_term(self, sink: Float32, exists: Boolean) -> Float32:
        """Returns what the row adds to the gradient of its sink; `exists`: whether its numbers are its own."""
        return sinks.gradient_term(sink, self.lse, self.delta.of_sink(), exists)


@dataclass(frozen=True)
class RowPreprocess:
    """Makes the statistics of rows.

    Attributes:
        lse_scale: how the statistics store the log-sum-exp.
        vague: whether there is a bias whose log-sum-exps may be too large or too small for weights, see `weighable`.
        delta_factor: multiplies delta; None for 1.
    """

    lse_scale: LseScale
    vague: bool
    delta_factor: Float32 | float | None = None

    @classmethod
    def of(
        cls, spec: KernelSpec, lse_scale: LseScale, units: Units | None = None, survival: Float32 | None = None
    ) -> "RowPreprocess":
        """Returns the preprocess for a launch.

        Args:
            spec: the compile key.
            lse_scale: how log-sum-exps are stored.
            units: the units of a head, which `lse_scale` has, too; None for 1.
            survival: the factor of dropout that `lse_scale` gives P: dS = P (keep dP - delta / factor). None for 1.
        """
        factor = None if units is None else units.dp
        if survival is not None:
            factor = (Float32(1.0) if factor is None else factor) / survival
        return cls(lse_scale, bool(spec.matrix_bias or spec.key_bias), factor)

    def statistics(self, row: ReadRow) -> tuple[Float32, Float32]:
        """Returns (lse_scaled, delta): an infinity and 0 for a row that sees no key."""
        lse, live = row.lse, Boolean(row.live & (row.lse != Float32(float("-inf"))))
        if self.vague:
            lse, live = weighable(lse, live)
        delta = row.delta.value()
        delta = delta if self.delta_factor is None else delta * self.delta_factor
        return self.lse_scale.scaled(lse, live), ptx.where(live, delta, Float32(0.0))


def output_numbers(words: MemoryWords, pair: Pair, rests: list[Int32] | None, index: int) -> list[Float32]:
    """Returns the two numbers of a pair of the output, with what rounding has taken from them if that is kept.

    Args:
        words: what the output consists of.
        pair: the pair.
        rests: the bytes of the eight numbers of its chunk; None if there are none.
        index: which pair of the chunk it is.
    """
    numbers = words.numbers(pair)
    if rests is None:
        return numbers
    assert isinstance(words, Native)
    return Rests(words.dtype).add(numbers, rests, 2 * index)


def only_if(valid: Boolean, pair: Pair) -> Pair:
    """Returns a pair of the cotangent, or zeros."""
    if isinstance(pair, tuple):
        return tuple(ptx.where(valid, word, Int32(0)) for word in pair)
    return ptx.where(valid, pair, Int32(0))


def where_not_zeros(out: Pair, dout: Pair) -> Pair:
    """Returns a pair of the cotangent, or zeros where the pair of the output is zeros.

    It is where a row sees no key: no bound says which rows do with lists. What the cotangent holds there, which may be
    NaN, does not matter. In other rows its product with V is NaN too.
    """
    if not isinstance(dout, tuple):
        return ptx.where(Boolean((out & Int32(0x7FFF7FFF)) == 0), Int32(0), dout)
    are_zeros = Boolean(((out[0] | out[1]) & Int32(0x7FFFFFFF)) == 0)
    return tuple(ptx.where(are_zeros, Int32(0), word) for word in dout)
