# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`DqSum` where a CTA takes all keys of a head, tile by tile: sums have one order, and gradients the same bits always.

A sum belongs to one thread. The first tile of keys that a query tile sees stores it, others add to it, and the last one
loads it into the product's accumulator, and stores dq from there. So there are no zeros and no counters, nor any sums
of query tiles that see one tile of keys.
"""

from collections.abc import Callable
from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.sm90.dq_sum import DqSum


class DqOrdered(DqSum):
    """Emits the warpgroup's code; see `DqSum`."""

    def prepare(self, shared: SimpleNamespace, work: SimpleNamespace, sums: tuple) -> Callable[[], None]:
        """Nothing: there are no zeros, and all statistics were there before."""
        del shared, work, sums
        return lambda: None

    def run(self, state: SimpleNamespace, work: SimpleNamespace, phase: Int32) -> None:
        """The same."""
        state.work = work
        state.added[0], state.added[1] = work.first_head, work.visit.end - 1
        # As in `DqSum.run`.
        wgmma.wait(state.shared.key_full, phase)
        for uniform in (state.added, state.turn):
            uniform.settle()
        wgmma.loop(work.steps, lambda i: self._add(state, i))
        wgmma.release(state.shared.keys_empty, state.thread % 32 == 31)

    def _add(self, state: SimpleNamespace, i: Int32) -> None:
        del i  # who added before is told by the tile of keys
        work, shared, turn, at = state.work, state.shared, state.turn[0], state.added
        buffer, chunks, queries = turn % 2, self._chunks(), self.config.queries
        seen = tiles.key_tiles(at[1] * queries, queries, self.config.keys, **work.bounds)
        is_first, is_last = Boolean(seen.begin == work.tile), Boolean(seen.end == work.tile + 1)
        for chunk, (row_block, column) in enumerate(chunks):
            address = self._sums(state, at, chunk) + state.thread % 32 * 16
            places = [address + 512 * n for n in range(self.columns // 8)]
            state.dq.fill(0.0)
            cutlass.if_generate(
                Boolean(is_last & (seen.begin < work.tile)), lambda places=places: self._load(state, places)
            )
            if chunk == 0:
                wgmma.wait(shared.dscore_full + buffer, turn // 2 % 2)
            self._start(state, buffer, row_block, column, accumulate=True)
            warpgroup.wait_group(0)
            if chunk == len(chunks) - 1:
                wgmma.release(shared.dscore_empty + buffer)

            cutlass.if_generate(
                is_last,
                lambda chunk=chunk: self._store_part(state, self._rows(state, at), chunk),
                lambda places=places: self._keep(state, places, is_first),
            )
        self._advance(work, at)
        state.turn[0] = turn + 1

    def _load(self, state: SimpleNamespace, places: list[Int64]) -> None:
        """Loads sums of a part of a tile into the accumulator."""
        for n, place in enumerate(places):
            for k, x in enumerate(ptx.load_global_ordered(place)):
                state.dq[4 * n + k] = x

    def _keep(self, state: SimpleNamespace, places: list[Int64], is_first: Boolean) -> None:
        """Stores the accumulator as sums of a part of a tile, or adds it to them."""

        def store() -> None:
            for n, place in enumerate(places):
                ptx.store_global_chunk(place, [ptx.bits(state.dq[4 * n + k]) for k in range(4)])

        def add() -> None:
            for n, place in enumerate(places):
                ptx.add_global_chunk(place, [state.dq[4 * n + k] for k in range(4)])

        cutlass.if_generate(is_first, store, add)
