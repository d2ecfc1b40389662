# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The pieces of a matrix that warps of the portable kernels copy for themselves: layout, room, and results."""

from __future__ import annotations

import collections
import itertools
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_dkdv_dq
import emulated_forward
import emulated_launch
from emulated_backward import Sizes

from jax_fastattn.compilation.compiler import _open_runtime, kernel_class
from jax_fastattn.kernels.architectures import ARCHITECTURES, BORROWED
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.device.layout import CHUNK, PieceRing, WarpPiece
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.forward.config import fits

MATRIX: dict[str, Any] = {"bias": "matrix", "bias_dtype": "bfloat16"}
CAUSAL: dict[str, Any] = {**MATRIX, "window_right": True}
LANES = range(32)
MAIN = {"forward": "ForwardKernel.kernel", "backward": "DkdvDqKernel.kernel"}


def key(op: str, arch: str, head_dim: int, **features: Any) -> KernelSpec:
    """Returns a compile key of the portable family."""
    return configured(KernelSpec(op, arch, "bfloat16", head_dim, head_dim, **features))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rows", [8, 16])
def test_ldmatrix_reads_what_lanes_have_copied(rows: int) -> None:
    piece = WarpPiece(rows)
    given = np.arange(rows * piece.columns).reshape(rows, -1, CHUNK)
    shared = np.full((32, CHUNK), -1)
    for lane in LANES:
        shared[piece.copy_offset(lane) // 16] = given[piece.lane_chunk(lane)]
    read = [piece.read_offset(lane) // 16 for lane in LANES]
    # Eight rows of each phase, on eight bank groups of 16 bytes.
    assert [len({x % 8 for x in read[i : i + 8]}) for i in range(0, 32, 8)] == [8] * 4
    found = [shared[x] for x in read]
    np.testing.assert_array_equal(found, given.swapaxes(0, 1).reshape(32, CHUNK))


def test_pieces_take_turns() -> None:
    ring = PieceRing(WarpPiece(16), terms=2, places=6, count=8, across=4)
    assert (ring.nbytes, ring.refills) == (6 * 1024, True)
    assert [ring.offset(i, 1) for i in (0, 5, 6)] == [512, 5 * 1024 + 512, 512]
    assert [ring.corner(i) for i in (0, 3, 4, 7)] == [(0, 0), (0, 48), (16, 0), (16, 48)]


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("arch", [x for x in ARCHITECTURES + BORROWED if x != "sm_90a"])
def test_a_matrix_takes_the_room_that_a_tiling_leaves(op: str, arch: str) -> None:
    for head_dim in range(8, 257, 8):
        plain = key(op, arch, head_dim).config
        for dtype in ("bfloat16", "float32"):
            spec = key(op, arch, head_dim, bias="matrix", bias_dtype=dtype)
            config, ring = spec.config, spec.config.bias_ring
            assert fits(config, spec)
            assert (config.tiles, config.threads, config.blocks) == (plain.tiles, plain.threads, plain.blocks)
            assert 0 <= config.bias_pieces <= ring.count
            # A copy on its way is that of the next piece or of a later one.
            assert config.bias_pieces != 1


def test_pieces_by_head_dim() -> None:
    """All of a tile where there is room, else some that are copied in turns, or none."""
    found = {
        (op, arch): [key(op, arch, head_dim, **MATRIX).config.bias_pieces for head_dim in (64, 96, 128, 192, 256)]
        for op in ("forward", "backward")
        for arch in ("sm_80", "sm_86")
    }
    assert found == {
        ("forward", "sm_80"): [8, 8, 6, 4, 4],
        ("forward", "sm_86"): [8, 4, 4, 2, 0],
        ("backward", "sm_80"): [4, 8, 3, 4, 4],
        ("backward", "sm_86"): [3, 0, 0, 4, 0],
    }


FORWARD = {
    "over-query": (key("forward", "sm_80", 64, **CAUSAL), Sizes(1, 150, 201, 1, right=0, bias=(1, 1, 150, 201))),
    "turns-holes": (
        key("forward", "sm_80", 128, group=2, **MATRIX),
        Sizes(1, 133, 201, 1, bias=(1, 2, 133, 201), bias_holes=0.1),
    ),
}


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("name", FORWARD)
def test_outputs_match_the_reference(name: str) -> None:
    _open_runtime()
    emulated_forward.check(*FORWARD[name])


@pytest.mark.slow
def test_terms_of_a_float32_bias_with_several_planes() -> None:
    """The low term of a plane is as many planes further as there are."""
    _open_runtime()
    spec = key("forward", "sm_86", 64, **{**CAUSAL, "bias_dtype": "float32"}, group=2)
    emulated_forward.check(spec, Sizes(1, 70, 140, 1, right=0, bias=(1, 2, 70, 140)))


# Of the accesses of a warp to its pieces, and what orders them: emulated lanes advance together.
_ACCESSES = re.compile(r"bar\.warp\.sync|bar\.sync|barrier\.sync|cp\.async\.c[ga]|cp\.async\.wait_group|ldmatrix")


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_lanes_wait_for_each_other_around_copies(op: str) -> None:
    """Before a lane copies over what others may still read, and before it reads what others have copied."""
    _open_runtime()
    arch, head_dim = ("sm_80", 128) if op == "forward" else ("sm_86", 64)
    spec = key(op, arch, head_dim, **CAUSAL)
    assert spec.config.bias_ring.refills
    text = emulated_launch.compile_kernel(kernel_class("sm80", op)(spec), spec)[MAIN[op]]
    pairs = collections.Counter(itertools.pairwise(_ACCESSES.findall(text)))
    assert pairs["bar.warp.sync", "cp.async.cg"] and pairs["bar.warp.sync", "ldmatrix"]
    assert not [pair for pair in pairs if pair[0] == "ldmatrix" and pair[1].startswith("cp.async.c")]
    assert not pairs["cp.async.wait_group", "ldmatrix"]


@pytest.mark.slow
@pytest.mark.whole
def test_warps_wait_for_pieces() -> None:
    """Two roles, and three of eight pieces at a time: no other warp reads or writes them."""
    _open_runtime()
    sizes = Sizes(1, 133, 140, 1, right=0, bias=(1, 1, 133, 140))
    run = emulated_dkdv_dq.Run(key("backward", "sm_86", 64, **CAUSAL), sizes)
    run.run("Preprocess")
    run.run("DkdvDq", schedule="random", finds_races=True)
    run.run("Convert")
    run.compare()
