# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Words of a product: what the numbers of an accumulator become for the next product, or for memory.

Accumulators are float32. P, dS, the weights between them and results are made into words here and nowhere else. Two
neighbors of an accumulator, elements 2 i and 2 i + 1, are pair i. Operands in memory are words already.

`Words` is what a kernel asks, `FactorWords` what a kernel asks of factors. There are three implementations:

- `Native` has two numbers of 16 bits a word, and one product for each.
- `Split` has two numbers in two words: both in bfloat16, and what rounding has left of them. A product is three.
- `Single` has a float32 number a word, and no products: results of split factors, and P on its way between warps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.device import mma, ptx, wgmma
from jax_fastattn.kernels.device.layout import CHUNK
from jax_fastattn.kernels.device.mma import Accumulator, Fragment
from jax_fastattn.kernels.device.split_factor import TERMS, SplitFactor
from jax_fastattn.kernels.key import KernelSpec

Pair = Any  # the word of a pair, or both of its words
Factor = Any  # a fragment, or the fragments of both terms


class LeftFactor(Protocol):
    """The left factor of a warpgroup's product, in registers. Its pairs are the pairs of an accumulator."""

    def put(self, pair: int, word: Pair) -> None:
        """Sets a pair."""
        ...

    def copied(self) -> list[Pair]:
        """Returns the pairs in registers of their own: no register that a product in flight reads may be read."""
        ...

    def multiply(self, acc: cute.Tensor, right: Sequence[Any], *, accumulate: bool = True) -> None:
        """Starts its product with a right factor, given descriptors of one stage, of each term."""
        ...


class Words(Protocol):
    """What numbers become.

    If a pair has two words, `apart` says how many bytes the second one lies after the first one.
    """

    def columns(self, count: int) -> int:
        """Returns how many columns of 16 bits numbers take that lie side by side."""
        ...

    def pair(self, low: Float32, high: Float32) -> Pair:
        """Returns what two numbers become."""
        ...

    def numbers(self, pair: Pair) -> list[Float32]:
        """Returns the two numbers that a pair stands for."""
        ...

    def store(self, address: Int32, pair: Pair, apart: int = 4) -> None:
        """Stores a pair to shared memory."""
        ...

    def row_pairs(self, load: Callable[[Int32], list[Int32]], chunk: Int32, columns: int) -> list[Pair]:
        """Returns the pairs of eight numbers of a row in memory.

        Args:
            load: returns the four words of the 16 bytes at an offset in the row.
            chunk: which eight numbers.
            columns: numbers of the row.
        """
        ...


class MemoryWords(Words, Protocol):
    """What numbers become that the next product does not take from registers: results, and P on its way."""

    def select(self, condition: Boolean, pair: Pair) -> Pair:
        """Returns the pair, or the pair of two zeros if the condition does not hold."""
        ...

    def load(self, address: Int32, apart: int = 4) -> Pair:
        """Loads a pair that `store` has stored."""
        ...


class FactorWords(Words, Protocol):
    """What numbers become, and how words are multiplied."""

    def factor(
        self, load: Callable[[int, int], Fragment], *, blocks: int = 0, steps: int = 0
    ) -> Callable[[int, int], Factor]:
        """Returns the loader of a factor, given the loader of its first term.

        Args:
            load: (m, k) or (n, k) to a fragment, see `mma.gemm`.
            blocks: by how many blocks the second term lies after the first one, if there are two.
            steps: by how many steps it does.
        """
        ...

    def fragment(self, word: Callable[[int], Pair], n_blocks: int, m: int, k: int) -> Factor:
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
        load_a: Callable[[int, int], Factor],
        load_b: Callable[[int, int], Factor],
    ) -> None:
        """Adds a product of a warp to its accumulator, see `mma.gemm`."""
        ...


class WarpgroupWords(FactorWords, Protocol):
    """What numbers become where warpgroups multiply."""

    @property
    def terms(self) -> Sequence[tuple[int, int]]:
        """The terms of the left and the right factor whose products are added, the smallest product first."""
        ...

    def pair(self, low: Float32, high: Float32, *, floor: bool = False) -> Pair:
        """Returns what two numbers become. With a `floor` negative ones become 0."""
        ...

    def left_factor(self, product: cute.TiledMma, shape: tuple[int, int]) -> LeftFactor:
        """Returns registers for the left factor of a warpgroup's product, given its rows and columns."""
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

    def multiply(self, acc: cute.Tensor, right: Sequence[cute.Tensor], *, accumulate: bool = True) -> None:
        """Starts its product with a right factor."""
        wgmma.gemm(self.product, acc, self.fragment, *right, accumulate=accumulate)


@final
@dataclass(frozen=True)
class Native:
    """Two numbers of 16 bits a word.

    Attributes:
        dtype: the dtype of the numbers, as the compile key names it.
    """

    dtype: str

    @property
    def mma_dtype(self) -> str:
        """The dtype as instructions name it."""
        return ptx.MMA_DTYPE[self.dtype]

    @property
    def terms(self) -> Sequence[tuple[int, int]]:
        """The one product."""
        return ((0, 0),)

    def columns(self, count: int) -> int:
        """Returns a column for each number."""
        return count

    def pair(self, low: Float32, high: Float32, *, floor: bool = False) -> Int32:
        """Returns two numbers, rounded to nearest, the first one in the lower half."""
        return ptx.pack(low, high, dtype=self.mma_dtype, floor=floor)

    def numbers(self, pair: Int32) -> list[Float32]:
        """Returns the numbers in the two halves."""
        return ptx.unpack(pair, dtype=self.mma_dtype)

    def select(self, condition: Boolean, pair: Int32) -> Int32:
        """Returns a word."""
        return ptx.where(condition, pair, Int32(0))

    def store(self, address: Int32, pair: Int32, apart: int = 4) -> None:
        """Stores a word."""
        del apart
        ptx.store_shared(address, pair)

    def load(self, address: Int32, apart: int = 4) -> Int32:
        """Loads a word."""
        del apart
        return ptx.load_shared(address)

    def row_pairs(self, load: Callable[[Int32], list[Int32]], chunk: Int32, columns: int) -> list[Int32]:
        """Returns four words."""
        del columns
        return load(chunk * (2 * CHUNK))

    def factor(
        self, load: Callable[[int, int], Fragment], *, blocks: int = 0, steps: int = 0
    ) -> Callable[[int, int], Fragment]:
        """Returns the loader itself: there is one term."""
        del blocks, steps
        return load

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
        mma.gemm(acc, shape, load_a, load_b, self.mma_dtype)


@final
@dataclass(frozen=True)
class Split:
    """Two numbers in two words: both rounded to bfloat16, and what rounding has left of them in bfloat16."""

    @property
    def terms(self) -> Sequence[tuple[int, int]]:
        """Three products."""
        return TERMS

    def columns(self, count: int) -> int:
        """Returns a column for each number: the terms of a row lie one after the other."""
        return count

    def pair(self, low: Float32, high: Float32, *, floor: bool = False) -> tuple[Int32, Int32]:
        """Returns the rounded numbers, then the rests."""
        if floor:
            low, high = (ptx.maximum(x, Float32(0.0), keep_nan=True) for x in (low, high))
        rounded = _BF16.pair(low, high)
        near = _BF16.numbers(rounded)
        return rounded, _BF16.pair(low - near[0], high - near[1])

    def numbers(self, pair: tuple[Int32, Int32]) -> list[Float32]:
        """Returns the sums of both terms."""
        return [x + y for x, y in zip(*map(_BF16.numbers, pair), strict=True)]

    def store(self, address: Int32, pair: tuple[Int32, Int32], apart: int = 4) -> None:
        """Stores two words."""
        _store(address, pair, apart)

    def row_pairs(self, load: Callable[[Int32], list[Int32]], chunk: Int32, columns: int) -> list[tuple[Int32, Int32]]:
        """Returns four words of each term."""
        first = chunk * (2 * CHUNK)
        return list(zip(load(first), load(first + 2 * columns), strict=True))

    def factor(
        self, load: Callable[[int, int], Fragment], *, blocks: int = 0, steps: int = 0
    ) -> Callable[[int, int], list[Fragment]]:
        """Returns the loader of both terms."""
        return lambda i, k: [load(i, k), load(i + blocks, k + steps)]

    def left_factor(self, product: cute.TiledMma, shape: tuple[int, int]) -> SplitFactor:
        """Returns registers for both terms of a left factor."""
        return SplitFactor.of(product, shape)

    def fragment(self, word: Callable[[int], tuple[Int32, Int32]], n_blocks: int, m: int, k: int) -> list[Fragment]:
        """Returns the fragments of both terms."""
        found = [word((m * n_blocks + 2 * k) * 2 + i) for i in range(4)]
        return [[pair[term] for pair in found] for term in range(2)]

    def gemm(
        self,
        acc: Accumulator,
        shape: tuple[int, int, int],
        load_a: Callable[[int, int], list[Fragment]],
        load_b: Callable[[int, int], list[Fragment]],
    ) -> None:
        """Adds three products. The product of both rests is smaller than what rounding the rests loses."""
        mma.gemm(acc, shape, load_a, load_b, _BF16.mma_dtype, terms=TERMS)


@final
@dataclass(frozen=True)
class Single:
    """Two float32 numbers in two words."""

    def columns(self, count: int) -> int:
        """Returns two columns for each number."""
        return 2 * count

    def pair(self, low: Float32, high: Float32) -> tuple[Int32, Int32]:
        """Returns the bits of both numbers."""
        return ptx.bits(low), ptx.bits(high)

    def numbers(self, pair: tuple[Int32, Int32]) -> list[Float32]:
        """Returns the numbers that the words are the bits of."""
        return [ptx.from_bits(x) for x in pair]

    def select(self, condition: Boolean, pair: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
        """Returns two words."""
        first, second = (ptx.where(condition, x, Int32(0)) for x in pair)
        return first, second

    def store(self, address: Int32, pair: tuple[Int32, Int32], apart: int = 4) -> None:
        """Stores two words, neighbors at once."""
        if apart == 4:
            ptx.store_shared_pair(address, *self.numbers(pair))
        else:
            _store(address, pair, apart)

    def load(self, address: Int32, apart: int = 4) -> tuple[Int32, Int32]:
        """Loads two words."""
        return ptx.load_shared(address), ptx.load_shared(address + apart)

    def row_pairs(self, load: Callable[[Int32], list[Int32]], chunk: Int32, columns: int) -> list[tuple[Int32, Int32]]:
        """Returns eight neighboring words."""
        del columns
        first = chunk * (4 * CHUNK)
        words = (*load(first), *load(first + 2 * CHUNK))
        return list(zip(words[::2], words[1::2], strict=True))


_BF16 = Native("bfloat16")


def _store(address: Int32, pair: tuple[Int32, Int32], apart: int) -> None:
    for i, word in enumerate(pair):
        ptx.store_shared(address + i * apart, word)


def product_words(spec: KernelSpec) -> FactorWords:
    """Returns what the operands of a launch are, and what P and dS become."""
    return Native(spec.product_dtype) if spec.terms == 1 else Split()


def warpgroup_words(spec: KernelSpec) -> WarpgroupWords:
    """Returns what `product_words` does for a launch whose warpgroups multiply."""
    return Native(spec.product_dtype) if spec.terms == 1 else Split()


def crossing_words(spec: KernelSpec) -> MemoryWords:
    """Returns what P becomes on its way to dS, from one warp to another or in registers while dP is computed.

    float16 has three bits more than bfloat16, but weights of steep functions may be infinite there, and small ones 0.
    """
    return Single() if spec.terms > 1 else Native("float16" if spec.fits_float16 else spec.product_dtype)


def result_words(spec: KernelSpec) -> MemoryWords:
    """Returns what the output and the gradients of query, key and value become when they are stored."""
    return Native(spec.result_dtype) if spec.products == "native" else Single()


def summed(spec: KernelSpec) -> Callable[[Float32, Float32], list[Float32]] | None:
    """Returns what rounds two weights of a forward pass for its sums; None if sums are of weights as they are.

    Delta is made of the output, which then has no error where a weight is nearly 1: dS is a small difference there.
    """
    if spec.op != "forward" or spec.products != "half":
        return None
    dtype = ptx.MMA_DTYPE[spec.product_dtype]
    return lambda low, high: ptx.unpack(ptx.pack(low, high, dtype=dtype, apart=True), dtype=dtype)


def pairs(words: Words, acc: Any) -> list[Pair]:
    """Returns the pairs of a list of numbers."""
    return [words.pair(acc[i], acc[i + 1]) for i in range(0, len(acc), 2)]
