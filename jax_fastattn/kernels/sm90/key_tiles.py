# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles of keys a CTA of a key-stationary kernel works on, and in which order."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import BackwardMemory
from jax_fastattn.kernels.spec import KernelSpec

# Bytes of Q, dO and sums of dq that the heads of a section have where CTAs add in one order, for even and uneven tiles.
# With fewer heads CTAs wait for those before them; with more, L2 does not hold the rows until the next tile of keys.
SECTION_NBYTES = {False: 16 << 20, True: 24 << 20}


class HeadOrder(NamedTuple):
    """In which order heads are worked on.

    Attributes:
        heads: those of all batch entries; key/value heads in a key-stationary kernel, as below.
        section: heads that are begun together, see `plan.section`.
        ahead: key/value heads from that which a CTA works on to that whose sums it zeroes.
        prepared: key/value heads whose statistics are written before the key-stationary kernel begins.
    """

    heads: Int32
    section: Int32
    ahead: Int32 | None = None
    prepared: Int32 | None = None


class KeyTiles:
    """The tiles of a kernel.

    Args:
        spec: the compile key.
        memory: of the kernel, with its config.
    """

    def __init__(self, spec: KernelSpec, memory: BackwardMemory):
        self.spec, self.memory, self.config = spec, memory, memory.config

    def count(self, key_length: Int32) -> Int32:
        """Tiles of a key/value head."""
        return (key_length + (self.config.keys - 1)) // self.config.keys

    def blocks(self, key_length: Int32, heads: Int32, multiprocessors: Int32) -> Int32:
        """CTAs: one for each tile of `heads` heads; where dq is computed one per SM, which takes many tiles."""
        count = self.count(key_length) * heads
        return Int32(cutlass.min(count, multiprocessors)) if self.config.adds_dq else count

    def sections(
        self, query_length: Int32, key_length: Int32, heads: Int32, multiprocessors: Int32
    ) -> tuple[Int32, Int32]:
        """Returns how many of `heads` key/value heads are begun together, and how many heads ahead sums are zeroed.

        As many heads as the latter are begun before zeros and statistics of others can be there.
        """
        key_tiles, spec = self.count(key_length), self.spec
        if spec.ordered:
            row_nbytes = 2 * (self.memory.head_dim + self.memory.v_head_dim) + 4 * self.memory.head_dim
            most_rows = SECTION_NBYTES[spec.uneven] // row_nbytes // spec.group
            section = Int32(tiles.alike_section(most_rows, query_length, heads))
        else:
            section = Int32(tiles.section(multiprocessors, key_tiles, heads, int(spec.uneven)))
        filling = (multiprocessors + (key_tiles - 1)) // cutlass.max(key_tiles, 1)
        return section, Int32(cutlass.max(section, filling))

    def each(
        self,
        shared: SimpleNamespace,
        problem: tuple,
        visit: Callable[[SimpleNamespace, Int32], None],
        taken: cute.Pointer | None = None,
    ) -> None:
        """Calls `visit(work, phase)` for the CTA's tile of keys; where dq is computed for one after the other.

        Then the producer, which alone passes the counter of tiles that have been `taken`, takes the next one for all of
        the CTA. `problem` has the last three arguments of `_work`.

        No CTA waits for ever, however few CTAs run and however many tiles there are. Work on a tile waits for work on
        tiles that are earlier in the order: for zeros of sums, which come with an earlier section of heads, or for a
        turn, which comes after earlier tiles of the same head (`plan.place_in_sections`). CTAs that run take the tiles
        in order, and a CTA finishes a tile before it begins the next one that it has taken. So the earliest unfinished
        tile waits for no other one, and its CTA is at work on it.
        """
        if not self.config.adds_dq:
            visit(self._work(cute.arch.block_idx()[0], *problem), Int32(0))
            return
        key_length, all_heads = problem[0][1], problem[0][3]
        address, phase = shared.address + self.memory.index_start, wgmma.Uniform(Int32(0))

        def take() -> Int32:
            if taken is not None:
                wgmma.wait(shared.index_empty, phase[0] ^ 1)
                with cute.arch.elect_one():
                    ptx.store_shared(address, ptx.fetch_add_global(taken.toint(), Int32(1), "relaxed"))
                    cute.arch.mbarrier_arrive(shared.index_full)
            wgmma.wait(shared.index_full, phase[0])
            index = cute.arch.make_warp_uniform(ptx.load_shared(address))
            wgmma.release(shared.index_empty, ptx.thread_index() % 32 == 31)
            return index

        def available(index: Int32) -> Boolean:
            return Boolean(index < self.count(key_length) * all_heads)

        with while_generate([take()], available) as (index,):
            visit(self._work(index, *problem), phase[0])
            phase[0] = phase[0] ^ 1
            yield_out([take()])

    def _work(self, index: Int32, sizes: tuple[Int32, ...], operands: tuple, window: tuple) -> SimpleNamespace:
        """The keys of a tile and the query tiles that see them; under a causal mask the first keys have most.

        The index is that of a tile in the order in which they are taken.
        """
        spec, config = self.spec, self.config
        query_length, key_length, num_heads, all_heads, section, ahead = sizes
        kv_heads = num_heads // spec.group
        key_tiles = self.count(key_length)
        tile, head_index = tiles.place_in_sections(index, section, key_tiles, all_heads)
        batch = head_index // kv_heads
        row = tile * config.keys
        bounds = tiles.load_bounds(spec, batch, (query_length, key_length), operands, window)
        visit = tiles.query_tiles(row, config.keys, config.queries, **bounds)
        if config.adds_dq:
            # Keys past the end would add to dq: where there are some, every tile is masked.
            full_begin = ptx.where(row + config.keys > bounds["key_end"], visit.end, visit.full_begin)
            visit = visit._replace(full_begin=full_begin, full_end=Int32(cutlass.max(visit.full_end, full_begin)))
        visit = gradient.uniform(visit)
        return SimpleNamespace(
            tile=tile,
            key_tiles=key_tiles,
            ahead=ahead,
            head_index=head_index,
            all_heads=all_heads,
            row=row,
            batch=batch,
            kv_head=head_index % kv_heads,
            kv_heads=kv_heads,
            first_head=head_index % kv_heads * spec.group,
            num_heads=num_heads,
            query_length=query_length,
            key_length=key_length,
            bounds=bounds,
            visit=visit,
            steps=(visit.end - visit.begin) * spec.group,
        )
