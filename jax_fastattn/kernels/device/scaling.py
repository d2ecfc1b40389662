# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles that a warpgroup multiplies by a factor in shared memory, for its products."""

from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.device.products import Words
from jax_fastattn.kernels.device.regions import NamedBarrier


def scale_tile(address: Int32, nbytes: int, words: Words, factor: Float32, barrier: NamedBarrier) -> None:
    """Multiplies a tile of 16-bit elements. All threads of a warpgroup call it, for a tile that no other one reads.

    Args:
        address: address of the tile.
        nbytes: its bytes, a multiple of 2048.
        words: what its pairs are.
        factor: the factor.
        barrier: the barriers on which the threads of each warpgroup meet.
    """
    thread = ptx.thread_index()
    start = address + thread % 128 * 16
    for offset in range(0, nbytes, 128 * 16):
        ptx.store_shared_chunk(start + offset, scaled(words, ptx.load_shared_chunk(start + offset), factor))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier.at(thread // 128), number_of_threads=128)


def scaled(words: Words, values: list[Int32], factor: Float32) -> list[Int32]:
    """Returns words of pairs times a factor. A pair has one word."""
    return [words.pair(*(x * factor for x in words.numbers(value))) for value in values]
