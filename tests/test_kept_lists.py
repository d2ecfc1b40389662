# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Lists of tiles that a call takes from an earlier one. Programs are lowered for CUDA; none runs.

`tests/kernels/masks/test_masks_ops.py` compares what the kernels compute from kept lists and from their own.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.choose import kernel_spec, prepass_configs
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda import prepass
from jax_fastattn.ops.cuda.prepass import TileLists
from jax_fastattn.spec import AttentionSpec, Operands, Problem

CASE = Case("bfloat16", 2, 130, 200, 2, 2, 64, mask="bts", is_causal=True)


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)


def make_lists(spec: AttentionSpec, op: Any, operands: Operands) -> list[TileLists]:
    kernel = kernel_spec(Problem.of(spec, operands), op, "sm_90a")
    return [prepass.tile_lists(spec, operands, config) for config in prepass_configs(kernel)]


def both_passes(spec: AttentionSpec, operands: Operands, kept: list[TileLists]) -> Any:
    out, lse = cuda.forward(spec, operands, kept=kept)
    return cuda.backward(spec, operands, out, lse, out, None, kept=kept).query


def calls_of(case: Case, kept: list[TileLists]) -> int:
    """Returns how many custom calls both passes make."""
    operands = jax.eval_shape(case.operands, jax.random.key(0))
    return calls.count_launches(calls.cuda_text(functools.partial(both_passes, case.spec()), operands, kept))


def kept_lists(case: Case) -> dict[str, list[TileLists]]:
    """Returns those of each pass, as they leave a jitted function."""
    operands = jax.eval_shape(case.operands, jax.random.key(0))
    return {
        op: jax.eval_shape(jax.jit(functools.partial(make_lists, case.spec(), op)), operands)
        for op in ("forward", "backward")
    }


@pytest.mark.parametrize("head_dim", [64, 192])
def test_kept_lists_spare_a_call_its_prepasses(head_dim: int) -> None:
    """Over head dim 128 the backward pass has two kernels, with lists of their own."""
    case = dataclasses.replace(CASE, head_dim=head_dim)
    kept = kept_lists(case)
    prepasses = {"forward": 1, "backward": 1 if head_dim == 64 else 2}
    assert {op: len(lists) for op, lists in kept.items()} == prepasses
    every = 2 + sum(prepasses.values())
    assert calls_of(case, []) == every
    assert calls_of(case, [*kept["forward"], *kept["backward"]]) == 2
    assert calls_of(case, kept["backward"]) == every - prepasses["backward"]


def test_lists_for_other_tiles_are_left() -> None:
    (lists,) = kept_lists(CASE)["forward"]
    other = dataclasses.replace(lists.config, keys=lists.config.keys * 2)
    assert calls_of(CASE, [dataclasses.replace(lists, config=other)]) == 4


def test_lists_of_a_call_with_other_sizes_are_refused() -> None:
    kept = kept_lists(dataclasses.replace(CASE, key_length=300))["forward"]
    with pytest.raises(ValueError, match=r"the kept lists for tiles of \d+ queries and \d+ keys have the shapes"):
        calls_of(CASE, kept)
    per_head = kept_lists(dataclasses.replace(CASE, mask="bnts"))["forward"]
    with pytest.raises(ValueError, match=r"Keep the lists of a call with the same sizes"):
        calls_of(CASE, per_head)


def test_they_are_frozen_and_name_their_tiles() -> None:
    (lists,) = kept_lists(CASE)["backward"]
    assert isinstance(lists, TileLists) and lists.config.transposed
    assert (lists.config.rows, lists.config.keys) == (128, 128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lists.lists = jnp.zeros(1)  # pyright: ignore[reportAttributeAccessIssue]
