# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles of keys a CTA of a key-stationary kernel works on, and in which order."""

from collections.abc import Callable
from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cutlass_dsl import while_generate, yield_out

from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.plan import TileRange
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import BackwardMemory
from jax_fastattn.kernels.spec import KernelSpec


class KeyTiles:
    """The tiles of a kernel.

    In a cluster the CTAs have neighbouring tiles of a head, at the same time, and load query tiles that any of them
    visits for all of them. A tile may then lie past the end of the keys.

    Args:
        spec: the compile key.
        memory: of the kernel, with its config.
    """

    def __init__(self, spec: KernelSpec, memory: BackwardMemory):
        self.spec, self.memory, self.config = spec, memory, memory.config

    def count(self, key_length: Int32) -> Int32:
        """Tiles of a key/value head, those of whole clusters."""
        keys = self.config.cluster_keys
        return (key_length + (keys - 1)) // keys * self.config.cluster_size

    def blocks(self, key_length: Int32, heads: Int32, multiprocessors: Int32) -> Int32:
        """CTAs: one for each tile of `heads` heads; where dq is computed one per SM, which takes many tiles."""
        count, size = self.count(key_length) * heads, self.config.cluster_size
        return Int32(cutlass.min(count, multiprocessors // size * size)) if self.config.adds_dq else count

    def sections(self, key_length: Int32, heads: Int32, multiprocessors: Int32) -> tuple[Int32, Int32, Int32]:
        """Of `heads` key/value heads, those begun together; how many heads ahead sums are zeroed, magnitudes found.

        Last, those begun before statistics of others can be there.
        """
        key_tiles = self.count(key_length)
        section = Int32(tiles.section(multiprocessors, key_tiles, heads, int(self.spec.uneven)))
        filling = (multiprocessors + (key_tiles - 1)) // cutlass.max(key_tiles, 1)
        # Of integers, measured: nearer, and tiles wait; farther, and L2 has probably lost the keys read for magnitudes.
        ahead = section + filling // 2 + 1 if self.spec.integers else Int32(cutlass.max(section, filling))
        return section, ahead, Int32(cutlass.max(ahead, filling))

    def each(
        self,
        shared: SimpleNamespace,
        problem: tuple,
        visit: Callable[[SimpleNamespace, Int32], None],
        taken: cute.Pointer | None = None,
    ) -> None:
        """Calls `visit(work, phase)` for the CTA's tile of keys; where dq is computed for one after the other.

        Then the producer, which alone passes the counter of tiles (of a cluster) that have been `taken`, takes the next
        one for all of the CTA. Tiles are taken in order, so that who waits for an earlier one waits for a CTA that
        works on it.
        """
        config, rank = self.config, self._rank()
        if not config.adds_dq:
            visit(self._work(cute.arch.block_idx()[0], rank, *problem), Int32(0))
            return
        key_length, all_heads = problem[0][1], problem[0][3]
        address, phase = shared.address + self.memory.index_start, wgmma.Uniform(Int32(0))

        def take() -> Int32:
            if taken is not None:
                self._take(shared, taken, rank, phase[0])
            wgmma.wait(shared.index_full, phase[0])
            index = cute.arch.make_warp_uniform(ptx.load_shared(address))
            last_lane = ptx.thread_index() % 32 == 31
            if config.cluster_size > 1:
                cute.arch.sync_warp()
                first = ptx.cluster_address(shared.index_empty.toint(), Int32(0))
                cutlass.if_generate(last_lane, lambda: ptx.arrive_in_cluster(first))
            else:
                wgmma.release(shared.index_empty, last_lane)
            return index

        def more(index: Int32) -> Boolean:
            return Boolean(index < self.count(key_length) // config.cluster_size * all_heads)

        with while_generate([take()], more) as (index,):
            visit(self._work(index, rank, *problem), phase[0])
            phase[0] = phase[0] ^ 1
            yield_out([take()])

    def _rank(self) -> Int32:
        """The CTA's index in its cluster."""
        return cute.arch.block_idx()[0] % self.config.cluster_size

    def _take(self, shared: SimpleNamespace, taken: cute.Pointer, rank: Int32, phase: Int32) -> None:
        """Takes the next index when everybody has seen the one before; the first CTA of a cluster does so for all."""
        address, barrier, size = shared.address + self.memory.index_start, shared.index_full, self.config.cluster_size

        def take() -> None:
            wgmma.wait(shared.index_empty, phase ^ 1)
            with cute.arch.elect_one():
                index = ptx.fetch_add_global(taken.toint(), Int32(1), "relaxed")
                if size == 1:
                    ptx.store_shared(address, index)
                    cute.arch.mbarrier_arrive(barrier)
                else:
                    for other in range(size):
                        target, counter = (ptx.cluster_address(x, Int32(other)) for x in (address, barrier.toint()))
                        ptx.store_async(target, index, counter)

        if size == 1:
            take()
        else:
            wgmma.expect(barrier, 4)
            cutlass.if_generate(rank == 0, take)

    def _work(
        self, index: Int32, rank: Int32, sizes: tuple[Int32, ...], operands: tuple, window: tuple
    ) -> SimpleNamespace:
        """The keys of a tile and the query tiles that see them; under a causal mask the first keys have most.

        `loads` are the query tiles that pass through shared memory: in a cluster those of all of its CTAs.
        """
        spec, config = self.spec, self.config
        query_length, key_length, num_heads, all_heads, section, ahead = sizes
        kv_heads = num_heads // spec.group
        key_tiles = self.count(key_length)
        size = config.cluster_size
        cluster, head_index = tiles.place_in_sections(index, section, key_tiles // size, all_heads)
        tile = cluster * size + rank
        batch = head_index // kv_heads
        row = tile * config.keys
        bounds = tiles.load_bounds(spec, batch, (query_length, key_length), operands, window)
        visit = tiles.query_tiles(row, config.keys, config.queries, **bounds)
        loads = visit
        if size > 1:
            first = cluster * config.cluster_keys
            loads = gradient.uniform(tiles.query_tiles(first, config.cluster_keys, config.queries, **bounds))
            # A tile that nobody sees is nowhere else.
            visit = TileRange(*(tiles.clamp(end, loads.begin, loads.end) for end in visit))
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
            loads=loads if size > 1 else visit,
            steps=(visit.end - visit.begin) * spec.group,
        )
