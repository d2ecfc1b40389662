# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply float32 by three bfloat16 products, in the emulator: every kernel, and the size of errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_dkdv_dq
import emulated_forward
import split_model
from emulated_backward import BOUNDED, Sizes, draw_operands
from emulated_dkdv_dq import Run

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.architectures import ARCHITECTURES, BORROWED, shared_memory_limit
from jax_fastattn.kernels.arguments.precision import NARROW_HEAD_DIM
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward import products
from jax_fastattn.kernels.support import MAX_HEAD_DIM


def _spec(op: Any, head_dim: int, v_head_dim: int, arch: str = "sm_80", **features: Any) -> KernelSpec:
    return configured(KernelSpec(op, arch, "bfloat16", head_dim, v_head_dim, products="bf16x3", **features))


_ALL = {**BOUNDED, "group": 2}
_SMALL = Sizes(batch=1, queries=40, keys=70)
_BIAS = Sizes(batch=1, queries=40, keys=70, bias=(1, 1, 40, 70))
_LENGTHS = Sizes(2, 40, 70, offsets=(-10, 25), query_lengths=(40, 30), key_lengths=(70, 50))


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("arch", ARCHITECTURES + BORROWED)
def test_every_head_dim_has_a_tiling(arch: str, op: str) -> None:
    """Two warps at most share the columns of a term, which are a multiple of 32."""
    limit = shared_memory_limit(arch)
    widest = MAX_HEAD_DIM if limit > 100 << 10 else NARROW_HEAD_DIM
    for head_dim in range(32, widest + 1, 32):
        for v_head_dim in range(32, widest + 1, 32):
            spec = _spec(op, head_dim, v_head_dim, arch)
            config = spec.config
            assert config.shared_memory(*spec.row_columns) <= limit
            if op == "backward":
                assert config.column_warps == 1 and config.dq_column_warps <= 2
                assert config.part % 16 == 0 and config.queries % (16 * config.dq_row_warps) == 0
                # A warp has 255 registers: its sums, and S^T or dP^T of a stage.
                sums = [config.keys_per_warp * x // 32 for x in (head_dim, v_head_dim)]
                assert (sum(sums) if config.roles == 1 else max(sums)) + config.keys_per_warp * config.part // 32 <= 192


FORWARD = {
    "d32-everything": (_spec("forward", 32, 32, **_ALL), _LENGTHS),
    "d96-128": (_spec("forward", 96, 128, "sm_86", window_right=True), _SMALL),
    "d128": (_spec("forward", 128, 128), _SMALL),
    "d256": (_spec("forward", 256, 256), _SMALL),
    "d256-hopper": (_spec("forward", 256, 192, "sm_90a", features=(codes.EXACT_SOFT_CAP,)), _SMALL),
    "negative-scale": (_spec("forward", 32, 64, features=(codes.SINKS,)), Sizes(1, 40, 70, scale=-0.3)),
}
BACKWARD = {
    "d32-everything": (_spec("backward", 32, 32, dlse=True, **_ALL), _LENGTHS),
    "d64-96": (_spec("backward", 64, 96, "sm_86", window_right=True), _SMALL),
    "d128": (_spec("backward", 128, 128, ordered=True), _SMALL),
    "d128-hopper-everything": (_spec("backward", 128, 128, "sm_90a", dlse=True, **_ALL), _LENGTHS),
    "d256": (_spec("backward", 256, 256, window_right=True), _SMALL),
    "d160-narrow": (_spec("backward", 160, 160, "sm_86", features=(codes.EXACT_SOFT_CAP,)), _SMALL),
    "d192-hopper": (_spec("backward", 192, 192, "sm_90a"), _SMALL),
    "sinks": (_spec("backward", 32, 64, dsinks=True), _SMALL),
    "bias": (_spec("backward", 96, 32, bias="matrix", bias_dtype="float32", dbias=True), _BIAS),
    "narrow-bias": (_spec("backward", 32, 32, "sm_86", bias="matrix", bias_dtype="float32", dbias=True), _BIAS),
}
# These run at every commit: each pass once, in the backward pass with one role and with two.
_UNMARKED = ("d32-everything", "d64-96")


def _cases(cases: dict[str, tuple[KernelSpec, Sizes]]) -> list[Any]:
    return [pytest.param(x, marks=() if x in _UNMARKED else pytest.mark.slow) for x in cases]


@pytest.mark.parametrize("case", _cases(FORWARD))
def test_forward(case: str) -> None:
    emulated_forward.check(*FORWARD[case])


@pytest.mark.parametrize("case", _cases(BACKWARD))
def test_backward(case: str) -> None:
    emulated_dkdv_dq.check(*BACKWARD[case])


@pytest.mark.parametrize("case", _cases({"d32-everything": None, "d128-hopper-everything": None, "d64-96": None}))
def test_backward_adds_parts_of_the_queries_in_global_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here after each tile of queries; rows past the last key stay zero."""
    spec, sizes = BACKWARD[case]
    monkeypatch.setattr(products, "SUMMED_QUERIES", spec.config.queries)
    queries = 2 * spec.config.queries + 5
    emulated_dkdv_dq.check(spec, replace(sizes, queries=queries, query_lengths=(queries, 30)))


def test_delta_is_of_the_cotangent_that_products_have() -> None:
    """Else rows of dS do not add up to 0, which shows where values have a large mean."""
    emulated_dkdv_dq.check(_spec("backward", 32, 32), Sizes(batch=1, queries=40, keys=70, value_mean=256.0))


def test_errors_are_as_small_as_jax_nn_has_them() -> None:
    """With the preset BF16_BF16_F32_X3, by a model of it."""
    sizes = Sizes(batch=1, queries=40, keys=70)
    spec = _spec("backward", 32, 32)
    arrays, exact = draw_operands(spec, sizes)
    run = Run(spec, sizes)
    for name in ("Preprocess", "DkdvDq", "Convert"):
        run.run(name)
    found = {name: run.read(name) for name in ("dq", "dk", "dv")}
    found |= emulated_forward.run(_spec("forward", 32, 32), sizes, arrays)
    model = split_model.attention(sizes.scale, *(arrays[name][0, :, 0] for name in ("query", "key", "value", "dout")))
    of_head = {name: exact[name][0, :, 0] for name in found}
    split_model.assert_as_small({name: x[0, :, 0] for name, x in found.items()}, model, of_head)
