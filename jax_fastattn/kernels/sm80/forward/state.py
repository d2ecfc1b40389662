# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a thread of the forward kernel knows: its place, its CTA's tile of queries, and the registers of its rows.

`kernel.py` makes these objects once per CTA and passes them to its methods. No member is assigned afterwards; what
changes from key tile to key tile are elements of register tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import ptx, softmax
from jax_fastattn.kernels.device.products import Factor, result_words
from jax_fastattn.kernels.device.regions import SharedTable
from jax_fastattn.kernels.device.row_store import RowStore, strided
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.features.bias.warp import WarpBias
from jax_fastattn.kernels.features.places import Head
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm80.schedule import Work
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.visit import Visit

# A row maximum may grow by this factor (log2) before the accumulator is rescaled. float16 has the least limit, 2^16.
_MOST_LAG = 8.0

# Nor may a weight be more than so many times what the lane has of the row so far, or 1: else one that is no power of
# two may be most of the row. Rounding it would then change the output as much as rounding the output does.
_GROWTH = 4.0


@dataclass(frozen=True)
class ForwardPlace:
    """Which thread this is, and which queries its CTA computes.

    Attributes:
        thread: index of the thread in the CTA.
        lane: index of the thread in its warp.
        warp: index of the warp in the CTA. The compiler knows that it is the same in all lanes.
        shared: byte address of the CTA's shared memory.
        row: first query of the tile, counted from the first one of its sequence.
        sequence: the queries, and the keys that they attend to.
    """

    thread: Int32
    lane: Int32
    warp: Int32
    shared: Int32
    row: Int32
    head: Int32
    kv_head: Int32
    sequence: Sequence

    @property
    def score_head(self) -> Head:
        """Which scores its rows have."""
        return Head(self.sequence.queries.batch, self.head, self.sequence.starts)

    def warp_bias(self, spec: KernelSpec, table: SharedTable, buffers: Buffers, scalars: Scalars) -> WarpBias | None:
        """Returns a matrix that warps copy for themselves; None if there is none, or no room."""
        if not spec.config.bias_pieces:
            return None
        address = self.shared + table.offset("bias") + self.warp * table["bias"].pitch
        return WarpBias.of_pieces(
            spec, buffers.bias, scalars, address, self.row + self.warp * spec.config.rows_per_warp
        )

    @classmethod
    def of(cls, work: Work, rows: int, thread: Int32) -> "ForwardPlace":
        """Returns the place of a thread whose CTA works on a tile of `rows` query rows."""
        assert work.head is not None
        return cls(
            thread=thread,
            lane=thread % 32,
            warp=cute.arch.make_warp_uniform(thread // 32),
            shared=cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint(),
            row=work.tile * rows,
            head=work.head,
            kv_head=work.kv_head,
            sequence=work.sequence,
        )


@dataclass(frozen=True)
class Operand:
    """Rows of one head of an operand in global memory.

    Attributes:
        address: byte address of the first row.
        stride: bytes from one row to the next.
    """

    address: Int64
    stride: Int64


@dataclass(frozen=True)
class ForwardRows:
    """What a CTA reads.

    Attributes:
        query: rows of Q, from the first one of the tile.
        key: rows of K, from the first one of the sequence.
        value: rows of V, from the first one of the sequence.
    """

    query: Operand
    key: Operand
    value: Operand

    @classmethod
    def of(cls, spec: KernelSpec, at: ForwardPlace, buffers: Buffers, scalars: Scalars) -> "ForwardRows":
        """Returns the operands of a CTA."""
        kv_heads = scalars.num_heads // spec.group
        columns, v_columns = spec.row_columns
        query_stride = Int64(scalars.num_heads) * (2 * columns)
        key_stride = Int64(kv_heads) * (2 * columns)
        value_stride = Int64(kv_heads) * (2 * v_columns)
        query_row, key_row = at.sequence.queries.row(at.row), at.sequence.keys.row()
        query = buffers.query.toint() + query_row * query_stride + Int64(at.head) * (2 * columns)
        key = buffers.key.toint() + key_row * key_stride + Int64(at.kv_head) * (2 * columns)
        value = buffers.value.toint() + key_row * value_stride + Int64(at.kv_head) * (2 * v_columns)
        return cls(Operand(query, query_stride), Operand(key, key_stride), Operand(value, value_stride))


@dataclass(frozen=True)
class QueryTile:
    """A CTA's tile of queries, as one of its threads sees it.

    Attributes:
        at: which thread this is, and which queries the tile has.
        operands: rows of Q, K and V in global memory.
        visit: the key tiles that some query of the tile sees.
        live_keys: the keys that some query of the sequence sees; others may hold anything.
        query_end: queries of the sequence; rows of the tile from there on are padding.
        score: maps products to logits.
        first_row: the first of the lane's accumulator rows, counted as `at.row`; the others follow 8 apart.
        column: the lane's first accumulator column.
        limits: the keys that each of the lane's accumulator rows sees, in order; of a list none.
        bits: which scores of edge tiles of a list count; None without lists.
        bias: a matrix that warps copy for themselves; None without one, or if lanes load it themselves.
        keys: how many keys a tile of keys has.
    """

    at: ForwardPlace
    operands: ForwardRows
    visit: Visit
    live_keys: plan.LiveRange
    query_end: Int32
    score: Score
    first_row: Int32
    column: Int32
    limits: list[plan.Limits]
    bits: TileBits | None
    bias: WarpBias | None
    keys: int

    def number_store(self, spec: KernelSpec, buffers: Buffers, scalars: Scalars, blocks: int) -> RowStore:
        """Returns where the lane stores its rows of the output in float32, given the blocks of columns of a row."""
        return self._row_store(spec, buffers.out, 4, scalars, blocks)

    def rest_store(self, spec: KernelSpec, buffers: Buffers, scalars: Scalars, blocks: int) -> RowStore:
        """Returns where the lane stores what rounding takes from its rows of the output; see `number_store`."""
        return self._row_store(spec, buffers.out_rests, 1, scalars, blocks)

    def _row_store(self, spec: KernelSpec, buffer: cute.Pointer, size: int, scalars: Scalars, blocks: int) -> RowStore:
        """Returns where the lane stores its rows in a buffer, of which an element takes `size` bytes."""
        queries, nbytes = self.at.sequence.queries, size * spec.v_head_dim
        first = buffer.toint() + queries.row_head(Int32(0), scalars.num_heads, self.at.head) * nbytes
        return RowStore(
            address=strided(first, Int64(scalars.num_heads) * nbytes),
            columns=spec.v_head_dim,
            row=self.first_row,
            end=queries.length,
            quad_lane=self.at.lane % 4,
            words=result_words(spec),
            blocks=blocks,
        )

    def load_bias(self, index: Int32) -> None:
        """Starts the copies of the warp's part of a tile of a matrix, if there is one."""
        if self.bias is not None:
            self.bias.copy_first(self.at.score_head, self.visit.tile(index) * self.keys)

    def load_next_bias(self, index: Int32, load_next: Callable[[], None] | None = None) -> None:
        """Starts the copies of the next tile of a matrix, over what the warp has read; then `load_next`."""
        if self.bias is None:
            return

        def load() -> None:
            self.load_bias(index - 1)
            if load_next is not None:
                load_next()

        cute.arch.sync_warp()
        cutlass.if_generate(index > self.visit.begin, load)
        cute.arch.cp_async_commit_group()


@dataclass(frozen=True, eq=False)
class RowState:
    """What a warp keeps of its rows from key tile to key tile.

    Attributes:
        out: accumulator of O, `[m_blocks * out_blocks * 4]` float32, relative to `maxima`.
        maxima: `[2 * m_blocks]` float32, maximum of the unscaled scores of each row; may be below the true one.
        sums: `[2 * m_blocks]` float32, the lane's part of the sum of each row's exponentials, relative to `maxima`.
        moments: `[2 * m_blocks]` float32, the same of the exponentials times their keys; None without means of rows.
    """

    out: cute.Tensor
    maxima: cute.Tensor
    sums: cute.Tensor
    moments: cute.Tensor | None

    @classmethod
    def empty(cls, m_blocks: int, out_blocks: int, *, has_means: bool) -> "RowState":
        """Returns the registers of rows that have seen no key."""
        out = cute.make_rmem_tensor((m_blocks * out_blocks * 4,), Float32)
        maxima, sums = (cute.make_rmem_tensor((2 * m_blocks,), Float32) for _ in range(2))
        moments = cute.make_rmem_tensor((2 * m_blocks,), Float32) if has_means else None
        out.fill(0.0)
        maxima.fill(softmax.NEVER)
        for x in (sums, moments):
            if x is not None:
                x.fill(0.0)
        return cls(out, maxima, sums, moments)

    def lag(self, i: int, spec: KernelSpec) -> Float32:
        """Returns by how much, in base 2, the maximum of a row may grow without a rescale."""
        if spec.products != "native":  # weights of float32 operands are rounded to more bits, or in units of their own
            return Float32(_MOST_LAG)
        most = ptx.log2(ptx.maximum(self.sums[i] * Float32(_GROWTH), Float32(1.0)))
        return cutlass.min(most, Float32(_MOST_LAG))


@dataclass(frozen=True, eq=False)
class ForwardState:
    """What the visit of a key tile reads and changes.

    Attributes:
        tile: the tile of queries.
        rows: registers of the warp's rows, which a visit changes.
        query: fragments of Q `[m_blocks][head_steps]`; None if each visit loads them from shared memory.
        last: position of the last key tile, which is visited first.
    """

    tile: QueryTile
    rows: RowState
    query: list[list[Factor]] | None
    last: Int32
