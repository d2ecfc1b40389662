# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a thread of `dkdv_dq.py` knows: its place, and its CTA's tile of keys.

The kernel makes these objects once per CTA and passes them to the roles, the products and the reduction of dQ. No
member is assigned afterwards; what changes from query tile to query tile are registers of the roles.
"""

from dataclasses import dataclass, replace

from cutlass import Int32, Int64

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.features.bias.warp import WarpBias
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sums.units import Units, load_units
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.kernels.visits.lists import TileBits
from jax_fastattn.kernels.visits.visit import Visit


@dataclass(frozen=True)
class DkdvDqPlace:
    """Which thread this is, and which keys its CTA has.

    Attributes:
        tile: index of the key tile in its sequence.
        row: first key of the tile, counted from the first one of its sequence.
        sequence: the keys, and the queries that attend to them.
        shared: byte address of the CTA's shared memory.
        thread: index of the thread in the CTA.
        lane: index of the thread in its warp.
        warp: index of the warp in the CTA. The compiler knows that it is the same in all lanes.
        role: index of the role, 0 or 1.
        role_thread: index of the thread in its role.
        role_warp: index of the warp in its role.
        dq_warp: index of the warp among those that compute dQ.
        key_warp: index of the warp's key rows in its role.
        column_warp: index of the warp among those that share its key rows.
        warp_row: first key row of the warp in the tile.
    """

    tile: Int32
    row: Int32
    kv_head: Int32
    sequence: Sequence
    shared: Int32
    thread: Int32
    lane: Int32
    warp: Int32
    role: Int32
    role_thread: Int32
    role_warp: Int32
    dq_warp: Int32
    key_warp: Int32
    column_warp: Int32
    warp_row: Int32


@dataclass(frozen=True)
class DkdvDqRows:
    """Byte addresses of rows in global memory.

    Rows of keys begin with the tile's first one, in its key/value head. Rows of queries begin with the first one of the
    sequence, in the first query head of the group.

    Attributes:
        key: address of K, rows `[kv_heads, columns]` of 16-bit columns, see `KernelSpec.row_columns`.
        value: address of V, rows `[kv_heads, v_columns]`.
        dk: address of dk, rows `[kv_heads, head_dim]`.
        dv: address of dv, rows `[kv_heads, v_head_dim]`.
        query: address of Q, rows `[heads, columns]`.
        dout: address of dO, rows `[heads, v_columns]`.
        stats: address of the row statistics `[heads, query_length]`, see `DkdvDqConfig.stats_pitch`.
        query_length: rows from one head of the statistics to the next.
        heads: query heads of a row.
        kv_heads: key/value heads of a row.
    """

    key: Int64
    value: Int64
    dk: Int64
    dv: Int64
    query: Int64
    dout: Int64
    stats: Int64
    query_length: Int32
    heads: Int32
    kv_heads: Int32


@dataclass(frozen=True)
class DqScratch:
    """Where the sums of dQ lie in global memory, from the first query tile of the group's first head on.

    Attributes:
        accum: byte address in dq_accum; a tile has `DqTile.nbytes`.
        tile_count: query tiles from one head to the next.
        semaphore: byte address in dq_semaphore, of 4 bytes for each warp that adds to a tile; None if CTAs add in any
            order.
    """

    accum: Int64
    tile_count: Int32
    semaphore: Int64 | None


@dataclass(frozen=True)
class GroupBits:
    """The bits of a tile of keys in each query head of the group.

    Attributes:
        first: the bits of the first head.
        planes: planes from one head to the next; 0 if all share one.
        stride: bytes from one plane to the next.
    """

    first: TileBits
    planes: Int32
    stride: Int64

    def of(self, member: Int32) -> TileBits:
        """Returns the bits of a head of the group."""
        compared = self.first.compared and self.first.compared.moved(member * self.planes)
        return replace(self.first, address=self.first.address + Int64(member) * self.stride, compared=compared)


@dataclass(frozen=True)
class DkdvDqState:
    """A CTA's tile of keys: where its operands lie, and which query tiles it visits.

    Attributes:
        at: which thread this is, and which keys the tile has.
        bounds: what rows of the sequence may see.
        visit: the query tiles that see some key of the tile.
        live_keys: the keys that some query of the sequence sees; others may hold anything.
        live_queries: the queries that see some key of the sequence; others may hold anything.
        operands: rows of keys and queries, and of the gradients of keys.
        valid_rows: rows of the tile up to the last key that counts; later rows of dk and dv are zero.
        stored_rows: rows of the tile that dk and dv have.
        score: maps products to probabilities.
        dq_scratch: where dQ is added.
        bits: which scores of edge tiles of a list count; None without lists.
        bias: a matrix that the warps which compute S^T copy; None without one, or if lanes load it themselves.
    """

    at: DkdvDqPlace
    bounds: plan.Bounds
    visit: Visit
    live_keys: plan.LiveRange
    live_queries: plan.LiveRange
    operands: DkdvDqRows
    valid_rows: Int32
    stored_rows: Int32
    score: Score
    dq_scratch: DqScratch
    bits: GroupBits | None
    buffers: Buffers
    bias: WarpBias | None

    def units(self) -> Units | None:
        """Loads the units of the key/value head, where they are needed: nothing keeps them in registers."""
        return load_units(self.buffers, self.at.sequence.keys, self.operands.kv_heads, self.at.kv_head)
