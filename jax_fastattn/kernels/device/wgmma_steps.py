# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The instructions of a warpgroup's product, one for each 16 along k; `wgmma.py` starts and ends their group.

`cute.gemm` becomes four operations for each sum of each instruction: its address, its load, its result and its store.
Here sums stay values from one instruction to the next, as in `mma.py`, so only the first one loads sums and only the
last one stores them. The machine code is the same, byte for byte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import cutlass
from cutlass import Int32, cute
from cutlass._mlir.dialects import builtin, llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T

# A step is a product of 16 along k with its two factors.
Step = tuple[cute.TiledMma, Any, Any]

_NAME = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}

# A lane's part of a left factor of 16 columns: 8 elements.
_FRAGMENT_WORDS = 4


@final
@dataclass(frozen=True)
class _Instruction:
    """An instruction, as text.

    Attributes:
        shape: M, N and K.
        dtype: of both factors, "bf16" or "f16".
        a_in_registers: whether the left factor is in registers, else described like the right one.
        transposed: for each factor in shared memory, whether it is stored with k as its rows.
    """

    shape: tuple[int, int, int]
    dtype: str
    a_in_registers: bool
    transposed: tuple[bool, ...]

    @classmethod
    def of(cls, op: Any) -> _Instruction:
        """Returns the instruction of a product of `wgmma.product`."""
        a_in_registers = op.a_src == warpgroup.OperandSource.RMEM
        majors = (op.b_major_mode,) if a_in_registers else (op.a_major_mode, op.b_major_mode)
        transposed = tuple(major == OperandMajorMode.MN for major in majors)
        return cls(tuple(op.shape_mnk), _NAME[op.a_dtype], a_in_registers, transposed)

    @functools.cached_property
    def text(self) -> str:
        """The assembly. Its operands are the sums, twice, then the left factor, the right one, and whether to add."""
        rows, columns, depth = self.shape
        sums = columns // 2
        left = [f"${2 * sums + i}" for i in range(_FRAGMENT_WORDS if self.a_in_registers else 1)]
        right, adds = (f"${2 * sums + len(left) + i}" for i in range(2))
        operands = [
            f"{{{', '.join(f'${i}' for i in range(sums))}}}",
            f"{{{', '.join(left)}}}" if self.a_in_registers else left[0],
            *(right, "p", "1", "1"),
            *(str(int(x)) for x in self.transposed),
        ]
        name = f"wgmma.mma_async.sync.aligned.m{rows}n{columns}k{depth}.f32.{self.dtype}.{self.dtype}"
        predicate = f".reg .pred p;\nsetp.ne.b32 p, {adds}, 0;"
        return f"{{\n{predicate}\n{name} {', '.join(operands)};\n}}\n"

    @functools.cached_property
    def constraints(self) -> str:
        """Where operands are: each sum is in the register of its result."""
        sums = self.shape[1] // 2
        left = ["r"] * _FRAGMENT_WORDS if self.a_in_registers else ["l"]
        return ",".join([*["=f"] * sums, *map(str, range(sums)), *left, "l", "r"])


_instruction = functools.cache(_Instruction.of)


def run(acc: cute.Tensor, steps: Iterable[Step], *, accumulate: bool) -> None:
    """Emits the instructions of acc (+)= A B, see `wgmma.gemm_steps`.

    Operations stand for their results here: a result as a Python object takes longer than its operation.

    Args:
        acc: the accumulator, of as many sums as a lane has of the result.
        steps: at least one, all with the columns of `acc`.
        accumulate: whether the first one adds to `acc`.
    """
    f32, count = T.f32(), cute.size(acc)
    places = _places(acc, f32, count)
    sums: list[Any] = [llvm.LoadOp(f32, place) for place in places]
    struct = llvm.StructType.get_literal([f32] * count)  # pyright: ignore[reportAttributeAccessIssue] (its stub lacks it)
    adds = {x: Int32(int(x)).ir_value() for x in (accumulate, True)}
    for i, (mma, a, b) in enumerate(steps):
        instruction = _instruction(mma.op)
        left = _words(a) if instruction.a_in_registers else [_descriptor(a)]
        out = llvm.inline_asm(
            struct,
            [*sums, *left, _descriptor(b), adds[accumulate or i > 0]],
            instruction.text,
            instruction.constraints,
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
        sums = [llvm.ExtractValueOp(f32, out, [n]) for n in range(count)]
    for place, x in zip(places, sums, strict=True):
        llvm.StoreOp(x, place)


def _words(fragment: cute.Tensor) -> list[Any]:
    """Loads a lane's part of a left factor of one step."""
    i32 = T.i32()
    return [llvm.LoadOp(i32, place) for place in _places(fragment, i32, _FRAGMENT_WORDS)]


def _places(tensor: cute.Tensor, dtype: Any, count: int) -> list[Any]:
    """Returns where a register tensor, which has no gaps, has its first elements, or words, of a type."""
    first: Any = tensor.iterator.llvm_ptr  # pyright: ignore[reportAttributeAccessIssue] (a pointer, as it is in memory)
    others = [llvm.GEPOp(first.type, first, [], [i], dtype, "None") for i in range(1, count)]
    return [first, *others]


def _descriptor(tile: cute.Tensor) -> Any:
    """Returns the descriptor of a factor in shared memory as a number."""
    return builtin.unrealized_conversion_cast([T.i64()], [tile.iterator])
