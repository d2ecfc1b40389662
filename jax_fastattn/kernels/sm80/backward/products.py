# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Copies and products of a CTA of the kernel that computes dk, dv and dq (`dkdv_dq.py`), on tiles in shared memory."""

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.device import copies, mma, ptx
from jax_fastattn.kernels.device.layout import SharedTile, accumulator_lane, crossed_lane, plain_lane
from jax_fastattn.kernels.device.products import (
    Factor,
    Pair,
    Words,
    crossing_words,
    product_words,
    result_words,
)
from jax_fastattn.kernels.device.scaling import scaled
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward import gradient
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig
from jax_fastattn.kernels.sm80.backward.dq_reduce import DqTile
from jax_fastattn.kernels.sm80.backward.state import DkdvDqState
from jax_fastattn.kernels.sums.row_means import MEAN_NBYTES

# These names stand for the operands that pass through the stages. A warp multiplies K and V by them, and sums up dK and
# dV, which go by the same names.
QUERY, DOUT = "query", "dout"

# Tensor cores truncate their sums, which an error of bfloat16 hides. Sums of products in terms go to global memory,
# where additions are rounded, before twice this many queries are in them.
SUMMED_QUERIES = 1024


class Products:
    """Emits copies and products. Methods take the `state` of the kernel; its `at` says which thread this is."""

    def __init__(self, spec: KernelSpec, config: DkdvDqConfig):
        self.spec, self.config = spec, config
        self.words = product_words(spec)
        self.crossing = crossing_words(spec)
        # P of float16 operands crosses as the words that the next product takes.
        self.crosses_as_factor = spec.product_dtype == "float16"
        self.memory = config.memory(*spec.row_columns)
        self.stores_numbers = spec.result_nbytes == 4
        self.summed_tiles = SUMMED_QUERIES // config.queries if spec.terms > 1 else 0
        self.row_blocks = config.keys_per_warp // 16
        self.score_blocks = (self.row_blocks, config.part // (8 * config.column_warps))
        self.score_columns = 8 * self.score_blocks[1]
        self.dq_tile = DqTile(spec, config)
        # The second terms of scores follow the first ones of all queries.
        self.apart = 2 * config.queries

    def _operands(self, which: str) -> tuple[SharedTile, int, SharedTile, int]:
        """Returns tile and start of K with Q, or of V with dO; the second start is relative to a stage."""
        memory = self.memory
        if which == QUERY:
            return memory.key, memory.table.offset("key"), memory.query, 0
        return memory.value, memory.table.offset("value"), memory.dout, memory.query.nbytes

    def grad_blocks(self, which: str) -> tuple[int, int]:
        """Returns the blocks of a warp's part of dK (`QUERY`) or dV (`DOUT`)."""
        keys = self.memory.query if which == QUERY else self.memory.dout
        return self.row_blocks, keys.padded_columns // (8 * self.spec.terms * self.config.column_warps)

    # Copies.

    def load_keys(self, state: DkdvDqState) -> None:
        """Starts the copy of K and V, by all threads of the CTA."""
        rows = self._live_keys(state)
        for which, source in ((QUERY, state.operands.key), (DOUT, state.operands.value)):
            tile, start, _, _ = self._operands(which)
            stride = gradient.row_stride(state.operands.kv_heads, tile.columns)
            shared = state.at.shared + start
            copies.load_tile(tile, self.config.threads, state.at.thread, shared, source, stride, rows)

    def scale_values(self, state: DkdvDqState) -> None:
        """Multiplies V by the unit of dP, once the first copies are there; each thread what it has copied."""
        units = state.units()
        if units is None:
            return
        cute.arch.cp_async_wait_group(0)
        tile, start, _, _ = self._operands(DOUT)
        copies.change_tile(
            tile,
            self.config.threads,
            state.at.thread,
            state.at.shared + start,
            lambda values: scaled(self.words, values, units.dp),
        )

    def _live_keys(self, state: DkdvDqState) -> copies.Rows | copies.LiveRows:
        """Returns the keys of the tile that may be read: with lists, the keys that some query of the group sees."""
        if state.bits is None:
            return copies.Rows.live(state.live_keys, state.at.row)
        return copies.LiveRows(state.visit.entries.live_rows(), self.config.keys, state.stored_rows)

    def load_queries(
        self, state: DkdvDqState, which: str, threads: int, member: Int32, first: Int32, stage: Any
    ) -> None:
        """Starts the copy of rows of Q or dO from row `first` of head `member` on, by `threads` threads."""
        _, _, tile, start = self._operands(which)
        thread = state.at.thread if threads == self.config.threads else state.at.role_thread
        rows = copies.Rows.live(state.live_queries, first)
        stride = gradient.row_stride(state.operands.heads, tile.columns)
        source = state.operands.query if which == QUERY else state.operands.dout
        first_row = source + Int64(member) * (2 * tile.columns) + Int64(first) * stride
        copies.load_tile(tile, threads, thread, self._stage(state, start, stage), first_row, stride, rows)

    def zero_dead_queries(self, state: DkdvDqState, which: str, threads: int, live: list[Int32], stage: Any) -> None:
        """Zeroes what `load_queries` made this thread copy of dead rows of Q or dO; wait for it first."""
        _, _, tile, start = self._operands(which)
        thread = state.at.thread if threads == self.config.threads else state.at.role_thread
        copies.zero_dead_rows(tile, threads, thread, self._stage(state, start, stage), live)

    def load_statistics(
        self, state: DkdvDqState, thread: Int32, member: Int32, first: Int32, stage: Any, role: int
    ) -> None:
        """Starts the copy of a role's statistics of the rows from `first` on; `thread` loads its own row.

        The role that has dS also copies their mean keys, if there are any.
        """

        def load() -> None:
            row, pitch = Int64(member) * state.operands.query_length + first, self.config.stats_pitch
            valid = thread < state.live_queries.end - first
            address = state.operands.stats + (row + ptx.where(valid, thread, Int32(0))) * pitch
            target = self.statistics(state, stage, role) + thread * 8
            if self.config.has_means and role == self.config.roles - 1:
                mean, size = address + (pitch - MEAN_NBYTES), ptx.where(valid, Int32(MEAN_NBYTES), Int32(0))
                ptx.copy_async_or_zero(self.means(state, stage) + thread * MEAN_NBYTES, mean, size)
            if not self._hides_past_the_end:
                ptx.copy_async_pair_or_zero(target, address, ptx.where(valid, Int32(8), Int32(0)))
                return
            cutlass.if_generate(valid, lambda: ptx.copy_async_pair_or_zero(target, address, Int32(8)))
            infinity, zero = Float32(float("inf")), Float32(0.0)
            cutlass.if_generate(Boolean(valid == 0), lambda: ptx.store_shared_pair(target, infinity, zero))

        cutlass.if_generate(thread < self.config.part, load)

    @property
    def _hides_past_the_end(self) -> bool:
        """Whether the statistics of a row past the end have to hide it: a full tile of a list may have such rows.

        Its query is zero, so P is 1, times a row of zeros of dO, unless a bias or a function makes P infinite.
        """
        spec = self.spec
        return spec.listed and (spec.bias is not None or codes.score_parts(spec.features) is not None)

    def load_bias(self, state: DkdvDqState, member: Int32, first: Int32) -> None:
        """Starts the copies of a matrix for rows from `first` of head `member` on, by each warp that computes S^T."""
        if state.bias is not None:
            at = state.at
            head = Head(at.sequence.queries.batch, at.kv_head * self.spec.group + member)
            state.bias.copy_first(head, first + at.column_warp * self.score_columns)

    def statistics(self, state: DkdvDqState, stage: Any, role: int) -> Int32:
        """Returns the address of a role's copy of the statistics of a stage."""
        nbytes = self.memory.stats_nbytes
        start = self.memory.table.offset("stats") + role * nbytes
        return state.at.shared + start + stage * (self.config.roles * nbytes)

    def means(self, state: DkdvDqState, stage: Any) -> Int32:
        """Returns the address of the mean keys of a stage."""
        region = self.memory.table["means"]
        return state.at.shared + self.memory.table.offset("means") + stage * region.pitch

    def _stage(self, state: DkdvDqState, start: int, stage: Any) -> Int32:
        table = self.memory.table
        return state.at.shared + (table.offset("stages") + start) + stage * table["stages"].pitch

    # Products.

    def scores(self, state: DkdvDqState, which: str, stage: Any) -> mma.Accumulator:
        """Returns S^T = K Q^T (`QUERY`) or dP^T = V dO^T (`DOUT`): the warp's keys and its part of the queries."""
        rows, row_start, columns, start = self._operands(which)
        row, column = plain_lane(state.at.lane)
        load_a = mma.load_a(rows, state.at.shared + row_start + rows.offset(state.at.warp_row + row, column))
        row, column = crossed_lane(state.at.lane)
        ring = self._stage(state, start, stage)
        load_b = mma.load_b(columns, ring + columns.offset(state.at.column_warp * self.score_columns + row, column))
        acc = mma.zeros(*self.score_blocks)
        # Zero-filled columns past the last whole step add nothing.
        steps = (rows.columns // self.spec.terms + 15) // 16
        factors = [self.words.factor(load, steps=steps) for load in (load_a, load_b)]
        self.words.gemm(acc, (*self.score_blocks, steps), *factors)
        return acc

    def accumulate(
        self, state: DkdvDqState, acc: mma.Accumulator, load_a: Callable[[int, int], Factor], which: str, stage: Any
    ) -> None:
        """Adds dS^T Q (`QUERY`) or P^T dO (`DOUT`) to the warp's part of dK or dV."""
        _, _, tile, start = self._operands(which)
        blocks = self.grad_blocks(which)
        row, column = plain_lane(state.at.lane)
        first_column = state.at.column_warp * (8 * blocks[1])
        load_b = mma.load_b_transposed(tile, self._stage(state, start, stage) + tile.offset(row, column + first_column))
        load_b = self.words.factor(load_b, blocks=blocks[1] * self.config.column_warps)
        self.words.gemm(acc, (*blocks, self.config.part // 16), load_a, load_b)

    def dq(self, state: DkdvDqState) -> mma.Accumulator:
        """Returns the warp's part of dQ = dS K of one key tile."""
        scores, keys, blocks = self.memory.score, self.memory.key, self.dq_tile.blocks
        first_row, first_column = self.dq_tile.place(state.at.dq_warp)
        row, column = crossed_lane(state.at.lane)
        start = state.at.shared + self.memory.table.offset("dscore")
        load_a = mma.load_a_transposed(scores, start + scores.offset(row, column + first_row))
        row, column = plain_lane(state.at.lane)
        load_b = mma.load_b_transposed(keys, state.at.shared + keys.offset(row, column + first_column))
        acc = mma.zeros(*blocks)
        load_a = self.words.factor(load_a, blocks=self.config.queries // 16)
        load_b = self.words.factor(load_b, blocks=self.spec.head_dim // 8)
        self.words.gemm(acc, (*blocks, self.config.keys // 16), load_a, load_b)
        return acc

    # Scores on their way from one product to the next.

    def packed_loader(self, packed: list[Pair]) -> Callable[[int, int], Factor]:
        """Returns the loader of A from pairs of scores in registers."""
        return lambda m, k: self.words.fragment(lambda i: packed[i], self.score_blocks[1], m, k)

    def exchanged_loader(self, state: DkdvDqState, start: int) -> Callable[[int, int], Factor]:
        """Returns the loader of A from the tile of scores at `start`, the warp's key rows."""
        tile = self.memory.score
        row, column = plain_lane(state.at.lane)
        load_a = mma.load_a(tile, state.at.shared + start + tile.offset(state.at.warp_row + row, column))
        return self.words.factor(load_a, steps=self.config.queries // 16)

    def score_address(self, state: DkdvDqState, start: int, first_query: Any) -> Int32:
        """Returns the address of a lane's first score in the tile at `start`."""
        row, column = accumulator_lane(state.at.lane)
        return state.at.shared + start + self.memory.score.offset(state.at.warp_row + row, column) + first_query * 2

    def pair_offsets(self) -> list[tuple[int, int]]:
        """Returns index and offset in the tile of each pair of a lane's scores, query by query."""
        m_blocks, n_blocks = self.score_blocks
        return [
            ((m * n_blocks + n) * 2 + half, self.memory.score.offset(16 * m + 8 * half, 8 * n))
            for n in range(n_blocks)
            for m in range(m_blocks)
            for half in range(2)
        ]

    def store_scores(self, state: DkdvDqState, start: int, words: Words, packed: list[Pair], first_query: Any) -> None:
        """Stores pairs of scores to the tile at `start`; `first_query` is the warp's first query in it."""
        address = self.score_address(state, start, first_query)
        for i, offset in self.pair_offsets():
            words.store(address + offset, packed[i], self.apart)

    # Results.

    def finish(self, state: DkdvDqState, acc: mma.Accumulator, which: str, factor: Any) -> None:
        """Scales a warp's part of dK or dV and rounds it into the tile of K or V, or stores or adds it in float32."""
        tile, start, _, _ = self._operands(which)
        blocks, at = self.grad_blocks(which), state.at
        gradient.finish_rows(acc, blocks, at.warp_row + accumulator_lane(at.lane)[0], state.valid_rows, factor)
        if self.stores_numbers:
            self.store_numbers(state, acc, which, add=self.summed_tiles > 0)
            return
        words = result_words(self.spec)
        corner = tile.offset(at.warp_row, words.columns(at.column_warp * (8 * blocks[1])))
        gradient.scatter(acc, blocks, tile, at.shared + start + corner, at.lane, words)

    def store_numbers(self, state: DkdvDqState, acc: mma.Accumulator, which: str, *, add: bool) -> None:
        """Stores a warp's part of dK or dV in float32 from registers, or adds it to what the warp has stored."""
        at, operands, spec = state.at, state.operands, self.spec
        target, columns = (operands.dk, spec.head_dim) if which == QUERY else (operands.dv, spec.v_head_dim)
        blocks, column_warps = self.grad_blocks(which), self.config.column_warps
        rows = gradient.NumberRows(target, Int64(operands.kv_heads) * (4 * columns), columns, state.stored_rows)
        place = at.warp_row, at.column_warp * (8 * blocks[1])
        gradient.store_numbers(acc, blocks, rows, place, at.lane, column_warps, add=add)

    def store_keys(self, state: DkdvDqState) -> None:
        """Stores dk and dv from the tiles of K and V, rows of 16 by warp, unless `finish` has."""
        if self.stores_numbers:
            return
        at, config = state.at, self.config
        outputs = [(state.operands.dv, *self._operands(DOUT)[:2]), (state.operands.dk, *self._operands(QUERY)[:2])]
        for block in range(0, config.keys // 16, config.warps):
            row = (at.warp + block) * 16

            def store(row: Int32 = row) -> None:
                for target, tile, start in outputs:
                    stride = gradient.row_stride(state.operands.kv_heads, tile.columns)
                    shared, first = at.shared + start + row * tile.pitch, target + Int64(row) * stride
                    copies.store_rows(tile, 16, at.lane, shared, first, stride, state.stored_rows - row)

            cutlass.if_generate(row < config.keys, store)

    def zeros(self, which: str) -> cute.Tensor:
        """Returns registers for a warp's part of dK or dV."""
        blocks = self.grad_blocks(which)
        acc = cute.make_rmem_tensor((blocks[0] * blocks[1] * 4,), cutlass.Float32)
        acc.fill(0.0)
        return acc
