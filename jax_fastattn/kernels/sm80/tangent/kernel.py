# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents of output and log-sum-exp with mma.sync and cp.async: one CTA per (query tile, query head, batch entry).

A warp owns 16 query rows. With a prime for the tangent of an operand, it computes for each tile of keys

    S = Q K^T    S' = Q' K^T + Q K'^T    P = 2^(S - lse)    W = P (S' - c)    O' += W V + P V'

from the saved log-sum-exp, so that there is no maximum and nothing is rescaled. `sums/tangent_rows.py` has the sums of
rows and what becomes of O'. Products with an operand that does not move are left out. The kernel visits key tiles, and
keeps hidden keys and values out, as `forward/kernel.py` does:

    wait for K, K'    load V, V'    S, S'    load the next K, K'    P, W    wait for V, V'    O'
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies, mma
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.device.layout import SharedTile, accumulator_lane, crossed_lane, padded, plain_lane
from jax_fastattn.kernels.device.products import product_words
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.places import ScoreTile
from jax_fastattn.kernels.features.visible.bits import Bits
from jax_fastattn.kernels.features.visible.bounds import Visibility
from jax_fastattn.kernels.features.visible.edge import Edge
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.forward.state import ForwardPlace, Operand
from jax_fastattn.kernels.sm80.schedule import schedule
from jax_fastattn.kernels.sm80.tangent.config import TangentConfig
from jax_fastattn.kernels.sums.tangent_rows import RowPlace, TangentRows
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.query_tile_list import QueryTileList
from jax_fastattn.kernels.visits.visit import Edges, Visit

QUERY, KEY, VALUE = "query", "key", "value"


@dataclass(frozen=True)
class TangentTile:
    """Describes a CTA's tile of queries, and the part of one thread in it.

    Attributes:
        at: which thread this is, and which queries the tile has.
        operands: rows in global memory by name, of the operand and of its tangent if it moves. Queries begin with the
            first one of the tile, keys and values with the first one of the sequence.
        visit: the key tiles that some query of the tile sees.
        bounds: what rows of the sequence see.
        live_keys: the keys that some query of the sequence sees; others may hold anything.
        bits: which scores of edge tiles of a list count; None without lists.
        score: maps products to logits.
        rows: sums of the lane's rows.
        out: accumulator of O', `[16, columns]` float32.
        column: the lane's first accumulator column.
        scale: the factor on products.
    """

    at: ForwardPlace
    operands: dict[str, list[Operand]]
    visit: Visit
    bounds: plan.Bounds
    live_keys: plan.LiveRange
    bits: TileBits | None
    score: Score
    rows: TangentRows
    out: cute.Tensor
    column: Int32
    scale: Float32


class TangentKernel:
    """Launches the kernel of one compile key."""

    def __init__(self, spec: KernelSpec):
        stages.refuse(spec.features, "the portable kernel of tangents")
        self.spec = spec
        self.config: TangentConfig = spec.config
        self.schedule = schedule(spec, self.config.rows)
        self.words = product_words(spec)
        columns, v_columns = spec.row_columns
        self.tiles = {
            QUERY: SharedTile(self.config.rows, columns),
            KEY: SharedTile(self.config.keys, columns),
            VALUE: SharedTile(self.config.keys, v_columns),
        }
        self.table = self.config.table(columns, v_columns)
        self.score_blocks = self.config.keys // 8
        self.out_blocks = self.tiles[VALUE].padded_columns // (8 * spec.terms)
        self.head_steps = self.tiles[KEY].padded_columns // (16 * spec.terms)

    @cute.jit
    def __call__(self, buffers: Buffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernel."""
        start_all(self.launches(buffers, scalars), stream)

    def launches(self, buffers: Buffers, scalars: Scalars) -> list[Launch]:
        """Returns what is launched."""
        launch = Launch(
            self.kernel,
            (buffers, scalars),
            grid=self.schedule.blocks(scalars.query_length, scalars.batch, scalars.num_heads),
            block=self.config.threads,
            shared_bytes=self.table.nbytes,
            min_blocks=self.config.blocks,
        )
        return [launch]

    @cute.kernel
    def kernel(self, buffers: Buffers, scalars: Scalars):
        tile = self._tile(buffers, scalars)
        self._start(tile)
        for phase in tile.visit.phases(plan.Order.DOWN):
            for step in cutlass.range(phase.steps, unroll=1):
                self._visit(tile, phase.position(step), masked=phase.masked)
        cute.arch.cp_async_wait_group(0)
        tile.rows.store(tile.score, tile.at.score_head, tile.out)

    # Set-up.

    def _tile(self, buffers: Buffers, scalars: Scalars) -> TangentTile:
        """Returns the CTA's queries and what they see."""
        spec, config = self.spec, self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        work = self.schedule.longest_first(block, buffers, scalars)
        at = ForwardPlace.of(work, config.rows, thread)
        bounds = at.sequence.bounds()
        if spec.listed:
            listed = QueryTileList.of(spec.tiles_of(config), work, buffers, scalars)
            visit, bits = listed.visit, listed.bits
        else:
            tiles = bounds.key_tiles(at.row, config.rows, config.keys)
            visit, bits = Visit.of_range(tiles, Edges(bounds.kind.left, True)), None
        row, column = accumulator_lane(at.lane)
        place = RowPlace(
            queries=at.sequence.queries,
            query_end=bounds.query_end,
            head=at.head,
            heads=scalars.num_heads,
            row=at.row + at.warp * 16 + row,
            quad_lane=at.lane % 4,
        )
        # A store takes 32 columns.
        out = cute.make_rmem_tensor((padded(spec.v_head_dim, 32) // 2,), Float32)
        out.fill(0.0)
        return TangentTile(
            at=at,
            operands={name: self._operands(name, at, buffers, scalars) for name in self.tiles},
            visit=visit,
            bounds=bounds,
            live_keys=bounds.live_keys(),
            bits=bits,
            score=Score.backward(spec, buffers, scalars, scalars.scale).start(at.score_head),
            rows=TangentRows.start(spec, buffers, place),
            out=out,
            column=column,
            scale=scalars.scale,
        )

    def _operands(self, name: str, at: ForwardPlace, buffers: Buffers, scalars: Scalars) -> list[Operand]:
        """Returns rows of an operand, and of its tangent if it moves."""
        nbytes, group = 2 * self.tiles[name].columns, 1 if name == QUERY else self.spec.group
        stride = Int64(scalars.num_heads // group) * nbytes
        first = at.sequence.queries.row(at.row) if name == QUERY else at.sequence.keys.row()
        offset = first * stride + Int64(at.head if name == QUERY else at.kv_head) * nbytes
        pointers = [getattr(buffers, name), getattr(buffers, f"{name}_tangent")]
        return [Operand(x.toint() + offset, stride) for x in pointers if x is not None]

    # Copies.

    def _address(self, tile: TangentTile, name: str, which: int) -> Int32:
        """Returns the address of the tile of an operand (0) or of its tangent (1)."""
        return tile.at.shared + self.table.offset(name) + which * self.table[name].pitch

    def _load(self, tile: TangentTile, name: str, index: Int32, *, partial: bool) -> None:
        """Starts the copies of a tile of keys or values; `partial` says whether some may be hidden from all queries."""
        first = tile.visit.tile(index) * self.config.keys
        live = copies.Rows.live(tile.live_keys, first) if partial or tile.live_keys.hides_first else None
        for which, source in enumerate(tile.operands[name]):
            copies.load_tile(
                self.tiles[name],
                self.config.threads,
                tile.at.thread,
                self._address(tile, name, which),
                source.address + Int64(first) * source.stride,
                source.stride,
                live,
            )

    def _start(self, tile: TangentTile) -> None:
        """Starts the copies of the queries, and of the first tile of keys."""
        rows = copies.Rows(None, tile.bounds.query_end - tile.at.row)

        def load() -> None:
            for which, source in enumerate(tile.operands[QUERY]):
                address = self._address(tile, QUERY, which)
                threads, thread = self.config.threads, tile.at.thread
                copies.load_tile(self.tiles[QUERY], threads, thread, address, source.address, source.stride, rows)
            self._load(tile, KEY, tile.visit.end - 1, partial=True)

        cutlass.if_generate(tile.visit.begin < tile.visit.end, load)
        cute.arch.cp_async_commit_group()

    # One key tile.

    def _visit(self, tile: TangentTile, index: Int32, *, masked: bool) -> None:
        """Adds one key tile to the rows."""
        # Only the first edge tile of a range holds the end of the keys; any edge tile of a list may.
        partial = masked and tile.bits is not None
        place = self._score_tile(tile, index)
        edge = self._edge(tile, index, place) if masked else None
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self._load(tile, VALUE, index, partial=masked)
        cute.arch.cp_async_commit_group()
        scores, moves = self._products(tile)
        cute.arch.sync_threads()
        cutlass.if_generate(index > tile.visit.begin, lambda: self._load(tile, KEY, index - 1, partial=partial))
        cute.arch.cp_async_commit_group()
        weights = tile.rows.weigh(tile.score, place, scores, edge)
        if self.spec.moves_scores:
            tile.rows.move(place, (scores, moves), weights, tile.scale, edge)
        cute.arch.cp_async_wait_group(1)
        if partial:
            self._zero_dead_values(tile, index)
        cute.arch.sync_threads()
        self._add_values(tile, scores, moves)

    def _score_tile(self, tile: TangentTile, index: Int32) -> ScoreTile:
        """Returns where the lane's scores lie."""
        return ScoreTile(tile.rows.place.row, tile.visit.tile(index), self.config.keys, tile.column, self.score_blocks)

    def _edge(self, tile: TangentTile, index: Int32, place: ScoreTile) -> Edge:
        """Returns what is hidden in an edge tile; loads of its bits begin before its products."""
        if tile.bits is not None:
            words = tile.bits.fragment(tile.visit.tile(index), tile.at.warp, tile.at.lane)
            return tile.score.edges(Bits([words]).rows())
        limits = [tile.bounds.key_limits(place.row + 8 * i) for i in range(2)]
        column, low = place.column, tile.visit.edges.low
        return tile.score.edges([Visibility.of(limit, column, low) for limit in limits])

    def _products(self, tile: TangentTile) -> tuple[mma.Accumulator, mma.Accumulator]:
        """Returns S and S'."""
        scores, moves = mma.zeros(1, self.score_blocks), mma.zeros(1, self.score_blocks)
        shape = 1, self.score_blocks, self.head_steps
        self.words.gemm(scores, shape, self._query(tile, 0), self._key(tile, 0))
        if self.spec.moves_query:
            self.words.gemm(moves, shape, self._query(tile, 1), self._key(tile, 0))
        if self.spec.moves_key:
            self.words.gemm(moves, shape, self._query(tile, 0), self._key(tile, 1))
        return scores, moves

    def _query(self, tile: TangentTile, which: int) -> Any:
        """Returns the loader of the warp's rows of Q or Q'."""
        shape, (row, column) = self.tiles[QUERY], plain_lane(tile.at.lane)
        address = self._address(tile, QUERY, which) + shape.offset(tile.at.warp * 16 + row, column)
        return self.words.factor(mma.load_a(shape, address), steps=self.head_steps)

    def _key(self, tile: TangentTile, which: int) -> Any:
        """Returns the loader of K or K'."""
        shape = self.tiles[KEY]
        address = self._address(tile, KEY, which) + shape.offset(*crossed_lane(tile.at.lane))
        return self.words.factor(mma.load_b(shape, address), steps=self.head_steps)

    def _zero_dead_values(self, tile: TangentTile, index: Int32) -> None:
        """Zeroes what the thread has copied of values of an edge tile that no query of the CTA sees."""
        bits, entry = tile.bits, tile.visit.entry(index)
        assert bits is not None

        def zero() -> None:
            live = bits.live_rows(tile.visit.tile_of(entry))
            for which in range(len(tile.operands[VALUE])):
                address = self._address(tile, VALUE, which)
                copies.zero_dead_rows(self.tiles[VALUE], self.config.threads, tile.at.thread, address, live)

        cutlass.if_generate(Boolean(tile.visit.has_dead_rows(entry)), zero)

    def _add_values(self, tile: TangentTile, weights: mma.Accumulator, moves: mma.Accumulator) -> None:
        """Adds W V + P V' of one key tile to O'."""
        value, shape = self.tiles[VALUE], (1, self.out_blocks, self.config.keys // 16)
        factors = ([(0, moves)] if self.spec.moves_scores else []) + ([(1, weights)] if self.spec.moves_value else [])
        for which, acc in factors:

            def load_a(m: int, k: int, acc: mma.Accumulator = acc) -> Any:
                return self.words.fragment(lambda i: self.words.pair(acc[2 * i], acc[2 * i + 1]), 0, m, k)

            address = self._address(tile, VALUE, which) + value.offset(*plain_lane(tile.at.lane))
            load_b = self.words.factor(mma.load_b_transposed(value, address), blocks=self.out_blocks)
            self.words.gemm(tile.out, shape, load_a, load_b)
