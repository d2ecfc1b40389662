# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The definition of dropout, written once more: in NumPy, with 64-bit integers, and a whole word at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MULTIPLIERS = [np.uint64(x) for x in (0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0xD256D193, 0xAC4C1B51)]
LOW = np.uint64(0xFFFFFFFF)


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox 4x32-10, as https://doi.org/10.1145/2063384.2063405 has it, on Python's integers."""
    c, k = [*counter], [*key]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & 0xFFFFFFFF, (p >> 32) ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def words(x: np.ndarray, y: np.ndarray, *, skip: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The halves of the words at counters (x, y), uint64 with 32 bits each; `skip` leaves two products out."""

    def product(z: np.ndarray, i: int, added: np.ndarray) -> np.ndarray:
        return (z * MULTIPLIERS[i] + added) & LOW

    def mixed(z: np.ndarray, count: int) -> np.ndarray:
        return z ^ (z >> np.uint64(count))

    a = mixed(product(x, 0, y), 16)
    if not skip:
        a = mixed(product(a, 1, y), 15)
        a = mixed(product(a, 2, x), 15)
    b = mixed(product(a, 3, y), 16)
    return b, product(b, 4, a)


def bits(
    numbers: Sequence[int], length: int, keys: int, first: tuple[int, int] = (0, 0), *, skip: bool = False
) -> np.ndarray:
    """The 15 bits of each pair of a head, uint16 `[length, keys]`."""
    blocks = -(-length // 16), -(-keys // 16)
    x, y = (
        (np.arange(8 * count, dtype=np.uint64) + np.uint64((number + start) % 2**32)) & LOW
        for count, number, start in zip(blocks, numbers, first, strict=True)
    )
    a, b = words(*np.broadcast_arrays(x[:, None], y[None, :]), skip=skip)
    found = np.empty((blocks[0], 2, 8, blocks[1], 2, 8), np.uint16)
    for lower, word in enumerate((a, b)):
        for right, shift in enumerate((0, 16)):
            part = (word >> np.uint64(shift)) & np.uint64(0x7FFF)
            found[:, lower, :, :, right, :] = part.reshape(blocks[0], 8, blocks[1], 8)
    return found.reshape(16 * blocks[0], 16 * blocks[1])[:length, :keys]


def numbers(key: Sequence[int], entry: int, head: int) -> list[int]:
    """The two numbers of a head, of the words of a key."""
    w = [*map(int, key), 0, 0][:4]
    return philox((entry, head, w[2], w[3]), w[:2])[:2]


def threshold(rate: float) -> int:
    return round(float(np.float32(rate) * np.float32(2**15)))


def mask(key: Sequence[int], rate: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """What `dropout_mask` returns."""
    batch, heads, length, keys = shape
    found = [[bits(numbers(key, b, n), length, keys) for n in range(heads)] for b in range(batch)]
    return np.array(found).reshape(shape) >= threshold(rate)
