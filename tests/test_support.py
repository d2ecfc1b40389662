# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`unsupported_reasons` is the one place that knows what the kernels take; docs/support.md is made from it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from jax_fastattn.kernels.sm90.backward_config import (
    BackwardConfig,
    BackwardMemory,
    DqMemory,
    backward_config,
    dq_config,
)
from jax_fastattn.kernels.spec import FUSED_HEAD_DIM, SHORT_LENGTH, KernelSpec, kernel_spec
from jax_fastattn.kernels.support import ARCHITECTURES, MAX_HEAD_DIM, describe_kernels, unsupported_reasons
from jax_fastattn.testing.cases import GPU_CASES, Case
from jax_fastattn.testing.support_table import support_table

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
BASE = Case(dtype="bfloat16", group=2)


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == support_table(), "run: python -m jax_fastattn.testing.support_table > docs/support.md"


def test_the_page_has_rows_of_both_kinds() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert any(row.endswith("yes |") for row in rows)
    assert any(row.endswith("no |") for row in rows)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_gpu_case_is_supported(arch: str) -> None:
    """Else the GPU suite would compare the XLA path with itself."""
    assert [str(case) for case in GPU_CASES if unsupported_reasons(case.problem(), arch)] == []


ALONE = {
    "dtype": ({"dtype": "float32"}, "the dtype is float32; the kernels take bfloat16 and float16"),
    "head-dim": ({"head_dim": 264, "v_head_dim": 64}, "`query` has head dim 264; at most 256"),
    "v-head-dim": ({"v_head_dim": 264}, "`value` has head dim 264; at most 256"),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_obstacle_is_one_reason(name: str) -> None:
    change, reason = ALONE[name]
    assert unsupported_reasons(dataclasses.replace(BASE, **change).problem(), "sm_90a") == [reason]


@pytest.mark.parametrize("arch", ["sm_75", "sm_100a", None])
def test_architecture(arch: str | None) -> None:
    (reason,) = unsupported_reasons(BASE.problem(), arch)
    assert reason == f"the GPU architecture is {arch}; the kernels run on {', '.join(ARCHITECTURES)}"


def test_all_reasons_come_together() -> None:
    case = dataclasses.replace(BASE, dtype="float32", head_dim=264, v_head_dim=272)
    assert len(unsupported_reasons(case.problem(), "sm_75")) == 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_dims", [(8, 8), (20, 24), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_tiles_are_described(arch: str, deterministic: bool, head_dims: tuple[int, int]) -> None:
    case = dataclasses.replace(BASE, head_dim=head_dims[0], v_head_dim=head_dims[1], deterministic=deterministic)
    case = dataclasses.replace(case, key_length=SHORT_LENGTH + 1)
    families, tiles = describe_kernels(case.problem(), arch)
    family = "sm90" if arch == "sm_90a" else "sm80"
    assert families == f"{family} forward, {family} backward"
    words = tiles.replace(",", "").split()
    fused = family == "sm90" and max(head_dims) <= FUSED_HEAD_DIM
    assert words[::2] == (["forward", "backward"] if fused else ["forward", "dq", "dkdv"])
    assert all(int(rows) > 0 and int(keys) > 0 for rows, keys in (tile.split("x") for tile in words[1::2]))


@pytest.mark.parametrize("cap", [False, True], ids=["", "soft-cap"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_hopper_backward_fits_for_every_head_dim(deterministic: bool, cap: bool) -> None:
    for head_dims in itertools.product(range(8, MAX_HEAD_DIM + 1, 8), repeat=2):
        spec = KernelSpec("backward", "sm_90a", "bfloat16", *head_dims, family="sm90", logits_soft_cap=cap)
        spec = dataclasses.replace(spec, deterministic=deterministic)
        assert BackwardMemory.of(spec, backward_config(spec)).fits
        dq = dq_config(spec)
        assert DqMemory.of(spec, dq).fits
        # V and K of a tile and the next V; with overlap the last K, both tiles of this step and of the next one.
        assert dq.slots >= (5 if dq.overlap else 3)


def test_wide_kernels_compute_no_dq() -> None:
    with pytest.raises(ValueError, match="a kernel of its own"):
        BackwardConfig(64, 2, dq_registers=72, wide=True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("sinks", ["n", None])
def test_both_passes_have_the_same_tanh(arch: str, sinks: str | None) -> None:
    """Else rows of P would not add up to 1; without a cap sinks compile no backward kernel of their own."""
    problem = dataclasses.replace(BASE, logits_soft_cap=50.0, sinks=sinks).problem()
    forward, backward = (kernel_spec(problem, op, arch) for op in ("forward", "backward"))
    assert forward.exact_cap == backward.exact_cap == (arch != "sm_90a" or sinks is not None)
    assert not kernel_spec(dataclasses.replace(BASE, sinks=sinks).problem(), "backward", arch).sinks


@pytest.mark.parametrize(("head_dim", "window", "cap", "length", "fused", "deterministic"), [
    (128, True, None, 640, False, False),
    (128, True, None, 641, True, False),
    (128, True, None, 1024, True, False),
    (128, True, None, 1100, True, True),
    (128, True, 50.0, 500, False, False),
    (128, True, 50.0, 600, True, True),
    (128, False, None, 500, False, False),
    (128, False, None, 600, True, True),
    (96, True, None, 640, False, False),
    (72, True, None, 641, True, False),
    (96, True, None, 768, True, False),
    (96, True, None, 769, True, True),
    (96, True, 50.0, 513, True, True),
    (96, False, None, 500, True, True),
    (64, True, None, 640, True, False),
    (64, True, None, 641, True, True),
    (64, True, 50.0, 500, True, True),
    (64, False, None, 500, True, True),
])  # fmt: skip
def test_short_problems_take_the_pair(
    head_dim: int, window: bool, cap: float | None, length: int, fused: bool, deterministic: bool
) -> None:
    """Whether a problem has the fused kernel, and where gradients are to be deterministic that with integers."""
    case = dataclasses.replace(BASE, head_dim=head_dim, v_head_dim=head_dim, is_causal=window, logits_soft_cap=cap)
    case = dataclasses.replace(case, query_length=length, key_length=length)
    spec = kernel_spec(case.problem(), "backward", "sm_90a")
    assert spec.fused == fused
    same = kernel_spec(dataclasses.replace(case, deterministic=True).problem(), "backward", "sm_90a")
    assert same.integers == deterministic
    # The pair always has the same bits, and is compiled once.
    assert (same == spec) == (not fused)


@pytest.mark.parametrize(("heads", "ordered", "deterministic", "longer"), [
    (92, False, False, False),
    (93, False, True, False),
    (98, False, True, False),
    (99, False, True, True),
    (105, False, True, True),
    (106, True, True, True),
    (132, True, True, True),
    (133, False, False, False),
    (185, False, True, False),
    (211, False, True, True),
    (212, True, True, True),
    (1188, True, True, True),
    (1189, True, True, True),
])  # fmt: skip
def test_a_cta_takes_whole_heads_where_they_fill_the_gpu(
    heads: int, ordered: bool, deterministic: bool, longer: bool
) -> None:
    """Whether it does at length 512; where gradients are to be deterministic, there and at length 640."""
    case = dataclasses.replace(BASE, batch=1, num_kv_heads=heads, group=1, is_causal=True, head_dim=64, v_head_dim=64)
    long = dataclasses.replace(case, query_length=600, key_length=640, deterministic=True)
    assert kernel_spec(long.problem(), "backward", "sm_90a").ordered == longer
    case = dataclasses.replace(case, query_length=500, key_length=512)
    spec, same = (
        kernel_spec(dataclasses.replace(case, deterministic=x).problem(), "backward", "sm_90a") for x in (False, True)
    )
    assert (spec.ordered, same.ordered) == (ordered, deterministic)
    # Sums that have one order need no integers, and no kernel of their own.
    assert not (same.ordered and same.deterministic)
    assert not (ordered and same != spec)
    assert not kernel_spec(case.problem(), "forward", "sm_90a").ordered
    assert not kernel_spec(case.problem(), "backward", "sm_80").ordered


@pytest.mark.parametrize(("head_dim", "is_causal", "cap", "longest", "deterministic"), [
    (64, True, None, 512, 640),
    (64, True, 50.0, 512, 640),
    (96, True, None, 512, 512),
    (96, True, 50.0, 512, 640),
    (128, True, 50.0, 256, 256),
    (64, False, None, 384, 384),
    (96, False, 50.0, 256, 256),
    (128, False, None, 128, 128),
    (192, True, None, 0, 0),
])  # fmt: skip
def test_whole_heads_are_short(
    head_dim: int, is_causal: bool, cap: float | None, longest: int, deterministic: int
) -> None:
    """Up to which length a CTA takes them, and where gradients are to be deterministic."""
    case = dataclasses.replace(BASE, batch=33, num_kv_heads=4, is_causal=is_causal, logits_soft_cap=cap)
    case = dataclasses.replace(case, head_dim=head_dim, v_head_dim=None)
    for same, limit in ((False, longest), (True, deterministic)):
        for lengths in ((limit, 1), (1, limit), (limit + 1, 1), (1, limit + 1)):
            longer = dataclasses.replace(case, deterministic=same, query_length=lengths[0], key_length=lengths[1])
            assert kernel_spec(longer.problem(), "backward", "sm_90a").ordered == (0 < max(lengths) <= limit)
