# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The tiles of the gradient of a bias, and its parts: the same in both families of kernels.

Pure Python, no import of the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.lists import PrepassConfig

# A tile of scores has this many queries and keys; for a matrix it is also a tile of the bias.
ROWS, KEYS = 128, 128

# This many sums over the keys of a query make the gradient of a bias of rows, see `tile_sums.RowSums`.
ROW_SUMS = 3

# Each family has this many warps side by side along the keys of a tile.
COLUMN_WARPS = {"sm90": 1, "sm80": 2}

# The parts of a gradient take at most this many bytes.
_PARTS_NBYTES = 128 << 20


@dataclass(frozen=True)
class _Tiles:
    """The tiles of the lists where no other kernel reads lists of keys.

    Attributes:
        prepass: see `KernelSpec.tiles_of`.
    """

    prepass: PrepassConfig


def key_list_tiles(spec: KernelSpec) -> PrepassConfig:
    """Returns the tiles of a backward pass's lists of keys: of the kernel of dq alone if any, else of dbias."""
    return spec.tiles_of(spec.config.dq or _Tiles(PrepassConfig(ROWS, KEYS)))


def diagonals(queries: int, keys: int) -> int:
    """Returns how many diagonals of tiles there are."""
    return -(-queries // ROWS) + -(-keys // KEYS) - 1


def diagonal_parts(tiles: int, multiprocessors: int) -> int:
    """Returns in how many parts each diagonal of tiles is computed: these differ in length, so each SM gets several."""
    most = max(_PARTS_NBYTES // (4 * ROWS * KEYS * max(tiles, 1)), 1)
    return min(-(-4 * multiprocessors // max(tiles, 1)), most)


def dbias_parts(shape: tuple[int, int, int], sharing: int, multiprocessors: int) -> int:
    """Returns in how many parts a gradient is computed, each with some of the items of every tile.

    The number is the smallest one within 5 % of the best balance over the SMs.

    Args:
        shape: planes, queries and keys.
        sharing: how many pairs of a batch entry and a head share a plane.
    """
    planes, queries, keys = shape
    tiles = planes * -(-queries // ROWS) * -(-keys // KEYS)
    most = min(sharing, max(_PARTS_NBYTES // max(4 * planes * queries * keys, 1), 1), 2 * multiprocessors)
    waves = {parts: -(-tiles * parts // multiprocessors) / parts for parts in range(1, most + 1)}
    best = min(waves.values())
    return next(parts for parts, steps in waves.items() if steps <= 1.05 * best)
