# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The bits of a row do not depend on the other sequences of its batch, without a GPU: whole launches in an emulator."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_forward
import emulated_hopper
import emulated_packed
from emulated_backward import Sizes, draw_operands
from emulated_packed import Pack

from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec

SIZES = Sizes(batch=3, queries=133, keys=201, kv_heads=2, right=0)
FORWARD = {"sm90": emulated_hopper.run_forward, "sm80": emulated_forward.run}
Family = Literal["sm80", "sm90"]
ARCH: dict[Family, str] = {"sm90": "sm_90a", "sm80": "sm_80"}
BOUNDS = {"key_value_seq_lengths": True, "window_right": True}


def key(op: Literal["forward", "backward"], family: Family, **features: bool) -> KernelSpec:
    """The compile key of a family's kernel."""
    return configured(KernelSpec(op, ARCH[family], "bfloat16", 64, 64, family=family, group=2, **features))


def entry(arrays: dict[str, np.ndarray], b: int) -> dict[str, np.ndarray]:
    """The operands of one batch entry."""
    return {name: x[b : b + 1] if x.shape[0] == SIZES.batch else x for name, x in arrays.items()}


def alone(b: int) -> Sizes:
    """The sizes of one batch entry."""
    return dataclasses.replace(
        SIZES,
        batch=1,
        query_lengths=SIZES.query_lengths[b : b + 1],
        key_lengths=SIZES.key_lengths[b : b + 1],
        offsets=SIZES.offsets[b : b + 1],
    )


@pytest.mark.parametrize("family", FORWARD)
def test_a_batch_entry_has_the_bits_that_it_has_alone(family: Family) -> None:
    spec = key("forward", family, **BOUNDS)
    arrays, _ = draw_operands(spec, SIZES)
    together = FORWARD[family](spec, SIZES, arrays)
    found = FORWARD[family](spec, alone(2), entry(arrays, 2))
    for name, x in together.items():
        np.testing.assert_array_equal(found[name], x[2:3], err_msg=name)


def test_gradients_of_a_batch_entry_in_a_fixed_order_have_the_bits_that_they_have_alone() -> None:
    spec = key("backward", "sm90", ordered=True, **BOUNDS)
    arrays, _ = draw_operands(spec, SIZES)
    together = emulated_hopper.run_backward(spec, SIZES, arrays)
    found = emulated_hopper.run_backward(spec, alone(2), entry(arrays, 2))
    for name, x in together.items():
        np.testing.assert_array_equal(found[name], x[2:3], err_msg=name)


@pytest.mark.parametrize("family", FORWARD)
def test_a_packed_sequence_has_the_bits_that_it_has_at_another_place(family: Family) -> None:
    spec = key("forward", family, window_right=True, packed=True)
    sizes = Sizes(kv_heads=2, right=0)
    pack = Pack((37, 133, 70), (37, 133, 70), sizes=sizes)
    arrays, _ = emulated_packed.draw(spec, pack)
    together = emulated_packed.run_forward(spec, pack, arrays)
    rows = [slice(pack.padding[side][0] + 37, pack.padding[side][0] + 170) for side in (0, 1)]
    sides = {"query": 0, "key": 1, "value": 1}
    by_itself = Pack((133,), (133,), padding=((0, 0), (0, 0)), sizes=sizes)
    found = emulated_packed.run_forward(spec, by_itself, {x: arrays[x][:, rows[side]] for x, side in sides.items()})
    for name, x in together.items():
        np.testing.assert_array_equal(found[name], x[:, rows[0]], err_msg=name)
