# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The index arithmetic of mma.sync kernels on Python integers: fragments, bank conflicts, copies, tile tables."""

import importlib.util

import numpy as np
import pytest

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.architectures import ARCHITECTURES, shared_memory_limit
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.device.layout import (
    CHUNK,
    CopyShape,
    SharedTile,
    accumulator_lane,
    crossed_lane,
    plain_lane,
)
from jax_fastattn.kernels.key import KernelSpec

HEAD_DIMS = range(8, 257, 8)


def ldmatrix(block: np.ndarray, lane_map, transpose: bool) -> np.ndarray:
    """[lane, register, pair] that ldmatrix.x4 returns when each lane passes `lane_map(lane)` of a 16 x 16 block."""
    matrices = np.empty((4, 8, 8), block.dtype)
    for lane in range(32):
        row, column = lane_map(lane)
        matrices[lane // 8, lane % 8] = block[row, column : column + 8]
    if transpose:
        matrices = matrices.swapaxes(1, 2)
    return np.stack([m.reshape(32, 2) for m in matrices], axis=1)


def fragment_a(matrix: np.ndarray) -> np.ndarray:
    """[lane, register, pair] of a 16 x 16 A operand [m, k], from the table of the PTX manual."""
    out = np.empty((32, 4, 2), matrix.dtype)
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for register in range(4):
            for half in range(2):
                row = group + 8 * (register % 2)
                out[lane, register, half] = matrix[row, 2 * thread + half + 8 * (register // 2)]
    return out


def fragment_b(matrix: np.ndarray) -> np.ndarray:
    """[lane, register, pair] of two 16 x 8 B operands side by side [k, n]."""
    out = np.empty((32, 4, 2), matrix.dtype)
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for register in range(4):
            for half in range(2):
                k = 2 * thread + half + 8 * (register % 2)
                out[lane, register, half] = matrix[k, group + 8 * (register // 2)]
    return out


BLOCK = np.arange(256).reshape(16, 16)


def test_plain_lane_gives_a_and_transposed_b():
    np.testing.assert_array_equal(ldmatrix(BLOCK, plain_lane, False), fragment_a(BLOCK))
    np.testing.assert_array_equal(ldmatrix(BLOCK, plain_lane, True), fragment_b(BLOCK))


def test_crossed_lane_gives_b_and_transposed_a():
    np.testing.assert_array_equal(ldmatrix(BLOCK, crossed_lane, False), fragment_b(BLOCK.T))
    np.testing.assert_array_equal(ldmatrix(BLOCK, crossed_lane, True), fragment_a(BLOCK.T))


def test_two_packed_accumulators_are_one_a_fragment():
    wanted = fragment_a(BLOCK)
    for lane in range(32):
        row, column = accumulator_lane(lane)
        for register in range(4):
            top, left = row + 8 * (register % 2), column + 8 * (register // 2)
            np.testing.assert_array_equal(wanted[lane, register], BLOCK[top, left : left + 2])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shared_rows_are_free_of_bank_conflicts(head_dim):
    tile = SharedTile(64, head_dim)
    for lane_map in (plain_lane, crossed_lane):
        for phase in range(4):
            starts = [tile.offset(*lane_map(lane)) for lane in range(8 * phase, 8 * phase + 8)]
            assert {start // 16 % 8 for start in starts} == set(range(8))
            assert all(start % 16 == 0 for start in starts)
    words = [tile.offset(*accumulator_lane(lane)) // 4 % 32 for lane in range(32)]
    assert sorted(words) == list(range(32))


@pytest.mark.parametrize("threads", [32, 128, 256])
@pytest.mark.parametrize("rows", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 72, 96, 128, 160, 192, 248, 256])
def test_a_copy_visits_every_chunk_once(head_dim, rows, threads):
    shape = CopyShape(SharedTile(rows, head_dim), threads)
    visits = np.zeros((rows, shape.tile.chunks), int)
    for thread in range(threads):
        row, chunk = shape.thread_chunk(thread)
        for first_row, first_chunk, rows_end, columns_end in shape.passes():
            at = row + first_row, chunk + first_chunk
            assert rows_end or at[0] < rows
            if at[0] < rows:
                visits[at] += 1
                assert columns_end or at[1] * CHUNK < head_dim
    assert (visits == 1).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_forward_tiling_fits(head_dim, arch):
    for v_head_dim in HEAD_DIMS:
        config = configured(KernelSpec("forward", arch, "bfloat16", head_dim, v_head_dim)).config
        assert config.shared_memory(head_dim, v_head_dim) <= shared_memory_limit(arch)
        assert config.keys % 16 == 0
        # Output and score accumulators of a thread, out of 255 registers.
        assert config.rows_per_warp * (SharedTile(1, v_head_dim).padded_columns + config.keys) // 32 <= 192


EMULATED = {
    "causal-mla-gqa3": (dict(head_dim=192, v_head_dim=128, window_right=True, group=3), {"scale": 0.1, "right": 0}),
    "negative-scale-window-offset-odd-dims": (
        dict(head_dim=72, v_head_dim=40, window_left=True, window_right=True, query_offset=True),
        {"scale": -0.3, "kv_heads": 2},
    ),
    # The tile of values holds rows that no query sees at its end, or at its beginning.
    "causal-fewer-queries-than-keys": (
        dict(head_dim=64, v_head_dim=64, window_right=True),
        {"batch": 1, "queries": 33, "keys": 127, "right": 0},
    ),
    "lengths-sinks-cap-wide-value": (
        dict(
            head_dim=24,
            v_head_dim=136,
            query_seq_lengths=True,
            key_value_seq_lengths=True,
            features=(codes.SOFT_CAP, codes.SINKS),
            window_right=True,
        ),
        {"scale": -0.4},
    ),
    "zero-scale-float16": (
        dict(head_dim=64, v_head_dim=64, operand_dtype="float16", key_value_seq_lengths=True),
        {"scale": 0.0},
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl to compile")
@pytest.mark.parametrize("case", [case for case in EMULATED if case != "lengths-sinks-cap-wide-value"])
def test_emulated_forward_matches_reference(case):
    check_forward(case)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl to compile")
def test_warps_of_the_forward_kernel_wait_for_each_other():
    """Before K's only stage is filled again, and before the output takes the place of tiles in shared memory."""
    check_forward("lengths-sinks-cap-wide-value")


def check_forward(case):
    from emulated_backward import Sizes
    from emulated_forward import check

    fields, sizes = EMULATED[case]
    check(configured(KernelSpec("forward", "sm_80", **{"operand_dtype": "bfloat16", **fields})), Sizes(**sizes))


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")
def test_ptxas_checks_what_is_emulated(monkeypatch):
    """The emulators get PTX for which ptxas has generated no code."""
    import emulated_launch
    from cutlass.base_dsl.compiler import CompilerDiagnosticError

    from jax_fastattn.compilation.compiler import _open_runtime, kernel_class
    from jax_fastattn.kernels.device import ptx

    emit = ptx.asm
    monkeypatch.setattr(ptx, "asm", lambda text, *more: emit(text.replace("mma.sync", "mma.sinc"), *more))
    spec = configured(KernelSpec("forward", "sm_80", "bfloat16", 16, 16))
    _open_runtime()
    with pytest.raises(CompilerDiagnosticError, match=r"Unknown modifier '\.sinc'"):
        emulated_launch.compile_kernel(kernel_class("sm80", "forward")(spec), spec)
