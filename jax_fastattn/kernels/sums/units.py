# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The units of P and of dS in float16, which loses digits below 2^-14.

They are powers of two of a batch entry and key/value head. P is multiplied by one of them, by way of the log-sum-exp of
its row. dP and delta are multiplied by another one: kernels multiply V by it in shared memory, or dO if a CTA keeps
that, and the statistics have delta times it. No instruction joins the loops. What is stored is divided again.
`ops/cuda/gradient_units.py` chooses both powers.
"""

from typing import NamedTuple

from cutlass import Float32, Int32

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.sequences import Span


class Units(NamedTuple):
    """The units of a batch entry and key/value head.

    Attributes:
        dp: the factor on dP and delta.
        over_dp: its reciprocal.
        log2_p: the binary logarithm of the factor on P.
        over_p: the reciprocal of that factor.
    """

    dp: Float32 | float
    over_dp: Float32 | float
    log2_p: Float32 | float
    over_p: Float32 | float

    @property
    def over_ds(self) -> Float32 | float:
        """The reciprocal of the factor on dS."""
        return self.over_dp * self.over_p

    def taken_off(self, lses: list[Float32], deltas: list[Float32]) -> tuple[list[Float32], list[Float32]]:
        """Returns log-sum-exps in base 2 and deltas as they are without units, for a kernel that rounds no dS."""
        return [lse + self.log2_p for lse in lses], [delta * self.over_dp for delta in deltas]


def load_units(buffers: Buffers, rows: Span, kv_heads: Int32, kv_head: Int32) -> Units | None:
    """Returns the units of a head of some queries or keys; None if the operands are not float16."""
    if buffers.gradient_units is None:
        return None
    chunk = ptx.load_global_chunk(buffers.gradient_units.toint() + rows.head(kv_heads, kv_head) * 16)
    return Units(*(ptx.from_bits(x) for x in chunk))


def over_ds(units: Units | None, factor: Float32) -> Float32:
    """Returns the factor on dq and dk when they are stored, given the factor that they have in any dtype."""
    return factor if units is None else factor * units.over_ds
