# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of a bias lie in global memory, see `bias_shapes.py`."""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.features.feature import FeatureArguments
from jax_fastattn.kernels.features.places import Head


class Planes(NamedTuple):
    """The planes of a bias.

    Attributes:
        group: query heads of a key/value head.
    """

    scalars: Scalars | Sizes
    group: int

    @classmethod
    def of(cls, arguments: FeatureArguments) -> "Planes":
        """Returns the planes of the bias of a launch."""
        return cls(arguments.scalars, arguments.spec.group)

    def of_head(self, head: Head) -> Int32:
        """Returns the plane of a query head."""
        scalars, kv_head = self.scalars, head.head // self.group
        return head.batch * scalars.bias_batch + head.head * scalars.bias_head + kv_head * scalars.bias_kv_head

    def vector(self, operand: cute.Pointer, head: Head) -> "Vector":
        """Returns the plane of a query head, of a bias of rows or keys in float32."""
        pitch = self.scalars.bias_pitch
        return Vector(operand.toint() + Int64(self.of_head(head)) * pitch * 4, pitch - 1)


class Vector(NamedTuple):
    """A number for each row or each key.

    Attributes:
        address: the address of the first one.
        last: index of the last number, which all later indices share.
    """

    address: Int64
    last: Int32

    def load(self, index: Int32) -> Float32:
        """Loads the number at an index."""
        return ptx.load_global(self.address + Int64(cutlass.min(index, self.last)) * 4)
