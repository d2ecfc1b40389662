# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The portable kernels for the gradient of a bias without a GPU: tiles, gradients, and the barrier of the ring."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_dkdv_dq
from emulated_backward import Sizes
from test_bias_backward_emulated import CASES
from warp_emulator import Race

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.architectures import ARCHITECTURES, BORROWED, shared_memory_limit
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.dbias_config import DbiasMemory, chunks

KEYS = {"bias": "keys", "dbias": True, "window_right": True, "group": 2}


def key(name: str, arch: str, **changes: Any) -> tuple[KernelSpec, Sizes]:
    """Returns the compile key of a case of Hopper's kernels for another architecture, and its sizes."""
    head_dim, v_head_dim, dtype, features, sizes = CASES[name]
    return configured(KernelSpec("backward", arch, dtype, head_dim, v_head_dim, **(features | changes))), sizes


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32", None])
@pytest.mark.parametrize("arch", ARCHITECTURES + BORROWED)
def test_every_head_dim_has_a_variant(arch: str, bias_dtype: str | None) -> None:
    """For a matrix in some dtype, and for rows under a soft cap."""
    for head_dim in range(8, 257, 8):
        found = chunks(head_dim, 64)
        assert [chunk.first for chunk in found] == [i * found[0].tile.padded_columns for i in range(len(found))]
        assert sum(chunk.tile.columns for chunk in found) == head_dim
        assert len({chunk.tile.pitch for chunk in found}) == 1
        for v_head_dim in (8, head_dim, 256):
            features: dict[str, Any] = {"bias": "matrix", "bias_dtype": bias_dtype, "dbias": True}
            if bias_dtype is None:
                features = {"bias": "rows", "dbias": True, "features": (codes.SOFT_CAP,)}
            memory = DbiasMemory.of(KernelSpec("backward", arch, "bfloat16", head_dim, v_head_dim, **features))
            assert memory.nbytes <= shared_memory_limit(arch)
            # Copies run at most one item ahead.
            assert memory.config.stages - 1 <= len(memory.query_chunks + memory.dout_chunks)


def test_a_bias_that_does_not_fit_stays_in_global_memory() -> None:
    """Two terms next to two stages, in 99 KB."""
    features: dict[str, Any] = {"bias": "matrix", "dbias": True}
    found = {
        (arch, dtype): DbiasMemory.of(KernelSpec("backward", arch, "bfloat16", 64, 64, bias_dtype=dtype, **features))
        for arch in ("sm_80", "sm_86")
        for dtype in ("bfloat16", "float32")
    }
    assert [name for name, memory in found.items() if not memory.config.copies_bias] == [("sm_86", "float32")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"), [("d96-causal", "sm_86"), ("d128-one-stage", "sm_86"), ("rows-everything", "sm_80")]
)
def test_gradients_match_the_reference(name: str, arch: str) -> None:
    emulated_dkdv_dq.check(*key(name, arch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "shape"), [(64, (2, 2, 1, 140)), (256, (1, 4, 1, 140))], ids=["one-role", "shared-keys"]
)
def test_gradients_of_keys(head_dim: int, shape: tuple[int, int, int, int]) -> None:
    spec = configured(KernelSpec("backward", "sm_80", "bfloat16", head_dim, head_dim, **KEYS))  # pyright: ignore[reportArgumentType]
    assert spec.config.roles == (1 if head_dim == 64 else 2)
    emulated_dkdv_dq.check(spec, Sizes(2, 70, 140, 2, right=0, bias=shape))


@pytest.mark.slow
def test_the_barrier_orders_all_accesses_to_shared_memory() -> None:
    run = emulated_dkdv_dq.Run(*key("d64-holes", "sm_80"))
    for name in ("Preprocess", "DkdvDq", "Convert"):
        run.run(name)
    run.run("Dbias", schedule="random", finds_races=True)
    run.compare()
    with pytest.raises(Race):
        run.run("Dbias", schedule="random", finds_races=True, left_out={0})
