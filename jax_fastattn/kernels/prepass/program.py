# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A mask function in the prepass: its planes of a tile in shared memory, and its code for 32 keys of a query at once.

Each value is computed where it changes: once for a head, once for the lane's keys, once for a query, or for each key of
a query. Booleans of 32 keys are one word, and comparisons of positions make such a word without looking at each key.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cutlass import Int32, Int64

from jax_fastattn.kernels.arguments.prepass import PrepassBuffers, PrepassScalars
from jax_fastattn.kernels.codes import staged_places
from jax_fastattn.kernels.device import copies, instructions, ptx, wgmma
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.prepass.matrix import BitMatrix, MatrixShape
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.programs.code import Code, Place, operands_of, parsed

# Positions are below 2^21 where there are lists (`MAX_TILES`), so that affine numbers with these factors and constants
# are below `_FAR`, and differ from a number that is clamped to it by less than 2^31.
_MAX_FACTOR, _MAX_CONSTANT, _FAR = 8, 1 << 29, 1 << 30

_ONES = -1


def bit(i: int) -> int:
    """Returns bit i of a word as an int32."""
    return (1 << i) - (1 << 32 if i == 31 else 0)


class Parts:
    """What a compile key holds of a mask function.

    Attributes:
        code: the function.
        places: where each of its planes is.
        rows: how many planes, or numbers of tables, each operand has.
        operands: their names, in the order of the bits of `PrepassScalars.plane_batches`.
        depends: of each value, whether it depends on "row" and on "column".
    """

    def __init__(self, spec: KernelSpec):
        (feature,) = spec.features
        self.code: Code = feature.constants[0]
        self.places: tuple[Place, ...] = feature.constants[1]
        self.rows: dict[str, int] = dict(feature.constants[2])
        self.operands = [name for name, _ in feature.operands]
        self.config: PrepassConfig = spec.config
        self.depends: list[frozenset[str]] = []
        for instruction in self.code.instructions:
            self.depends.append(self._own(instruction).union(*(self.depends[x] for x in operands_of(instruction))))

    def _own(self, instruction: tuple[Any, ...]) -> frozenset[str]:
        op, *operands = instruction
        if op == "affine":
            return frozenset(name for name, factor in zip(("row", "column"), operands, strict=False) if factor)
        if op == "plane":
            kind = self.places[operands[0]].plane.kind
            return frozenset({"query": ("row",), "key": ("column",), "distance": ("row", "column")}.get(kind, ()))
        return frozenset()

    @property
    def batch(self) -> int:
        """Returns for how many queries of a lane numbers of keys are kept, without a mask; each takes 32 registers."""
        kept = {
            x
            for i, instruction in enumerate(self.code.instructions)
            for x in operands_of(instruction)
            if "row" in self.depends[i] and self.depends[x] == frozenset(["column"]) and self._is_list(x)
        }
        return 2 if len(kept) < 2 else 1

    @property
    def lists(self) -> int:
        """Returns how many values have a number for each of 32 keys."""
        return sum(self._is_list(i) for i in range(len(self.depends)))

    def _is_list(self, i: int) -> bool:
        """Returns whether a value is 32 numbers, and neither a word of booleans nor a line."""
        is_number = self.code.dtypes[i] != "b" and self.code.instructions[i][0] != "affine"
        return is_number and "column" in self.depends[i]

    def staged(self) -> list[tuple[Place, int, int]]:
        """Returns the planes in shared memory, with the offset in bytes and the numbers of each."""
        found, offset, keys = [], 0, 32 * MatrixShape(self.config).words
        for place in staged_places(self.places):
            # Keys come first: chunks of 16 bytes are loaded from them.
            count = {"key": keys, "query": self.config.rows, "distance": self.config.rows + keys}[place.plane.kind]
            found.append((place, offset, count))
            offset += (count * 4 + 15) // 16 * 16
        return found

    @property
    def nbytes(self) -> int:
        """Returns the bytes of these planes."""
        return sum((count * 4 + 15) // 16 * 16 for _, _, count in self.staged())


@dataclass(frozen=True, eq=False)
class MaskProgram:
    """The mask function of a batch entry and a head, as a warp sees it.

    Attributes:
        parts: what is compiled in.
        address: of the staged planes.
        entry, head: whose planes it reads.
    """

    parts: Parts
    buffers: PrepassBuffers
    scalars: PrepassScalars
    address: Int32
    entry: Int32
    head: Int32

    def length(self, kind: str) -> Int32:
        """Returns how many numbers a plane of a kind has."""
        queries, keys = self.scalars.query_length, self.scalars.key_length
        return {"query": queries, "key": keys, "distance": queries + keys}.get(kind, Int32(1))

    def first(self, place: Place) -> Int64:
        """Returns the address of the first number of a plane."""
        number = self.parts.operands.index(place.operand)
        per_batch, per_head = ((x >> number) & 1 for x in (self.scalars.plane_batches, self.scalars.plane_heads))
        planes = ptx.where(per_head != 0, self.scalars.heads, Int32(1))
        row = self.entry * per_batch * planes + self.head * per_head
        first = Int64(row) * self.parts.rows[place.operand] + place.start
        address = getattr(self.buffers.added, place.operand).toint()
        return address + first * self.length(place.plane.kind) * 4

    # Planes in shared memory.

    def stage(self, matrix: BitMatrix, query_tile: Int32, key_tile: Int32) -> None:
        """Copies what a tile reads to shared memory. All warps call it; a barrier has to follow."""
        config = self.parts.config
        lane = matrix.warp * 32 + matrix.lane
        threads = 32 * matrix.shape.warps
        for place, offset, count in self.parts.staged():
            kind = place.plane.kind
            first = {
                "query": query_tile * config.rows,
                "key": key_tile * config.keys,
                "distance": key_tile * config.keys - (query_tile + 1) * config.rows + 1 + self.scalars.query_length,
            }[kind]
            self._copy(self.first(place), first, self.length(kind), offset, count, lane, threads)

    def _copy(
        self, plane: Int64, first: Int32, length: Int32, offset: int, count: int, lane: Int32, threads: int
    ) -> None:
        """Copies numbers of a plane from `first` on. A number past an end is the last one, or the first."""

        def copy(i: Int32) -> None:
            at = lane + i * threads
            index = copies.clamp(first + at, 0, length - 1)
            ptx.store_shared(self.address + offset + at * 4, ptx.load_global_int(plane + Int64(index) * 4))

        wgmma.loop((count - lane + (threads - 1)) // threads, copy)

    # Values.

    def start(self) -> "Values":
        """Returns the values that head and batch entry decide."""
        values = Values(self)
        for i, depends in enumerate(self.parts.depends):
            if not depends:
                values.of_head[i] = values.value(i)
        return values

    def load(self, number: int, row: Any, word: Int32) -> Any:
        """Loads a plane: one number, or the numbers of 32 keys.

        Args:
            number: of the plane.
            row: the query of the tile; None for a plane that no query decides.
            word: which 32 keys of the tile.
        """
        place = self.parts.places[number]
        kind = place.plane.kind
        if kind == "head":
            return self._typed(place, ptx.load_global_int(self.first(place)))
        offset = next(offset for x, offset, _ in self.parts.staged() if x == place)
        address = self.address + offset
        if kind == "query":
            return self._typed(place, ptx.load_shared(address + row * 4))
        if kind == "key":
            chunks = [ptx.load_shared_chunk(address + word * 128 + 16 * i) for i in range(8)]
            return [self._typed(place, x) for chunk in chunks for x in chunk]
        first = address + (word * 32 - row + (self.parts.config.rows - 1)) * 4
        return [self._typed(place, ptx.load_shared(first + 4 * j)) for j in range(32)]

    def look_up(self, number: int, index: Int32) -> Int32:
        """Loads a number of a table."""
        place = self.parts.places[number]
        return ptx.load_global_int(self.first(place) + Int64(index) * 4)

    @staticmethod
    def _typed(place: Place, word: Int32) -> Any:
        return ptx.from_bits(word) if place.plane.dtype == "f" else word


@dataclass(frozen=True)
class _Line:
    """Integers of 32 keys, `base + step * j`."""

    base: Int32
    step: int


@dataclass(eq=False)
class Values:
    """Values of the code that are known in one region of control flow.

    A value of 32 keys is a list, a `_Line`, or a word of booleans; others are registers or known numbers.

    Attributes:
        of_head, of_keys, of_row: values by number, forgotten with the head, the lane's keys, or the query.
        row, column: the query, and the first of the lane's keys, counted from the first of the array.
        tile_row, word: the same, counted from the first one of the tile, and in 32 keys.
    """

    program: MaskProgram
    of_head: dict[int, Any] = field(default_factory=dict[int, Any])
    of_keys: dict[int, Any] = field(default_factory=dict[int, Any])
    of_row: dict[int, Any] = field(default_factory=dict[int, Any])
    row: Any = None
    column: Any = None
    tile_row: Any = None
    word: Any = None

    def at_keys(self, column: Int32, word: Int32) -> "Values":
        """Returns the values for 32 keys of a lane, in one region of control flow."""
        return Values(self.program, self.of_head, {}, {}, None, column, None, word)

    def bits(self, row: Int32, tile_row: Int32) -> Int32:
        """Returns which of the lane's keys count for a query, a bit each."""
        at = Values(self.program, self.of_head, self.of_keys, {}, row, self.column, tile_row, self.word)
        return at.as_word(self.program.parts.code.results[0])

    def value(self, i: int) -> Any:
        """Returns a value."""
        depends = self.program.parts.depends[i]
        memo = self.of_row if "row" in depends else self.of_keys if depends else self.of_head
        if i not in memo:
            memo[i] = self._new(i)
        return memo[i]

    def as_word(self, i: int) -> Int32:
        """Returns a boolean as a word of 32 keys."""
        x = self.value(i)
        if self._is_word(i):
            return x
        return Int32(_ONES if x else 0) if isinstance(x, bool) else ptx.where(x, Int32(_ONES), Int32(0))

    def _is_word(self, i: int) -> bool:
        parts = self.program.parts
        return "column" in parts.depends[i] and parts.code.dtypes[i] == "b"

    def _new(self, i: int) -> Any:
        parts = self.program.parts
        op, *operands = parts.code.instructions[i]
        if op == "const":
            return parsed(parts.code.dtypes[i], operands[0])
        if op == "affine":
            return self._affine(*operands)
        if op == "plane":
            return self.program.load(operands[0], self.tile_row, self.word)
        if op == "table":
            index = self._each(operands[1])
            look_up = functools.partial(self.program.look_up, operands[0])
            return [look_up(x) for x in index] if isinstance(index, list) else look_up(index)
        if "column" not in parts.depends[i]:
            return instructions.apply(op, [parts.code.dtypes[x] for x in operands], [self.value(x) for x in operands])
        return self._of_keys(op, operands, parts.code.dtypes[i])

    def _affine(self, a: int, b: int, c: int) -> Any:
        base = Int32(c)
        for factor, index in ((a, self.row), (b, self.column)):
            if factor:
                base = base + index * factor
        return _Line(base, b) if b else base

    def _of_keys(self, op: str, operands: Sequence[int], dtype: str) -> Any:
        """Returns the result of an instruction for 32 keys."""
        dtypes = [self.program.parts.code.dtypes[x] for x in operands]
        if set(dtypes) == {"b"} and dtype == "b":
            return instructions.on_words(op, *(self.as_word(x) for x in operands))
        if op in instructions.COMPARISONS and dtypes[0] == "i":
            found = self._compared(op, *operands)
            if found is not None:
                return found
        columns = [self._each(x) for x in operands]
        lanes = [[x[j] if isinstance(x, list) else x for x in columns] for j in range(32)]
        if dtype != "b":
            return [instructions.apply(op, dtypes, values) for values in lanes]
        found = Int32(0)
        for j, values in enumerate(lanes):
            found = found | ptx.where(instructions.apply(op, dtypes, values), Int32(bit(j)), Int32(0))
        return found

    def _each(self, i: int) -> Any:
        """Returns a value as a list, if it is one of 32 keys."""
        x = self.value(i)
        if self._is_word(i):
            return [(x & bit(j)) != 0 for j in range(32)]
        if isinstance(x, _Line):
            return [x.base + instructions.register("i", x.step * j) for j in range(32)]
        return x

    def _compared(self, op: str, left: int, right: int) -> Int32 | None:
        """Returns the word of a comparison of positions; None if the keys have to be compared one by one."""
        code = self.program.parts.code
        for i in (left, right):
            name, *numbers = code.instructions[i]
            if "column" in self.program.parts.depends[i] and not (name == "affine" and _is_near(*numbers)):
                return None
        bases, steps = [], []
        for i in (left, right):
            x = self.value(i)
            bases.append(x.base if isinstance(x, _Line) else copies.clamp(instructions.register("i", x), -_FAR, _FAR))
            steps.append(x.step if isinstance(x, _Line) else 0)
        base, step = bases[0] - bases[1], steps[0] - steps[1]
        if step == 0:
            x = instructions.apply(op, "ii", [base, 0])
            return ptx.where(x, Int32(_ONES), Int32(0))
        if step not in (1, -1):
            return None
        return _prefix_word(op, base, step)


def _is_near(a: int, b: int, c: int) -> bool:
    """Returns whether an affine number of positions is below `_FAR`."""
    return abs(a) <= _MAX_FACTOR and abs(b) <= _MAX_FACTOR and abs(c) <= _MAX_CONSTANT


def _prefix_word(op: str, base: Int32, step: int) -> Int32:
    """Returns for which j of 32 `base + step * j` compares with 0 as `op` says; `step` is 1 or -1."""
    # Numbers that rise are below 0 up to -base, and those that fall above 0 up to base.
    end = -base if step == 1 else base
    before, until = _prefix(end), _prefix(end + 1)
    names = ("lt", "le", "gt", "ge") if step == 1 else ("gt", "ge", "lt", "le")
    strictly_before, before_or_at, strictly_after, after_or_at = names
    return {
        strictly_before: before,
        before_or_at: until,
        strictly_after: ~until,
        after_or_at: ~before,
        "eq": until & ~before,
        "ne": ~until | before,
    }[op]


def _prefix(count: Int32) -> Int32:
    """Returns a word with the first bits set, none if the count is negative."""
    return ptx.bit_range(Int32(0), copies.clamp(count, 0, 32))
