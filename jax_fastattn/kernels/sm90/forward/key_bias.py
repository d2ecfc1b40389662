# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias of keys in the forward kernel: one more step of S = Q K^T.

K of a stage comes with a tile `[keys, 16]` of bfloat16, of which each row holds zeros and three numbers that add up to
the bias of its key over the scale. The product with ones is exact, and costs the softmax nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.bias_shapes import KEY_PARTS
from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.mma import Accumulator
from jax_fastattn.kernels.features.bias.planes import Planes
from jax_fastattn.kernels.sm90.forward.config import KEY_BIAS
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.state import Call, Lane, QueryTile
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS

# A step has this many columns.
_STEP = 16
_ROW_NBYTES = KEY_PARTS * 2

Copy = Callable[[Int32, Int32, cute.Pointer], None]


def copy_with_keys(call: Call, shared: ForwardShared, tile: QueryTile, copy_key: Copy) -> tuple[Copy, int]:
    """Returns a function that copies a tile of K with its bias, and how many bytes these are.

    Args:
        copy_key: copies K.
    """
    keys = call.config.keys
    nbytes = call.memory.tile_nbytes(keys, call.memory.head_dim)
    if not call.spec.key_bias_parts:
        return copy_key, nbytes
    plane = Planes(call.scalars, call.spec.group).of_head(tile.score_head)
    source = call.buffers.key_bias_parts.toint() + Int64(plane) * call.scalars.bias_pitch * _ROW_NBYTES

    def copy(index: Int32, stage: Int32, barrier: cute.Pointer) -> None:
        copy_key(index, stage, barrier)
        target, first = shared.regions.stage(KEY_BIAS, stage), source + Int64(index * keys) * _ROW_NBYTES
        with cute.arch.elect_one():
            ptx.copy_bulk(target, first, keys * _ROW_NBYTES, barrier.toint())

    return copy, nbytes + keys * _ROW_NBYTES


@dataclass(frozen=True, eq=False)
class KeyBiasStep:
    """Emits the step in a warpgroup.

    Attributes:
        mma: the product.
        ones: its left factor.
        parts: descriptors of its right factor.
    """

    shared: ForwardShared
    lane: Lane
    mma: cute.TiledMma
    ones: Any
    parts: cute.Tensor

    @classmethod
    def start(cls, call: Call, shared: ForwardShared, lane: Lane) -> "KeyBiasStep | None":
        """Returns the step with its registers; None if there is no such bias."""
        if not call.spec.key_bias_parts:
            return None
        mma = wgmma.product(cutlass.BFloat16, call.config.keys, a_in_registers=True, b_transposed=False)
        tiles = shared.regions.tiles(KEY_BIAS, cutlass.BFloat16, (call.config.keys, _STEP))
        ones = wgmma.ones(mma, (WARPGROUP_ROWS, _STEP), lane.thread)
        return cls(shared, lane, mma, ones, wgmma.operand_b(mma, tiles))

    def of_stage(self, stage: Int32) -> wgmma.Step:
        """Returns the step for a stage of K."""
        return self.mma, self.ones, self.parts[None, None, 0, stage]

    def add(self, scores: Accumulator, stage: Int32) -> None:
        """Adds the bias to products of a warp, for which each lane loads the numbers of its columns."""
        first = self.shared.regions.stage(KEY_BIAS, stage) + self.lane.column * _ROW_NBYTES
        for block in range(cute.size(scores) // 4):
            for e in range(2):
                bias = self._sum(ptx.load_shared_chunk(first + (8 * block + e) * _ROW_NBYTES))
                for i in range(2):
                    at = 4 * block + 2 * i + e
                    scores[at] = scores[at] + bias

    @staticmethod
    def _sum(words: list[Int32]) -> Float32:
        """Returns the number that the parts of a row add up to, smallest first."""
        (first, second), (third, _) = (ptx.unpack(word) for word in words[:2])
        return first + (second + third)
