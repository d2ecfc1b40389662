# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The portable backward kernels without a GPU: their tilings fit every architecture, their PTX gives the gradients."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_backward
from emulated_backward import Sizes

from jax_fastattn.kernels.sm80.config import (
    DkdvConfig,
    DqConfig,
    SplitConfig,
    shared_memory_limit,
    split_config,
)
from jax_fastattn.kernels.spec import KernelSpec
from jax_fastattn.kernels.support import ARCHITECTURES


def _spec(
    head_dim: int, v_head_dim: int, dtype: str = "bfloat16", arch: str = "sm_80", **features: object
) -> KernelSpec:
    return KernelSpec("backward", arch, dtype, head_dim, v_head_dim, split=True, **features)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_head_dim_has_a_tiling(arch: str) -> None:
    limit = shared_memory_limit(arch)
    for head_dim in range(8, 257, 8):
        for v_head_dim in range(8, 257, 8):
            config = split_config(_spec(head_dim, v_head_dim, arch=arch))
            for role in (config.dq, config.dkdv):
                assert role.shared_memory(head_dim, v_head_dim) <= limit
            assert config.dkdv.queries % (16 * config.dkdv.column_warps) == 0


_ALL = {
    "group": 2,
    "window_left": True,
    "window_right": True,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
    "dlse": True,
}
# Every structure of `config.py`, every feature, widths that end inside an mma step or a warp's share of the columns.
_CASES = {
    "full-d64": (_spec(64, 64), Sizes(batch=1), None),
    "causal-d64": (_spec(64, 64, window_right=True), Sizes(batch=1, right=0, queries=201, keys=133), None),
    # NaN in keys past the last query reached dq by 0 * NaN.
    "more-keys-than-queries": (
        _spec(64, 64, window_right=True),
        Sizes(batch=1, right=0, queries=33, keys=127),
        None,
    ),
    "all-d128-f16": (
        _spec(128, 128, "float16", **_ALL),
        None,
        SplitConfig(DqConfig(32, 4, 32), DkdvConfig(32, 4, 2, 64)),
    ),
    "all-cap-d128-negative-scale": (
        _spec(128, 128, logits_soft_cap=True, **_ALL),
        Sizes(scale=-0.3),
        SplitConfig(DqConfig(16, 4, 64, rows_in_registers=True), DkdvConfig(16, 4, 1, 32)),
    ),
    "all-d128-single-stage": (
        _spec(128, 128, **_ALL),
        None,
        SplitConfig(DqConfig(16, 8, 64, stages=1), DkdvConfig(32, 2, 2, 64, stages=1)),
    ),
    "causal-d256": (
        _spec(256, 256, window_right=True, query_offset=True),
        Sizes(queries=70, keys=101, right=0),
        SplitConfig(DqConfig(16, 4, 16), DkdvConfig(32, 2, 4, 64)),
    ),
    "d192-128": (_spec(192, 128, window_left=True), Sizes(batch=1, queries=70, keys=101), None),
    "d8-248": (_spec(8, 248), Sizes(batch=1, queries=33, keys=47), None),
    "d72-40": (_spec(72, 40, group=3, dlse=True), Sizes(batch=1, queries=33, keys=47), None),
    "one-query": (_spec(64, 64, query_offset=True, window_right=True), Sizes(queries=1, right=0), None),
    "one-key": (_spec(64, 64, query_seq_lengths=True), Sizes(keys=1), None),
    "zero-scale": (_spec(64, 64), Sizes(batch=1, queries=40, keys=33, scale=0.0), None),
}


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "sizes", "config"), _CASES.values(), ids=_CASES.keys())
def test_gradients(spec: KernelSpec, sizes: Sizes | None, config: SplitConfig | None) -> None:
    emulated_backward.check(spec, sizes, config)
