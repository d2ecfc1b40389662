# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Variants of kernels are compile keys: `benchmarks/tune.py` makes them from text and launches them. No GPU needed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest

from jax_fastattn.cases.case import Case
from jax_fastattn.compilation import cache
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.sm80.backward.config import DkdvDqConfig
from jax_fastattn.kernels.sm80.forward.config import ForwardConfig as PortableForwardConfig
from jax_fastattn.kernels.sm90.backward.config import BackwardConfig, BackwardConfigs
from jax_fastattn.kernels.sm90.backward.dq_config import DqConfig
from jax_fastattn.kernels.sm90.forward.config import ForwardConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import tune

CASE = Case(dtype="bfloat16", query_length=129, key_length=193, num_kv_heads=3, group=2, head_dim=64, v_head_dim=64)
WIDE = dataclasses.replace(CASE, head_dim=192, v_head_dim=128)
# Pass, architecture, case, text, config. The kernel for dq keeps its config.
ROWS = {
    "sm90-forward": ("forward", "sm_90a", CASE, "2, 64, 5, persistent=True", ForwardConfig(2, 64, 5, persistent=True)),
    "sm90-backward": ("backward", "sm_90a", CASE, "64, 2, 72", BackwardConfigs(BackwardConfig(64, 2, dq_registers=72))),
    "sm90-dkdv": (
        "backward",
        "sm_90a",
        WIDE,
        "64, 2",
        BackwardConfigs(BackwardConfig(64, 2), DqConfig(64, 6, overlap=True)),
    ),
    "sm80-forward": ("forward", "sm_80", CASE, "16, warps=8, keys=48", PortableForwardConfig(16, 8, 48)),
    "sm80-backward": ("backward", "sm_80", CASE, "4, 1, 32, stages=1", DkdvDqConfig(4, 1, 32, stages=1)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_variant_is_lowered_with_its_own_kernel(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel of the table follows in the same process."""
    op: Any
    op, arch, case, text, config = ROWS[name]
    calls.lower_for_cuda(monkeypatch, tmp_path, arch)
    table = kernel_spec(case.problem(), op, arch)
    variant = tune.variant(table, text)
    assert variant.config == config != table.config
    assert dataclasses.replace(variant, config=table.config) == table
    operands, (dout, _) = case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    arrays: tuple[Any, ...] = (operands,)
    if op == "backward":
        arrays = operands, dout, jnp.zeros(dout.shape[:3]), dout
    for mine, other in ((variant, table), (table, variant)):
        lowered = calls.cuda_text(tune.launch(mine, case.spec()), *arrays)
        assert lowered.count("stablehlo.custom_call") == 1
        assert cache.kernel_key(mine) in lowered and cache.kernel_key(other) not in lowered


def test_the_table_is_a_variant() -> None:
    key = kernel_spec(CASE.problem(), "forward", "sm_90a")
    assert tune.variant(key, "table") is key


def test_dq_is_not_added_in_order_if_it_has_a_kernel_of_its_own() -> None:
    key = kernel_spec(dataclasses.replace(CASE, deterministic=True).problem(), "backward", "sm_90a")
    variant = tune.variant(key, "64, 2")
    assert key.ordered and not variant.ordered and variant.config.dq is not None


@pytest.mark.parametrize("text", ["print(1)", "1) + config(2", "2, keys=open", "*[2]", "2; 3"])
def test_variants_are_no_code(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        tune.parse_config(ForwardConfig, text)
