# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a variant of a decoding kernel is, in both families; each family has a table of its own.

Pure Python, no import of the DSL: tests and the support table read it on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_fastattn.kernels.decode.split import portions
from jax_fastattn.kernels.device.regions import NamedBarrier, Region, disjoint
from jax_fastattn.kernels.key import KernelSpec

# A block has this many rows: the M of mma.sync.
BLOCK_ROWS = 16

# A kernel may have these numbers of blocks of rows.
ROW_BLOCKS = (1, 2, 4, 8)

# The kernels take at most this many rows (queries times query heads of a key/value head).
MAX_ROWS = BLOCK_ROWS * ROW_BLOCKS[-1]

# Rows of partial outputs lie this many floats apart, so that the four rows that a warp stores at a time use other
# banks.
_PADDING = 4


@disjoint
class DecodeBarrier(NamedBarrier):
    """Named barriers: MERGE of all warps that compute, at the end of a segment, and STRIP of warps with one strip."""

    MERGE = 1, 1
    STRIP = 2, 4


@dataclass(frozen=True)
class DecodeConfig:
    """One variant of a decoding kernel.

    Attributes:
        row_blocks: blocks of 16 rows. A row is a query and a query head of the key/value head's group.
        parts: warps that share a block of rows; each computes `keys / parts` keys of every tile.
        keys: keys of a tile, a multiple of `16 * parts`.
        stages: tiles of K and of V in shared memory.
        loader_warps: 1 if a warp of its own loads the tiles, or 4 of which one does; 0 if each warp loads the keys that
            it computes.
        splits: whether units may be cut where a CTA's share ends; else a share is a number of units, there are no
            partial results, and the combine kernel is left out.
        portion: tiles of a portion, if units are cut into portions of a fixed size (`split.py`); 0 if they are cut
            where the share of a CTA ends.
    """

    row_blocks: int
    parts: int
    keys: int
    stages: int
    loader_warps: int
    splits: bool = True
    portion: int = 0

    @property
    def records(self) -> bool:
        """Whether each CTA records the unit that it begins and does not end."""
        return self.splits and not self.portion

    @property
    def strip(self) -> int:
        """Keys of a tile that a warp computes."""
        return self.keys // self.parts

    @property
    def consumer_warps(self) -> int:
        """Warps that compute."""
        return self.row_blocks * self.parts

    @property
    def consumer_threads(self) -> int:
        """Threads that compute; the loader's follow them."""
        return 32 * self.consumer_warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.consumer_threads + 32 * self.loader_warps

    def box_rows(self, page: int) -> int:
        """Returns how many rows one copy loads: of pages of `page` rows (0: no pages), what always lies in one page."""
        rows = self.keys if self.loader_warps else self.strip
        return math.gcd(rows, page)

    @property
    def tiles(self) -> str:
        """Rows x keys of its tiles, in words."""
        return f"decode {BLOCK_ROWS * self.row_blocks}x{self.keys}"

    def partial_pitch(self, columns: int) -> int:
        """Returns the bytes from one row of a warp's partial output to the next, given its columns, padded."""
        return 4 * (columns + _PADDING)

    def stats_offset(self, columns: int) -> int:
        """Returns the bytes from the first partial output to the maxima and sums of the rows."""
        return self.consumer_warps * BLOCK_ROWS * self.partial_pitch(columns)

    def merge_region(self, columns: int, over: str | None = None) -> Region:
        """Returns the region of partial outputs, maxima and sums of the warps, by which they merge their results.

        Args:
            columns: columns of the output, padded.
            over: the region whose bytes it uses again; None if it has bytes of its own.
        """
        return Region("merge", self.stats_offset(columns) + self.consumer_warps * BLOCK_ROWS * 8, over=over)


def row_blocks(rows: int) -> int:
    """Returns how many blocks of 16 rows a kernel has for a number of rows."""
    if not 0 < rows <= MAX_ROWS:
        raise ValueError(f"a decoding kernel has 1 to {MAX_ROWS} rows; {rows} were asked for")
    return next(blocks for blocks in ROW_BLOCKS if rows <= BLOCK_ROWS * blocks)


def decode_scratch(
    spec: KernelSpec, multiprocessors: int, rows: int, units: int, key_length: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the scratch buffers of a launch by name, see `split.py`; none if units are not split.

    Args:
        rows: queries times query heads of a key/value head.
        units: batch entries times key/value heads.
        key_length: S.
    """
    config: DecodeConfig = spec.config
    if not config.splits:
        return {}
    slots = 2 * multiprocessors
    if config.portion:
        slots = units * portions(-(-key_length // config.keys), config.portion)
    scratch: dict[str, tuple[int, ...]] = {
        "partial_out": (slots, rows, spec.v_head_dim),
        "partial_lse": (slots, rows),
    }
    return scratch | ({"begun": (multiprocessors, 4)} if config.records else {})
