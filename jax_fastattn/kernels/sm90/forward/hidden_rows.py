# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a consumer warpgroup of the forward kernel changes in shared memory, where TMA cannot prepare an operand.

Keys past the end of the array are zeros by TMA. Keys that no query of the batch entry sees may hold anything: scores of
them are masked, and the consumers zero those rows of V (0 * NaN is NaN). They lie at the end of the first tile that is
visited, or at the beginning of the last one. A list says of each edge tile whether it has keys that no query of the CTA
sees, wherever they lie.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fastattn.kernels.device import copies, ptx, zeroing
from jax_fastattn.kernels.sm90.forward.config import ForwardBarrier
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.state import Call, Lane, QueryTile
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.tiles import plan


@dataclass(frozen=True, eq=False)
class SharedOperands:
    """Emits the changes of one warpgroup."""

    call: Call
    shared: ForwardShared
    lane: Lane

    def negate_query(self) -> None:
        """Flips the signs of this warpgroup's Q."""
        nbytes = self.call.memory.tile_nbytes(WARPGROUP_ROWS, self.call.memory.head_dim)
        first = self.shared.query_addresses(self.lane.group)[0] + self.lane.thread * 16
        for start in range(0, nbytes, 16 * 128):
            chunk = ptx.load_shared_chunk(first + start)
            ptx.store_shared_chunk(first + start, [x ^ Int32(-0x7FFF8000) for x in chunk])
        cute.arch.fence_proxy("async.shared", space="cta")
        self._sync_warpgroup()

    def zero_padding(self, tile: QueryTile) -> None:
        """Zeroes the padding rows of this warpgroup's Q, and rows of other sequences.

        No mask hides them: NaN there, or scores far above the maxima, would fail full tiles.
        """
        first = tile.row + self.lane.group * WARPGROUP_ROWS
        inside = plan.LiveRange(Int32(0), tile.bounds.query_end)

        def own_query() -> list[tuple[Int32, int]]:
            # All warps have loaded what they hold of the tile before. racecheck does not see that by `query_empty`,
            # the producer and TMA, which come in between.
            self._sync_warpgroup()
            return [(x, self.call.memory.head_dim) for x in self.shared.query_addresses(self.lane.group)]

        zeroing.zero_hidden_rows(
            WARPGROUP_ROWS,
            own_query,
            copies.Rows.live(inside, first, length=tile.queries.zeros_from()),
            threads=128,
            barrier=ForwardBarrier.WARPGROUP,
        )

    def zero_values(self, tile: QueryTile, index: Int32, stage: Callable[[], Int32]) -> None:
        """Zeroes the rows of V that no query sees. Every warpgroup does so for itself.

        Args:
            index: position of the key tile.
            stage: waits for V and returns its stage; called if there is something to zero.
        """
        spec, config = self.call.spec, self.call.config
        live = copies.moved(tile.bounds).live_keys()
        rows = copies.Rows.live(live, tile.visit.tile(index) * config.keys, length=tile.keys.zeros_from())
        zeroing.zero_hidden_rows(
            config.keys,
            lambda: self._values(stage()),
            rows,
            threads=128,
            barrier=ForwardBarrier.WARPGROUP,
        )

    def zero_dead_values(self, tile: QueryTile, entry: Int32, stage: Callable[[], Int32]) -> None:
        """Zeroes the rows of V that no query of the tile sees, if there are some. Every warpgroup does so for itself.

        Args:
            entry: the key tile's entry in its list.
            stage: waits for V and returns its stage; called if there is something to zero.
        """
        assert tile.bits is not None
        keys, bits = self.call.config.keys, tile.bits

        def zero() -> None:
            live = bits.live_rows(tile.visit.tile_of(entry))
            zeroing.zero_dead_rows(keys, self._values(stage()), live)
            cute.arch.fence_proxy("async.shared", space="cta")
            self._sync_warpgroup()

        cutlass.if_generate(Boolean(tile.visit.has_dead_rows(entry)), zero)

    def _values(self, stage: Int32) -> list[tuple[Int32, int]]:
        """Returns address and columns of each term of V in a stage."""
        columns = self.call.memory.v_head_dim
        return [(x, columns) for x in self.shared.stage_addresses(stage, columns)]

    def _sync_warpgroup(self) -> None:
        cute.arch.barrier(barrier_id=ForwardBarrier.WARPGROUP.at(self.lane.group), number_of_threads=128)
