# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Sinks: one more logit of each row, which joins the denominator and has no value."""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, cute

from jax_fastattn.kernels.arguments import ForwardBuffers, Scalars
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.features.feature import Feature, Head
from jax_fastattn.spec import UNBOUNDED

# The maximum of a row that has seen no key.
_NEVER = float("-inf")


@dataclass(frozen=True)
class Sinks(Feature):
    """Adds the sink of a head to the denominators of its rows, in the forward pass.

    Attributes:
        operand: `[b, N]`, logits.
        stride: elements from one batch entry to the next.
        sink: that of the head; None before `end`.
    """

    operand: cute.Pointer
    stride: Any
    sink: Any = None

    @classmethod
    def of(cls, buffers: ForwardBuffers, scalars: Scalars) -> "Sinks":
        """Returns the sinks of a launch."""
        return cls(buffers.sinks, scalars.sinks_stride)

    def end(self, head: Head) -> "Sinks":
        """Returns the feature with the sink of a head."""
        sinks = cute.make_tensor(self.operand, cute.make_layout((UNBOUNDED,)))
        return Sinks(self.operand, self.stride, sinks[head.batch * self.stride + head.head])

    def finish_row(self, maximum: Float32, total: Float32) -> tuple[Float32, Float32, Float32]:
        """Returns maximum, denominator and weight of the output with the sink.

        Args:
            maximum: of the row's logits, in base 2.
            total: its denominator, relative to that.
        """
        scaled = self.sink * LOG2_E
        top = ptx.maximum(maximum, scaled)
        shift = ptx.where(top == Float32(_NEVER), Float32(0.0), top)
        weight = ptx.exp2(maximum - shift)
        return top, total * weight + ptx.exp2(scaled - shift), weight
