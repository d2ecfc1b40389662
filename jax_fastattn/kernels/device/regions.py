# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a CTA as one table of rows, and the named barriers of a kernel.

A row is a region of bytes or a set of mbarriers. Offsets, sizes, the initialization of barriers (`shared_regions.py`)
and docs/kernels/memory.md are read from the table, so nothing counts barriers or adds up bytes by hand. A feature adds
rows of its own with `SharedTable.with_rows`. How a tile lies inside its region is left to the kernel.

Pure Python, no import of the DSL: configs and tests read tables on any machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

from jax_fastattn.kernels.device.layout import padded

# A CTA has this many named barriers.
_NAMED_BARRIERS = 16


@dataclass(frozen=True)
class Region:
    """Bytes in shared memory, once for each stage.

    Attributes:
        name: differs from the name of every other row of a table.
        nbytes: bytes of a stage.
        count: stages.
        align: every stage starts at a multiple of this many bytes.
        over: the earlier region whose bytes this one uses again, from its start on; by default it has its own bytes.
    """

    name: str
    nbytes: int
    count: int = 1
    align: int = 16
    over: str | None = None

    @property
    def pitch(self) -> int:
        """Bytes from one stage to the next."""
        return padded(self.nbytes, self.align)


@dataclass(frozen=True)
class Barriers:
    """Mbarriers.

    Attributes:
        name: differs from the name of every other row of a table.
        count: number of barriers.
        arrive_count: number of arrivals that each of them is initialized with.
    """

    name: str
    count: int
    arrive_count: int

    @property
    def align(self) -> int:
        """The alignment that mbarriers need."""
        return 8

    @property
    def pitch(self) -> int:
        """Bytes from one barrier to the next."""
        return 8


Row = Region | Barriers


@dataclass(frozen=True)
class SharedTable:
    """Where the rows lie in the shared memory of a CTA: one after the other, each at its alignment.

    Attributes:
        rows: regions and barriers in the order of their offsets.
    """

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        names = [row.name for row in self.rows]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rows of a table need different names; more than one is called {', '.join(repeated)}")

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """First byte, and the byte after the last one, of each row by name."""
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for row in self.rows:
            over = row.over if isinstance(row, Region) else None
            start = padded(end, row.align) if over is None else spans[over][0]
            spans[row.name] = start, start + row.count * row.pitch
            end = max(end, spans[row.name][1])
        return spans

    @cached_property
    def _rows(self) -> dict[str, Row]:
        return {row.name: row for row in self.rows}

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Row:
        if name not in self:
            raise KeyError(f"no row {name!r} in a table of {', '.join(self._rows)}")
        return self._rows[name]

    def offset(self, name: str) -> int:
        """Returns the first byte of a row."""
        return self._spans[self[name].name][0]

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        return max((end for _, end in self._spans.values()), default=0)

    @property
    def barriers(self) -> tuple[Barriers, ...]:
        """The rows that are barriers."""
        return tuple(row for row in self.rows if isinstance(row, Barriers))

    def arrive_counts(self) -> Iterator[tuple[str, int, int]]:
        """Yields how each barrier is initialized: its row, its index in the row, and its number of arrivals.

        Neighboring rows of the same count take turns: what belongs to one stage comes together.
        """
        for count, rows in itertools.groupby(self.barriers, lambda row: row.count):
            for index, row in itertools.product(range(count), rows):
                yield row.name, index, row.arrive_count

    def with_rows(self, *rows: Row) -> SharedTable:
        """Returns the table with rows of a feature, for which the kernel's own rows make room.

        Regions come before the first barriers, where tiles need no padding, and barriers after the last ones.
        """
        own = [i for i, row in enumerate(self.rows) if isinstance(row, Barriers)]
        first, last = (own[0], own[-1] + 1) if own else (len(self.rows), len(self.rows))
        regions = tuple(row for row in rows if isinstance(row, Region))
        barriers = tuple(row for row in rows if isinstance(row, Barriers))
        return SharedTable((*self.rows[:first], *regions, *self.rows[first:last], *barriers, *self.rows[last:]))


class NamedBarrier(Enum):
    """Base of the named barriers of a kernel: each member is the first number, and how many there are.

    Number 0 belongs to the whole CTA: `cute.arch.sync_threads` uses it.
    """

    def __init__(self, first: int, count: int):
        self.first, self.count = first, count

    @property
    def numbers(self) -> range:
        """The numbers of all of them."""
        return range(self.first, self.first + self.count)

    def at(self, index: Any = 0) -> Any:
        """Returns the number of one of several, given its index, a Python or a device integer."""
        return self.first + index


_Named = TypeVar("_Named", bound=type[NamedBarrier])


def disjoint(barriers: _Named) -> _Named:
    """Returns the named barriers of a kernel, or raises if a number is used twice or does not exist."""
    used: dict[int, str] = {}
    for name, barrier in barriers.__members__.items():  # has members of equal value, which iteration leaves out
        for number in barrier.numbers:
            if not 0 < number < _NAMED_BARRIERS:
                raise ValueError(f"{barriers.__name__}.{name} uses named barrier {number}; 1 to 15 are free")
            if number in used:
                raise ValueError(f"{barriers.__name__}.{name} and .{used[number]} both use named barrier {number}")
            used[number] = name
    return barriers
