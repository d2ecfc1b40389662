# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Sinks: one more logit of each row, which joins the denominator and has no value.

The preprocess kernels of the backward pass compute the gradient row by row. The sum over the rows is left to XLA, whose
order is the same in every run.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.sequences import Span
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.features.feature import Feature, FeatureArguments
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.limits import UNBOUNDED

# This is the maximum of a row that has seen no key.
_NEVER = float("-inf")


@dataclass(frozen=True)
class Sinks(Feature):
    """Adds the sink of a head to the denominators of its rows, in the forward pass.

    Attributes:
        operand: `[b, N]`, logits.
        stride: elements from one batch entry to the next.
        sink: the sink of the head; None before `end`.
    """

    operand: cute.Pointer
    stride: Any
    sink: Any = None

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "Sinks":
        """Returns the sinks of a forward launch."""
        del code
        return cls(arguments.buffers.added.sinks, arguments.scalars.sinks_stride)

    def end(self, head: Head) -> "Sinks":
        """Returns the feature with the sink of a head."""
        sinks = cute.make_tensor(self.operand, cute.make_layout((UNBOUNDED,)))
        return Sinks(self.operand, self.stride, sinks[head.batch * self.stride + head.head])

    def finish_row(self, maximum: Float32, total: Float32) -> tuple[Float32, Float32, Float32]:
        """Returns maximum, denominator and weight of the output with the sink.

        Args:
            maximum: the maximum of the row's logits, in base 2.
            total: its denominator, relative to `maximum`.
        """
        scaled = self.sink * LOG2_E
        top = ptx.maximum(maximum, scaled)
        shift = ptx.where(top == Float32(_NEVER), Float32(0.0), top)
        weight = ptx.exp2(maximum - shift)
        return top, total * weight + ptx.exp2(scaled - shift), weight


def load_sink(sinks: cute.Pointer, scalars: Scalars, queries: Span, head: Int32) -> Float32:
    """Loads the sink of a query head."""
    return ptx.load_global(sinks.toint() + Int64(queries.batch * scalars.sinks_stride + head) * 4)


def gradient_term(sink: Float32, lse: Float32, delta: Float32, exists: Boolean) -> Float32:
    """Returns what a row adds to the gradient of its sink: `-exp(sink - lse) * delta`.

    A row with a log-sum-exp of -inf, such as padding, adds 0: its cotangents may be NaN.

    Args:
        sink: the sink of the head.
        lse: the log-sum-exp of the row, of which the sink is part.
        delta: rowsum(out * dout) - dlse. If the row sees no key, rowsum is 0 for any value in `dout`.
        exists: whether lse and delta belong to the row.
    """
    counts = Boolean(exists & (lse != Float32(float("-inf"))))
    weight = ptx.exp2((sink - lse) * LOG2_E)
    return ptx.where(counts, -(weight * delta), Float32(0.0))
