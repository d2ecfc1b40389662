# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles on their way: which ones a CTA visits, and their copies between global and shared memory.

Plain Python functions that emit code when they are traced; call them from a `@cute.kernel` with device integers.
"""

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars, Sizes
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.layout import CHUNK, CopyShape, SharedTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles import plan
from jax_fastattn.limits import UNBOUNDED


def with_device_min_max(module: ModuleType) -> dict[str, Any]:
    """Returns the functions of `plan` or `split`, and the `Bounds` of the first, bound to the DSL's min and max.

    The builtin ones ask a device value for its truth.
    """
    names: dict[str, Any] = {**vars(module), "min": cutlass.min, "max": cutlass.max}

    def bind(scope: Mapping[str, Any]) -> dict[str, FunctionType]:
        written = {name: x for name, x in scope.items() if isinstance(x, FunctionType) and not name.startswith("__")}
        return {
            name: FunctionType(x.__code__, names, name, x.__defaults__)
            for name, x in written.items()
            if x.__module__ == module.__name__
        }

    names.update(bind(vars(module)))
    if module is plan:
        names["Bounds"] = type("Bounds", (module.Bounds,), bind(vars(module.Bounds)))
    return names


_device_plan = with_device_min_max(plan)
_Bounds: type[plan.Bounds] = _device_plan["Bounds"]  # plan.Bounds of device integers
section = _device_plan["section"]  # plan.section on device integers
alike_section = _device_plan["alike_section"]  # plan.alike_section on device integers
place_in_sections = _device_plan["place_in_sections"]  # plan.place_in_sections on device integers


def count(length: Int32, rows: int) -> Int32:
    """Returns how many tiles of `rows` rows cover a length."""
    return (length + (rows - 1)) // rows


def key_section(
    spec: KernelSpec,
    scalars: Scalars,
    key_tiles: Int32,
    running: Int32,
    most_rows: int,
    head_rows: Any,
    *,
    one_sided: bool,
) -> Int32:
    """Returns how many key/value heads are a section of a launch whose CTAs work on tiles of keys.

    Args:
        key_tiles: tiles of a head.
        running: CTAs that run at a time.
        most_rows: rows of queries of a section if CTAs add in semaphore order, see `plan.section_rows`.
        head_rows: rows of queries that a head has there.
        one_sided: whether the tiles of a head are dealt as if they differed in length.
    """
    heads = scalars.batch * (scalars.num_heads // spec.group)
    if spec.ordered:
        return Int32(alike_section(most_rows // spec.group, head_rows, heads))
    return Int32(section(running, key_tiles, heads, int(one_sided)))


def clamp(x: Int32, low: Any, high: Any) -> Int32:
    """Returns the number in [low, high] that is nearest to x."""
    return Int32(cutlass.min(cutlass.max(x, Int32(low)), Int32(high)))


class Rows(NamedTuple):
    """The rows of a tile, counted from its first one, that may be read: [begin, end), or up to end if begin is None."""

    begin: Int32 | None
    end: Int32

    @classmethod
    def live(cls, live: plan.LiveRange, first: Int32, *, length: Int32 | None = None) -> "Rows":
        """Returns the live rows of a tile; they may lie in part or altogether outside of it.

        Args:
            live: the live range, from `Bounds.live_keys` or `Bounds.live_queries`.
            first: first row of the tile.
            length: rows of the array, if TMA loads the tile. Rows past the end are zeros then, and count as live.
        """
        end = live.end if length is None else ptx.where(live.end < length, live.end, first + UNBOUNDED)
        return cls(live.begin - first if live.hides_first else None, end - first)

    def contain(self, row: Int32) -> Boolean:
        """Returns whether a row of the tile may be read."""
        if self.begin is None:
            return Boolean(row < self.end)
        # Rows before the first one wrap around: this takes one comparison, and one register less, than two comparisons.
        return Boolean(Uint32(row - self.begin) < Uint32(self.end - self.begin))


class LiveRows(NamedTuple):
    """Rows of a tile that may be read, one by one, see `Rows`.

    Attributes:
        live: a bit for each row, in words of 32.
        rows: rows of the tile.
        end: rows from there on may not be read, even if their bit is set.
    """

    live: list[Int32]
    rows: int
    end: Int32

    def contain(self, row: Int32) -> Boolean:
        """Returns whether a row of the tile may be read."""
        return Boolean(Boolean(row < self.end) & Boolean(live_bit(self.live, row, self.rows) != 0))


def load_tile(
    tile: SharedTile,
    threads: int,
    thread: Int32,
    shared: Int32,
    source: Int64,
    stride: Int64,
    rows: Rows | LiveRows | None = None,
) -> None:
    """Starts this thread's part of a cp.async copy of a tile; the caller commits the group.

    Args:
        tile: the tile in shared memory; its columns are contiguous in global memory.
        threads: threads of the CTA, all of which call this.
        thread: index of this thread.
        shared: byte address of the tile.
        source: byte address of the tile's first row in global memory.
        stride: bytes from one row to the next there.
        rows: other rows are zero-filled without a read; None to read the whole tile. The first row must exist.
    """
    shape = CopyShape(tile, threads)
    row, chunk = shape.thread_chunk(thread)
    thread_shared = shared + tile.offset(row, chunk * CHUNK)
    thread_source = source + Int64(row) * stride + Int64(chunk * (2 * CHUNK))
    for first_row, first_chunk, rows_end, columns_end in shape.passes():
        target = thread_shared + tile.offset(first_row, first_chunk * CHUNK)
        address = thread_source + (stride * first_row + first_chunk * (2 * CHUNK))
        valid = None
        if rows is not None:
            valid = rows.contain(row + first_row)
        if columns_end:
            has_data = chunk + first_chunk < tile.columns // CHUNK
            valid = has_data if valid is None else Boolean(valid & has_data)

        def copy(target: Int32 = target, address: Int64 = address, valid: Any = valid) -> None:
            if valid is None:
                ptx.copy_async(target, address)
            else:
                # An address outside the operand is replaced as well, although nothing is read from it.
                size = ptx.where(valid, Int32(16), Int32(0))
                ptx.copy_async_or_zero(target, ptx.where(valid, address, source), size)

        if rows_end:
            cutlass.if_generate(row + first_row < tile.rows, copy)
        else:
            copy()


def negate_tile(tile: SharedTile, threads: int, thread: Int32, shared: Int32) -> None:
    """Flips the signs of the chunks that `load_tile` made this thread copy; wait for them first."""
    change_tile(tile, threads, thread, shared, lambda words: [x ^ Int32(-0x7FFF8000) for x in words])


def change_tile(
    tile: SharedTile, threads: int, thread: Int32, shared: Int32, change: Callable[[list[Int32]], list[Int32]]
) -> None:
    """Changes the chunks that `load_tile` made this thread copy, given the words of one; wait for them first."""
    shape = CopyShape(tile, threads)
    row, chunk = shape.thread_chunk(thread)
    thread_shared = shared + tile.offset(row, chunk * CHUNK)
    for first_row, first_chunk, rows_end, _ in shape.passes():
        address = thread_shared + tile.offset(first_row, first_chunk * CHUNK)

        def store(address: Int32 = address) -> None:
            ptx.store_shared_chunk(address, change(ptx.load_shared_chunk(address)))

        if rows_end:
            cutlass.if_generate(row + first_row < tile.rows, store)
        else:
            store()


def zero_dead_rows(tile: SharedTile, threads: int, thread: Int32, shared: Int32, live: list[Int32]) -> None:
    """Zeroes the chunks of dead rows that `load_tile` made this thread copy; wait for them first.

    Args:
        tile, threads, thread, shared: see `load_tile`.
        live: a bit for each row, in words of 32; rows whose bit is 0 are dead.
    """
    shape = CopyShape(tile, threads)
    row, chunk = shape.thread_chunk(thread)
    thread_shared = shared + tile.offset(row, chunk * CHUNK)
    for first_row, first_chunk, rows_end, _ in shape.passes():
        address = thread_shared + tile.offset(first_row, first_chunk * CHUNK)
        is_dead = Boolean(live_bit(live, row + first_row, tile.rows) == 0)
        if rows_end:
            is_dead = Boolean(is_dead & (row + first_row < tile.rows))
        cutlass.if_generate(is_dead, lambda at=address: ptx.store_shared_chunk(at, [Int32(0)] * 4))


def live_bit(live: list[Int32], row: Int32, rows: int) -> Int32:
    """Returns the bit of one of `rows` rows, in words of 32."""
    word = live[0]
    for i in range(1, (rows + 31) // 32):
        word = ptx.where(row // 32 == i, live[i], word)
    return (word >> (row % 32)) & 1


def store_rows(
    tile: SharedTile, rows: int, lane: Int32, shared: Int32, target: Int64, stride: Int64, valid_rows: Int32
) -> None:
    """Copies rows of a tile from shared to global memory by one warp, 16 bytes at a time.

    Args:
        tile: layout of the rows in shared memory; only its real columns are stored.
        rows: rows to copy, a multiple of 16.
        lane: lane of the warp, all of which call this.
        shared: byte address of the first row.
        target: byte address of the first row in global memory.
        stride: bytes from one row to the next there.
        valid_rows: rows from there on are not stored.
    """
    shape = CopyShape(SharedTile(rows, tile.columns), 32)
    row, chunk = shape.thread_chunk(lane)
    for first_row, first_chunk, _, columns_end in shape.passes():
        stored = row + first_row < valid_rows
        if columns_end:
            stored = Boolean(stored & (chunk + first_chunk < tile.columns // CHUNK))
        address = shared + tile.offset(row + first_row, (chunk + first_chunk) * CHUNK)
        offset = Int64(row + first_row) * stride + Int64((chunk + first_chunk) * (2 * CHUNK))

        def store(address: Int32 = address, offset: Int64 = offset) -> None:
            ptx.store_global_chunk(target + offset, ptx.load_shared_chunk(address))

        cutlass.if_generate(stored, store)


def load_entry(pointer: Any, batch: Int32, otherwise: Int32, low: Any, high: Any) -> Int32:
    """Returns an int32 operand `[B]` at one batch entry, clamped to [low, high]; `otherwise` if there is no operand."""
    if pointer is None:
        return otherwise
    return clamp(cute.make_tensor(pointer, cute.make_layout((UNBOUNDED,)))[batch], low, high)


def entry_bounds(spec: KernelSpec, batch: Int32, buffers: Buffers, scalars: Scalars | Sizes) -> plan.Bounds:
    """Returns what the rows of one batch entry may see."""
    offset = load_entry(buffers.query_offset, batch, Int32(0), -UNBOUNDED, UNBOUNDED)
    queries, keys = scalars.query_length, scalars.key_length
    query_end = load_entry(buffers.query_seq_lengths, batch, queries, 0, queries)
    key_end = load_entry(buffers.key_value_seq_lengths, batch, keys, 0, keys)
    return bounds(spec.bounds_kind, query_end, key_end, offset, scalars)


def bounds(
    kind: plan.BoundsKind, query_end: Int32, key_end: Int32, offset: Int32, scalars: Scalars | Sizes
) -> plan.Bounds:
    """Returns what the rows of a sequence may see, given its ends and its offset."""
    return _Bounds(
        query_end=query_end,
        key_end=key_end,
        offset=offset,
        # An absent bound makes up for the offset: next to the largest one, UNBOUNDED alone would hide keys.
        left=scalars.window_left if kind.left else offset + UNBOUNDED,
        right=scalars.window_right if kind.right else UNBOUNDED - offset,
        kind=kind,
    )


def moved(bounds: plan.Bounds) -> plan.Bounds:
    """Returns bounds in registers of their own, for a live range needed outside of the loops over tiles.

    If the range used the registers of the loops, the compiler would compute parts of it in each of their steps.
    """
    return bounds.map(lambda x: ptx.move(Int32(x)))
