# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The tiles of the gradient of a bias, and its parts: the same in both families of kernels.

Pure Python, no import of the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.lists import PrepassConfig

# Queries and keys of a tile of scores, which is one of the bias if that is a matrix.
ROWS, KEYS = 128, 128

# Sums over the keys of a query that make the gradient of a bias of rows, see `tile_sums.RowSums`.
ROW_SUMS = 3

# Warps side by side along the keys of a tile, by family.
COLUMN_WARPS = {"sm90": 1, "sm80": 2}

# Bytes that parts of a gradient may take.
_PARTS_NBYTES = 128 << 20


@dataclass(frozen=True)
class _Tiles:
    """The tiles of the lists where no other kernel reads lists of keys.

    Attributes:
        prepass: see `KernelSpec.tiles_of`.
    """

    prepass: PrepassConfig


def key_list_tiles(spec: KernelSpec) -> PrepassConfig:
    """Returns the tiles of the lists of keys of a backward pass: those of a kernel of dq alone, else those of dbias."""
    return spec.tiles_of(spec.config.dq or _Tiles(PrepassConfig(ROWS, KEYS)))


def dbias_parts(shape: tuple[int, int, int], sharing: int, multiprocessors: int) -> int:
    """Returns in how many parts a gradient is computed, each with some of the items of every tile.

    That is the smallest number within 5 % of the best balance over the SMs.

    Args:
        shape: planes, queries and keys.
        sharing: how many pairs of a batch entry and a head share a plane.
        multiprocessors: of the GPU.
    """
    planes, queries, keys = shape
    tiles = planes * -(-queries // ROWS) * -(-keys // KEYS)
    most = min(sharing, max(_PARTS_NBYTES // max(4 * planes * queries * keys, 1), 1), 2 * multiprocessors)
    waves = {parts: -(-tiles * parts // multiprocessors) / parts for parts in range(1, most + 1)}
    best = min(waves.values())
    return next(parts for parts, steps in waves.items() if steps <= 1.05 * best)
