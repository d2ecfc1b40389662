# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""WGMMA vocabulary of the Hopper kernels: swizzled tiles, products of a warpgroup, rings of stages, loops.

Layouts, descriptors and fragments come from CuTe's own partitioning. A warpgroup's accumulator, like one of `mma.py`
with `m_blocks = 1`, holds element e of column block n at flat index `4 n + e`; two neighboring blocks rounded to 16
bits are one A fragment of 16 columns.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int8, Int32, cute
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.cutlass_dsl import LoopUnroll, for_generate, if_generate, yield_out

from jax_fastattn.kernels.device import ptx, wgmma_steps
from jax_fastattn.kernels.device.wgmma_steps import Step

# The operands of a compile key have these types.
OPERAND_DTYPE = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}

# What special registers say


def thread_index() -> Int32:
    """Returns the thread's index in its CTA by way of a shuffle; ptxas would read it again, slowly, at each use."""
    return cute.arch.shuffle_sync_bfly(cute.arch.thread_idx()[0], offset=0)


def shared_memory() -> cute.Pointer:
    """Returns dynamic shared memory; its address is read once, as in `thread_index`."""
    address = cute.arch.make_warp_uniform(cute.arch.get_dyn_smem(Int8, alignment=1024).toint())
    return cute.make_ptr(Int8, address, cute.AddressSpace.smem, assumed_align=1024)


# Tiles


def atom_columns(columns: int) -> int:
    """Returns the 16-bit columns of a swizzle atom: rows of 128 bytes if they divide the tile, else of 64 or 16."""
    return next(atom for atom in (64, 32, 8) if columns % atom == 0)


def tile_layout(dtype: Any, shape: tuple[int, int]) -> Any:
    """Returns the layout of a `[rows, columns]` tile, columns contiguous: atoms of 8 rows, down the rows first.

    Rows of 128 or 64 bytes are swizzled; rows of 16 bytes are not.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 8: kinds.K_INTER}[atom_columns(shape[1])]
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, (0, 1))


def staged_tile(pointer: cute.Pointer, dtype: Any, shape: tuple[int, int], count: int, pitch: int) -> cute.Tensor:
    """Returns `count` tiles `[rows, columns, stage]` in shared memory, `pitch` elements apart."""
    layout = tile_layout(dtype, shape)
    staged = cute.append(layout.outer, cute.make_layout(count, stride=pitch))
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), staged)


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """Returns the same memory as `[columns, rows, stage]`."""
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0, 2]))


# Barriers


def expect(barrier: cute.Pointer, nbytes: int | Int32) -> None:
    """Arrives on a barrier that TMA completes with `nbytes`; one warp calls it."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)


def wait(barrier: cute.Pointer, phase: Int32) -> None:
    """Waits for the end of a barrier's phase."""
    ptx.wait_barrier(barrier.toint(), phase)


def release(barrier: cute.Pointer, arrives: Boolean | None = None) -> None:
    """Gives a stage back; every warp that used it calls it.

    Args:
        barrier: the barrier of the stage.
        arrives: whether this lane does so for the others; by default one of them does. Where lanes have loaded from
            the stage themselves, it has to be the last of the lanes that load an address: racecheck remembers no
            other, and does not see that the lanes meet here.
    """
    # When the lanes meet here, all of them have loaded what they load themselves.
    cute.arch.sync_warp()
    if arrives is None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)
    else:
        if_generate(arrives, lambda: cute.arch.mbarrier_arrive(barrier))


class Uniform:
    """Int32 values that loops carry, the same in all lanes of a warp."""

    def __init__(self, *values: Int32):
        self._count = len(values)
        self._at = cute.make_rmem_tensor((self._count,), Int32)
        for i, value in enumerate(values):
            self._at[i] = value

    def __getitem__(self, i: int) -> Int32:
        return self._at[i]

    def __setitem__(self, i: int, value: Int32) -> None:
        self._at[i] = value

    def make_uniform(self) -> None:
        """Tells the compiler, before a loop, that all lanes have the same."""
        for i in range(self._count):
            self._at[i] = cute.arch.make_warp_uniform(self._at[i])


def advance(at: Uniform | cute.Tensor, stages: int) -> None:
    """Takes a position in a ring, (stage, phase), to the next stage; the phase is the parity of the lap."""
    stage = Int32(at[0])
    wraps = stage == stages - 1
    at[0] = ptx.where(wraps, Int32(0), stage + 1)
    at[1] = at[1] ^ ptx.where(wraps, Int32(1), Int32(0))


class Ring:
    """One side's position in a ring of stages.

    The producer fills and the consumers wait and release in the same order, once per stage and lap. A barrier's phase
    is the parity of the lap; "empty" barriers start as if a lap had been released.

    Args:
        full: barriers that TMA completes.
        empty: barriers on which every consumer warp arrives.
        stages: their number.
    """

    def __init__(self, full: cute.Pointer, empty: cute.Pointer, stages: int):
        self._full, self._empty, self._stages = full, empty, stages
        # Both are filled at once: loops are scheduled differently if each number is stored by itself.
        self._at = cute.make_rmem_tensor((2,), Int32)
        self._at.fill(0)

    def producer_load(self, copy: Callable[..., None], tile: Int32, nbytes: int | Int32) -> None:
        """Waits, in the producer, until the next stage is free and starts a copy of `nbytes` into it."""
        stage, phase = self._at[0], self._at[1] ^ 1
        advance(self._at, self._stages)
        wait(self._empty + stage, phase)
        expect(self._full + stage, nbytes)
        copy(tile, stage, self._full + stage)

    def consumer_wait(self) -> Int32:
        """Waits, in a consumer, until the next stage is full and returns its index."""
        stage, phase = self._at[0], self._at[1]
        advance(self._at, self._stages)
        wait(self._full + stage, phase)
        return stage

    def make_uniform(self) -> None:
        """Tells the compiler, before a loop, that all lanes are at one stage: its descriptors then cost nothing."""
        for i in range(2):
            self._at[i] = cute.arch.make_warp_uniform(self._at[i])

    def peek(self, ahead: Int32) -> Int32:
        """Waits for the stage `ahead` (0 or 1) after the next one to be full, without passing it."""
        stage = self._at[0] + ahead
        wraps = stage == self._stages
        phase = self._at[1] ^ ptx.where(wraps, Int32(1), Int32(0))
        stage = ptx.where(wraps, Int32(0), stage)
        wait(self._full + stage, phase)
        return stage

    def consumer_release(self, stage: Int32) -> None:
        """Gives a stage back; every consumer warp calls it."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self._empty + stage)


# Products


def product(dtype: Any, columns: int, *, a_in_registers: bool, b_transposed: bool) -> cute.TiledMma:
    """Returns a product of one warpgroup with 64 rows and `columns` columns.

    Args:
        dtype: the dtype of both factors.
        columns: N of the instruction, a multiple of 8, at most 256.
        a_in_registers: whether the left factor is a register fragment, else a tile `[rows, k]`.
        b_transposed: whether the right factor is stored `[k, columns]`, else `[columns, k]`.
    """
    majors, sources = cute.nvgpu.OperandMajorMode, warpgroup.OperandSource
    op = warpgroup.MmaF16BF16Op(
        dtype,
        Float32,
        (64, columns, 16),
        sources.RMEM if a_in_registers else sources.SMEM,
        majors.K,
        majors.MN if b_transposed else majors.K,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def operand_a(mma: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
    """Returns the descriptors of a left factor `[rows, k, stage]` in shared memory."""
    part = mma.get_slice(0)
    return mma.make_fragment_A(part.partition_A(tile))


def operand_b(mma: cute.TiledMma, tile: cute.Tensor) -> cute.Tensor:
    """Returns the descriptors of a right factor `[columns, k, stage]`."""
    part = mma.get_slice(0)
    return mma.make_fragment_B(part.partition_B(tile))


def accumulator(mma: cute.TiledMma, shape: tuple[int, int]) -> cute.Tensor:
    """Returns registers for a result."""
    return cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)


def fragment_a(mma: cute.TiledMma, shape: tuple[int, int], dtype: Any) -> cute.Tensor:
    """Returns registers for a left factor."""
    return cute.make_rmem_tensor(mma.partition_shape_A(shape), dtype)


# This is 1 in bfloat16.
ONE = 0x3F80

# An accumulator's row has this many lanes, each with columns of its own.
_COLUMN_LANES = 4


def ones(mma: cute.TiledMma, shape: tuple[int, int], thread: Int32) -> Any:
    """Returns a left factor of one step in registers, in bfloat16: [1, 1, 1, 0, ...] in all rows.

    It adds numbers that three parts hold.

    Args:
        mma: a product with its left factor in registers.
        shape: rows of the factor, and 16 columns.
        thread: index of this thread in its warpgroup, or in the CTA.
    """
    fragment = fragment_a(mma, shape, cutlass.BFloat16)
    pairs, pair = cute.recast_tensor(fragment, Int32), thread % _COLUMN_LANES
    values = ptx.where(pair == 0, Int32(ONE << 16 | ONE), ptx.where(pair == 1, Int32(ONE), Int32(0)))
    # The first two pairs are columns of both rows of a lane; the other two are their columns from 8 on.
    for i in range(4):
        pairs[i] = values if i < 2 else Int32(0)
    return fragment[None, None, 0]


def load_a(mma: cute.TiledMma, tile: cute.Tensor, stage: Any, count: int, thread: Int32) -> cute.Tensor:
    """Returns registers with a left factor of which a warpgroup loads the first `count` fragments of 16 columns.

    Args:
        mma: a product with its left factor in registers.
        tile: the factor, `[rows, k, stage]` in shared memory.
        stage: which one.
        count: how many to load; the others stay undefined.
        thread: index of this thread in the warpgroup.
    """
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), tile.element_type)
    copy = cute.make_tiled_copy_A(atom, mma).get_slice(thread)
    source = copy.partition_S(tile)[None, None, None, stage]
    fragment = fragment_a(mma, tuple(cute.size(tile, mode=[i]) for i in range(2)), tile.element_type)
    target = copy.retile(fragment)
    for k in range(count):
        cute.copy(atom, source[None, None, k], target[None, None, k])
    return fragment


def gemm(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    *,
    accumulate: bool,
) -> None:
    """Starts acc (+)= A B as one group of instructions; `warpgroup.wait_group` waits for it.

    Args:
        acc: the accumulator of the product.
        a: the left factor.
        b: the right factor, of one stage.
        accumulate: whether to add to `acc`.
    """
    gemm_steps(acc, steps_of(mma, a, b), accumulate=accumulate)


def steps_of(mma: cute.TiledMma, a: cute.Tensor, b: cute.Tensor) -> Iterator[Step]:
    """Returns a product's steps of 16 along k."""
    for k in range(cute.size(a, mode=[2])):
        yield mma, a[None, None, k], b[None, None, k]


def gemm_steps(acc: cute.Tensor, steps: Iterable[Step], *, accumulate: bool) -> None:
    """Runs `gemm` on steps that may have their factors in different places, and different dtypes."""
    warpgroup.fence()
    wgmma_steps.run(acc, steps, accumulate=accumulate)
    warpgroup.commit_group()


def loop(count: Int32, body: Callable[[Int32], None]) -> None:
    """Runs `body(i)` for i in range(count); state lives in register tensors."""
    for i in for_generate(0, count, unroll=LoopUnroll(count=1)):
        body(i)
        yield_out()
