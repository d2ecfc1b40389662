# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of one warp once more, by mma.sync from the swizzled tiles that a wgmma of its warpgroup has read.

wgmma needs all four warps; what a single warp has to repeat, it computes with mma.sync. The accumulator of wgmma is
an accumulator of `mma.py` with one block row, so the results land in the same registers.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cutlass_dsl import dsl_user_op

from jax_fastattn.kernels.device import ptx, wgmma
from jax_fastattn.kernels.device.layout import crossed_lane, plain_lane


def swizzled_offset(row: Any, step: Any, half: Any, rows: int, columns: int) -> Any:
    """Returns the byte offset of 8 columns, from 16 step + 8 half on, in a `wgmma.tile_layout` tile.

    Atoms of 64 or 32 columns lie one after the other, each with all rows; chunks of 16 bytes are swizzled by the row.

    Args:
        row: the row, a Python or a device integer, like the next two.
        step: which 16 columns.
        half: 0 or 1.
        rows: rows of the tile, a multiple of 16.
        columns: columns of the tile.
    """
    atom = wgmma.atom_columns(columns)
    steps = atom // 16
    swizzle = row % 8 if atom == 64 else row // 2 % 4
    chunk = (2 * (step % steps) + half) ^ swizzle
    return step // steps * (rows * atom * 2) + row * (atom * 2) + chunk * 16


def warp_scores(
    scores: cute.Tensor,
    tiles: Sequence[tuple[Int32, Int32]],
    *,
    warp: Int32,
    lane: Int32,
    keys: int,
    head_dim: int,
    mma_dtype: str,
) -> None:
    """Returns S = Q K^T of the 16 rows of one warp.

    Args:
        scores: the wgmma accumulator `[64, keys]`, overwritten.
        tiles: addresses of Q's tile `[64, head_dim]` and of K's tile `[keys, head_dim]`, aligned to 1024 bytes, for
            each product of terms.
        warp: index of the warp in its warpgroup.
        lane: index of the lane in its warp.
        keys: keys of the tile, a multiple of 16.
        head_dim: padded head dim, a multiple of 32.
        mma_dtype: "bf16" or "f16".
    """
    a_row, a_column = plain_lane(lane)
    b_row, b_column = crossed_lane(lane)
    # It is unrolled: for accumulators that a loop carries ptxas found no place next to the main loop's accumulators.
    steps = [
        (
            query + swizzled_offset(warp * 16 + a_row, k, a_column // 8, 64, head_dim),
            key + swizzled_offset(b_row, k, b_column // 8, keys, head_dim),
        )
        for query, key in tiles
        for k in range(head_dim // 16)
    ]
    # The swizzle repeats every 8 rows.
    found = _mma_steps(steps, keys // 16, 16 * 2 * wgmma.atom_columns(head_dim), mma_dtype)
    for i, x in enumerate(found):
        scores[i] = x


@dsl_user_op
def _mma_steps(
    steps: list[tuple[Int32, Int32]], blocks: int, block_bytes: int, dtype: str, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """Returns the lane's `8 blocks` numbers of A B, a product of 16 rows and `16 blocks` columns of one warp.

    It is one operation, for code that rarely runs. If each instruction were an operation, they would be a tenth of what
    is compiled.

    Args:
        steps: for each 16 of k, the addresses that the lane passes to ldmatrix for A and for the first 16 columns of B.
        blocks: blocks of 16 columns.
        block_bytes: the distance of two blocks in bytes.
        dtype: "bf16" or "f16".
    """
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    multiply = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
    count = 8 * blocks
    lines = ["{", ".reg .b32 a<4>;", ".reg .b32 b<4>;", ".reg .f32 zero;", "mov.f32 zero, 0f00000000;"]
    for step in range(len(steps)):
        a, b = count + 2 * step, count + 2 * step + 1
        lines.append(f"{load} {{a0, a1, a2, a3}}, [${a}];")
        for block in range(blocks):
            # The fence keeps the compiler from loading many fragments first: the main loop has no registers to spare.
            lines.append("fence.acq_rel.cta;")
            lines.append(f"{load} {{b0, b1, b2, b3}}, [${b}+{block * block_bytes}];")
            for half in range(2):
                out = ", ".join(f"${8 * block + 4 * half + e}" for e in range(4))
                c = out if step else "zero, zero, zero, zero"
                lines.append(f"{multiply} {{{out}}}, {{a0, a1, a2, a3}}, {{b{2 * half}, b{2 * half + 1}}}, {{{c}}};")
    values = [Int32(address) for step in steps for address in step]
    return ptx.asm("\n".join([*lines, "}"]), "F" * count, "r" * len(values), values, True, loc, ip)
