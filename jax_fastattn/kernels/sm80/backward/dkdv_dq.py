# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The portable kernel that computes dk, dv and dq together: five products where two kernels need seven.

One CTA owns a tile of keys of one key/value head and visits the query tiles that see it, of all heads of the group. For
each it computes S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, and dQ = dS K, which is added to dq_accum in
global memory. Scores have keys as rows, so P^T and dS^T are A operands from registers.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies, ptx
from jax_fastattn.kernels.device.launch import Launch
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.bias.warp import WarpBias
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig
from jax_fastattn.kernels.sm80.backward.dq_reduce import dq_reduce
from jax_fastattn.kernels.sm80.backward.products import DOUT, QUERY, Products
from jax_fastattn.kernels.sm80.backward.roles import GradientRole, ProbabilityRole, QueryLoop, Role
from jax_fastattn.kernels.sm80.backward.single_role import SingleRole
from jax_fastattn.kernels.sm80.backward.state import DkdvDqPlace, DkdvDqRows, DkdvDqState, DqScratch, GroupBits
from jax_fastattn.kernels.sm80.backward.warp import copied_by
from jax_fastattn.kernels.sm80.schedule import schedule
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.compared import ComparedRows
from jax_fastattn.kernels.visits.lists import GlobalList, Planes, TileBits
from jax_fastattn.kernels.visits.visit import Edges, Visit, mask_past_end


class HeadOrder(NamedTuple):
    """In which order CTAs take key tiles.

    Attributes:
        group: how many key/value heads are visited together: first all first key tiles, then all second ones.
    """

    group: Int32


class DkdvDqKernel:
    """Writes dk and dv, and adds to dq_accum."""

    def __init__(self, spec: KernelSpec):
        stages.refuse(spec.features, "the portable backward kernel")
        config: DkdvDqConfig = spec.config
        self.spec, self.config = spec, config
        self.schedule, self.query_tiles = schedule(spec, config.keys), schedule(spec, config.queries)
        self.products = Products(spec, config)
        self.reduce = dq_reduce(spec, config)
        self.shared_nbytes = config.shared_memory(*spec.row_columns)

    def launch(self, buffers: Buffers, scalars: Scalars, order: HeadOrder) -> Launch:
        """Returns the kernel's launch."""
        kv_heads = scalars.num_heads // self.spec.group
        return Launch(
            self.kernel,
            (buffers, scalars, order),
            grid=self.schedule.blocks(scalars.key_length, scalars.batch, kv_heads),
            block=self.config.threads,
            shared_bytes=self.shared_nbytes,
            min_blocks=self.config.blocks,
        )

    @cute.kernel
    def kernel(self, buffers: Buffers, scalars: Scalars, order: HeadOrder):
        at = self._locate(buffers, scalars, order)
        state = self._state(buffers, scalars, at)
        self._load_first(state)
        self.products.scale_values(state)
        if cutlass.const_expr(self.config.roles == 1):
            self._run(SingleRole, state, scalars.scale)
        else:
            if at.role == 0:
                self._run(ProbabilityRole, state, scalars.scale)
            else:
                self._run(GradientRole, state, scalars.scale)
        cute.arch.sync_threads()
        self.products.store_keys(state)

    def _run(self, kind: type[Role], state: DkdvDqState, scale: Float32) -> None:
        role = kind.start(self.products, self.reduce, state)
        QueryLoop(role, scale).run()
        role.warp.finish(scale)

    def _locate(self, buffers: Buffers, scalars: Scalars, order: HeadOrder) -> DkdvDqPlace:
        """Returns which thread this is, and the CTA's keys. Heads are visited in groups, whose sums of dq fit L2."""
        config = self.config
        # Next to a function of scores ptxas (CUDA 13) once read the register of an index that is read once ahead of the
        # instruction that loads it; notebook/checks.md has the code.
        thread = ptx.thread_index() if codes.plane_parts(self.spec.features) is not None else cute.arch.thread_idx()[0]
        shared = cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint()
        index = self.reduce.next_tile(buffers, thread, shared)
        work = self.schedule.in_sections(index, order.group, buffers, scalars)
        warp = cute.arch.make_warp_uniform(thread // 32)
        # If a role has four warps, warps w and w + 4 share a scheduler: one of each role.
        role_warp = warp % config.role_warps
        key_warp = role_warp // config.column_warps
        return DkdvDqPlace(
            tile=work.tile,
            row=work.tile * config.keys,
            kv_head=work.kv_head,
            sequence=work.sequence,
            shared=shared,
            thread=thread,
            lane=thread % 32,
            warp=warp,
            role=warp // config.role_warps,
            role_thread=thread % (32 * config.role_warps),
            role_warp=role_warp,
            dq_warp=warp % config.dq_warps,
            key_warp=key_warp,
            column_warp=warp % config.column_warps,
            warp_row=key_warp * config.keys_per_warp,
        )

    def _visit(self, at: DkdvDqPlace, bounds: plan.Bounds) -> Visit:
        """Returns the query tiles that see some key of the tile."""
        config = self.config
        visit = bounds.query_tiles(at.row, config.keys, config.queries)
        visit = mask_past_end(visit, at.row + config.keys > bounds.key_end, low=False)
        return Visit.of_range(visit, Edges(bounds.kind.right, True))

    def _listed(self, buffers: Buffers, scalars: Scalars, at: DkdvDqPlace) -> tuple[Visit, GroupBits]:
        """Returns the query tiles that see some key of the tile by its list, and their bits."""
        group, planes, batch = self.spec.group, Planes.of(scalars), at.sequence.queries.batch
        tiles = self.spec.tiles_of(self.config)
        if self.spec.classifies_keys:
            # The scalar holds for the lists of tiles of queries that the kernel of dbias reads.
            planes = planes._replace(tile=1)
        key_tiles = copies.count(scalars.key_length, tiles.keys)
        query_tiles = copies.count(scalars.query_length, tiles.rows)
        lists = planes.query_lists(batch, at.kv_head, scalars.num_heads // group)
        entries = GlobalList.of(buffers.query_lists, planes.row(lists, at.tile, key_tiles), query_tiles)
        plane = planes.bits(batch, at.kv_head * group, at.kv_head)
        row = planes.row(plane, at.tile, key_tiles)
        arrays = buffers.key_records, buffers.query_ids
        compared = ComparedRows.of(tiles, arrays, plane, at.tile, (key_tiles, query_tiles))
        first = TileBits.of(tiles, buffers.query_bits, row, query_tiles, compared)
        stride = Int64(planes.head * key_tiles) * query_tiles * tiles.tile_nbytes
        return Visit.of_list(entries, fulls_first=False), GroupBits(first, planes.head, stride)

    def _state(self, buffers: Buffers, scalars: Scalars, at: DkdvDqPlace) -> DkdvDqState:
        """Returns the device values that all roles share."""
        spec, heads, tile, dq_semaphore = self.spec, scalars.num_heads, self.reduce.tile, buffers.dq_semaphore
        queries, keys, bounds = at.sequence.queries, at.sequence.keys, at.sequence.bounds()
        visit, bits = self._listed(buffers, scalars, at) if spec.listed else (self._visit(at, bounds), None)
        kv_heads, first_head = heads // spec.group, at.kv_head * spec.group
        key_row = keys.row_head(at.row, kv_heads, at.kv_head)
        query_row = queries.row_head(Int32(0), heads, first_head)
        first_tile = self.query_tiles.index(at.sequence, scalars, first_head, Int32(0))
        live_keys = bounds.live_keys()
        live_queries = bounds.live_queries()
        if not bounds.kind.hides_queries:
            live_queries = plan.LiveRange(Int32(0), bounds.query_end)
        columns, v_columns = spec.row_columns
        operands = DkdvDqRows(
            key=buffers.key.toint() + key_row * (2 * columns),
            value=buffers.value.toint() + key_row * (2 * v_columns),
            dk=buffers.dk.toint() + key_row * (spec.result_nbytes * spec.head_dim),
            dv=buffers.dv.toint() + key_row * (spec.result_nbytes * spec.v_head_dim),
            query=buffers.query.toint() + query_row * (2 * columns),
            dout=buffers.dout.toint() + query_row * (2 * v_columns),
            stats=buffers.stats.toint() + queries.head_row(heads, first_head) * self.config.stats_pitch,
            query_length=scalars.query_length,
            heads=heads,
            kv_heads=kv_heads,
        )
        accum, tile_count = buffers.dq_accum.toint() + first_tile * tile.nbytes, self.query_tiles.pitch(scalars)
        valid_rows, stored_rows = bounds.key_end - at.row, keys.length - at.row
        bias = self._bias(buffers, scalars, at)
        score = Score.backward(spec, buffers, scalars, scalars.scale, bias)
        semaphore = None if dq_semaphore is None else dq_semaphore.toint() + first_tile * (4 * tile.warps)
        return DkdvDqState(
            at=at,
            bounds=bounds,
            visit=visit,
            live_keys=live_keys,
            live_queries=live_queries,
            operands=operands,
            valid_rows=valid_rows,
            stored_rows=stored_rows,
            score=score,
            dq_scratch=DqScratch(accum, tile_count, semaphore),
            bits=bits,
            buffers=buffers,
            bias=bias,
        )

    def _bias(self, buffers: Buffers, scalars: Scalars, at: DkdvDqPlace) -> WarpBias | None:
        """Returns the matrix that warps copy for themselves; None if there is none, or no room."""
        if not self.config.bias_pieces:
            return None
        nbytes = self.config.bias_ring.nbytes
        address = at.shared + self.products.memory.table.offset("bias") + at.role_warp * nbytes
        return WarpBias.of_pieces(self.spec, buffers.bias, scalars, address, at.row + at.warp_row)

    def _load_first(self, state: DkdvDqState) -> None:
        """Starts the copies of K, V and the first part of Q and dO, by all threads."""
        products, config, zero = self.products, self.config, Int32(0)
        products.load_keys(state)
        first = state.visit.tile(state.visit.begin) * config.queries

        def load_bias() -> None:
            if state.bias is not None:
                # The other role has none.
                cutlass.if_generate(state.at.role == 0, lambda: products.load_bias(state, zero, first))

        def load() -> None:
            load_bias()
            for which in (QUERY, DOUT):
                products.load_queries(state, which, config.threads, zero, first, 0)
            for role in range(config.roles):
                products.load_statistics(state, state.at.thread, zero, first, 0, role)

        def load_by_role(role: int) -> None:
            threads = 32 * config.role_warps
            products.load_queries(state, copied_by(role, config), threads, zero, first, 0)
            products.load_statistics(state, state.at.role_thread, zero, first, 0, role)

        def load_apart() -> None:
            load_bias()
            cutlass.if_generate(state.at.role == 0, lambda: load_by_role(0), lambda: load_by_role(1))

        # Threads that zero what they have copied of a list's tiles copy the first one as they copy all later ones.
        apart = state.bits is not None and config.roles == 2
        cutlass.if_generate(state.visit.begin < state.visit.end, load_apart if apart else load)
        cute.arch.cp_async_commit_group()
