# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the consumers of a key-stationary kernel zero or scale in shared memory: TMA cannot prepare an operand."""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from jax_fastattn.kernels.device import copies, ptx, scaling, wgmma, zeroing
from jax_fastattn.kernels.device.products import product_words
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import BackwardMemory, DkdvDqBarrier
from jax_fastattn.kernels.sm90.backward.key_schedule import KeyTile
from jax_fastattn.kernels.sm90.backward.shared import BackwardShared
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS
from jax_fastattn.kernels.sums.units import Units


@dataclass(frozen=True)
class SharedRows:
    """Emits the zeroing of rows that nothing sees, and the scaling of V.

    Attributes:
        memory: the table of shared memory, with the config.
    """

    spec: KernelSpec
    memory: BackwardMemory
    shared: BackwardShared

    def scale_values(self, group: Any, units: Units) -> None:
        """Multiplies V of 64 keys by the unit of dP, by the warpgroup that alone reads them."""
        if self.spec.has_gradient_units:
            address, nbytes = self.shared.regions.stage("value", group), self.memory.table["value"].pitch
            scaling.scale_tile(address, nbytes, product_words(self.spec), units.dp, self.memory.warpgroup_barrier)

    def zero_keys(self, work: KeyTile, group: Int32) -> None:
        """Zeroes the rows of K and V that no query sees. Each warpgroup does so for its own keys.

        P of such a key is 0. But its dP would be NaN if V were, and NaN * 0 would enter dS; so would 0 * NaN dQ.
        """
        live, first = work.bounds.live_keys(), work.row + group * WARPGROUP_ROWS

        def operands() -> list[tuple[Int32, int]]:
            group = ptx.thread_index() // 128  # It is read anew, as in `zero_hidden_rows`.
            return self.shared.key_terms(group)

        zeroing.zero_hidden_rows(
            WARPGROUP_ROWS,
            operands,
            copies.Rows.live(live, first, length=work.keys.zeros_from()),
            threads=128,
            barrier=DkdvDqBarrier.WARPGROUP,
        )

    def zero_dead_keys(self, work: KeyTile) -> None:
        """Zeroes the rows of K and V of the keys that a list calls dead."""
        listed = work.listed
        if listed is None:
            return

        def zero() -> None:
            live = listed.entries.live_rows()
            group = ptx.thread_index() // 128  # It is read anew, as in `zero_hidden_rows`.
            own = [ptx.where(group == 0, live[i], live[i + 2]) for i in range(2)]
            self._zero_dead_rows(WARPGROUP_ROWS, self.shared.key_terms(group), own)

        cutlass.if_generate(listed.has_dead_keys != 0, zero)

    def zero_dead_queries(self, stage: Int32) -> None:
        """Zeroes the rows of Q and dO of an edge tile of a list that see no key of the CTA.

        Every warpgroup does so for itself: neither waits for the other one, and zeros harm no product.
        """
        memory, bits = self.memory, self.shared.bits(self.spec, stage)
        live = bits.live_queries()
        all_live = functools.reduce(operator.and_, live)

        def zero() -> None:
            self._zero_dead_rows(memory.config.queries, self.shared.query_terms(stage), live)

        cutlass.if_generate(cute.arch.make_warp_uniform(all_live) != -1, zero)

    def _zero_dead_rows(self, rows: int, operands: list[tuple[Int32, int]], live: list[Int32]) -> None:
        """Zeroes rows for the products of this warpgroup; see `zeroing.zero_dead_rows`."""
        zeroing.zero_dead_rows(rows, operands, live)
        cute.arch.fence_proxy("async.shared", space="cta")
        group = ptx.thread_index() // 128
        cute.arch.barrier(barrier_id=self.memory.warpgroup_barrier.at(group), number_of_threads=128)

    def zero_queries(self, work: KeyTile, index: Int32, stage: Int32) -> None:
        """Zeroes the rows of Q and dO of a masked tile that see no key, for both warpgroups."""
        spec = self.spec
        kind = work.bounds.kind
        if kind.hides_first_queries or (kind.hides_last_queries and not kind.packed):
            self.zero_hidden_queries(work, index, stage)

    def zero_last_queries(self, work: KeyTile, at: wgmma.Uniform) -> None:
        """Zeroes the rows of Q and dO past the last query that sees a key, before the first tile of a head.

        Only that tile has such rows, where the next sequence begins. The statistics make P 0 there, as they do past the
        end of an array, provided that scores are numbers. So no tile needs a mask for that end.

        Args:
            at: stage and phase of the first tile.
        """
        visit = work.visit
        live = work.bounds.live_queries()

        def zero() -> None:
            stage, phase = at[0], at[1]
            wgmma.wait(self.shared.query_full + stage, phase)
            wgmma.wait(self.shared.dout_full + stage, phase)
            self.zero_hidden_queries(work, visit.end - 1, stage)

        straddles = (visit.tile(visit.end - 1) + 1) * self.memory.config.queries > live.end
        cutlass.if_generate(Boolean(straddles & (visit.begin < visit.end)), zero)

    def zero_hidden_queries(self, work: KeyTile, index: Int32, stage: Int32) -> None:
        """Zeroes the rows of Q and dO that see no key in the loaded tile at a position."""
        config, memory = self.memory.config, self.memory
        live, first = work.bounds.live_queries(), work.visit.tile(index) * config.queries
        zeroing.zero_hidden_rows(
            config.queries,
            lambda: self.shared.query_terms(stage),
            copies.Rows.live(live, first, length=work.queries.zeros_from()),
            threads=config.consumer_threads,
            barrier=memory.both_barrier,
            together=config.adds_dq,
        )
