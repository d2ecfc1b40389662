# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Words of a product: what the numbers of an accumulator become for the next product, or for memory.

Accumulators are float32. P, dS, the weights between them and results are made into words here and nowhere else. Two
neighbors of an accumulator, elements 2 i and 2 i + 1, are pair i. Operands in memory are words already.

`Words` is what a kernel asks. `Native` is its one implementation: two numbers of 16 bits a word, one product for each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

from cutlass import Float32, Int32, cute

from jax_fastattn.kernels.device import mma, ptx, wgmma
from jax_fastattn.kernels.device.mma import Accumulator, Fragment
from jax_fastattn.kernels.key import KernelSpec


class LeftFactor(Protocol):
    """The left factor of a warpgroup's product, in registers. Its pairs are the pairs of an accumulator."""

    def put(self, pair: int, word: Int32) -> None:
        """Sets a pair."""
        ...

    def copied(self) -> list[Int32]:
        """Returns the pairs in registers of their own: no register that a product in flight reads may be read."""
        ...

    def multiply(self, acc: cute.Tensor, right: cute.Tensor) -> None:
        """Starts to add its product with a right factor, given descriptors of one stage, to an accumulator."""
        ...


class Words(Protocol):
    """What numbers become, and how words are multiplied."""

    def pair(self, low: Float32, high: Float32, *, floor: bool = False) -> Int32:
        """Returns what two numbers become. With a `floor` negative ones become 0."""
        ...

    def numbers(self, word: Int32) -> list[Float32]:
        """Returns the two numbers that a pair stands for."""
        ...

    def store(self, address: Int32, word: Int32) -> None:
        """Stores a pair to shared memory."""
        ...

    def load(self, address: Int32) -> Int32:
        """Loads a pair that `store` has stored."""
        ...

    def left_factor(self, product: cute.TiledMma, shape: tuple[int, int]) -> LeftFactor:
        """Returns registers for the left factor of a warpgroup's product, given its rows and columns."""
        ...

    def fragment(self, word: Callable[[int], Int32], n_blocks: int, m: int, k: int) -> Fragment:
        """Returns the A fragment of columns 16 k .. 16 k + 15 of block row m of an accumulator.

        Args:
            word: returns a pair of the accumulator.
            n_blocks: its blocks of 8 columns.
            m: the block row.
            k: the step of 16 columns.
        """
        ...

    def gemm(
        self,
        acc: Accumulator,
        shape: tuple[int, int, int],
        load_a: Callable[[int, int], Fragment],
        load_b: Callable[[int, int], Fragment],
    ) -> None:
        """Adds a product of a warp to its accumulator, see `mma.gemm`."""
        ...


@final
@dataclass(frozen=True, eq=False)
class NativeFactor:
    """A left factor with one pair in each register.

    Attributes:
        fragment: the registers of the factor.
        words: the same registers, by pairs.
    """

    product: cute.TiledMma
    fragment: cute.Tensor
    words: cute.Tensor

    def put(self, pair: int, word: Int32) -> None:
        """Sets a pair."""
        self.words[pair] = word

    def copied(self) -> list[Int32]:
        """Returns the pairs in registers of their own."""
        return [ptx.move(self.words[i]) for i in range(cute.size(self.words))]

    def multiply(self, acc: cute.Tensor, right: cute.Tensor) -> None:
        """Starts to add its product with a right factor to an accumulator."""
        wgmma.gemm(self.product, acc, self.fragment, right, accumulate=True)


@final
@dataclass(frozen=True)
class Native:
    """Two numbers of 16 bits a word.

    Attributes:
        dtype: the dtype of the numbers, as the compile key names it.
    """

    dtype: str

    @property
    def _mma_dtype(self) -> str:
        return ptx.MMA_DTYPE[self.dtype]

    def pair(self, low: Float32, high: Float32, *, floor: bool = False) -> Int32:
        """Returns two numbers, rounded to nearest, the first one in the lower half."""
        return ptx.pack(low, high, dtype=self._mma_dtype, floor=floor)

    def numbers(self, word: Int32) -> list[Float32]:
        """Returns the numbers in the two halves."""
        return ptx.unpack(word, dtype=self._mma_dtype)

    def store(self, address: Int32, word: Int32) -> None:
        """Stores a word."""
        ptx.store_shared(address, word)

    def load(self, address: Int32) -> Int32:
        """Loads a word."""
        return ptx.load_shared(address)

    def left_factor(self, product: cute.TiledMma, shape: tuple[int, int]) -> LeftFactor:
        """Returns registers for a left factor."""
        fragment = wgmma.fragment_a(product, shape, wgmma.OPERAND_DTYPE[self.dtype])
        return NativeFactor(product, fragment, cute.recast_tensor(fragment, Int32))

    def fragment(self, word: Callable[[int], Int32], n_blocks: int, m: int, k: int) -> Fragment:
        """Returns the four words of two neighboring blocks."""
        first = (m * n_blocks + 2 * k) * 2
        return [word(first + i) for i in range(4)]

    def gemm(
        self,
        acc: Accumulator,
        shape: tuple[int, int, int],
        load_a: Callable[[int, int], Fragment],
        load_b: Callable[[int, int], Fragment],
    ) -> None:
        """Adds the product."""
        mma.gemm(acc, shape, load_a, load_b, self._mma_dtype)


def product_words(spec: KernelSpec) -> Words:
    """Returns what the operands of a launch are, and what P and dS become."""
    return Native(spec.product_dtype)


def result_words(spec: KernelSpec) -> Words:
    """Returns what the output and the gradients of query, key and value become when they are stored."""
    return Native(spec.result_dtype)


def scaled(words: Words, values: list[Int32], factor: Float32) -> list[Int32]:
    """Returns pairs times a factor."""
    return [words.pair(*(x * factor for x in words.numbers(value))) for value in values]


def pairs(words: Words, acc: Any) -> list[Int32]:
    """Returns the pairs of a list of numbers."""
    return [words.pair(acc[i], acc[i + 1]) for i in range(0, len(acc), 2)]
