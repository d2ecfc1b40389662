# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The table of operands in `spec.py`: what other modules derive from it, and that operands are as it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import compare

from jax_fastattn.canonical import batched, packed
from jax_fastattn.cases.case import Case
from jax_fastattn.ops import batching
from jax_fastattn.spec import DIFFERENTIABLE, KEPT_LISTS, OPERANDS, PLANES, QKV, AttentionSpec, Operands

KINDS = ("head", "query", "key", "distance", "table")
PACKED = Case(batch=1, query_length=50, key_length=70, packed=((17, 30), (40, 25)), sinks="n", scale_is_array=True)
CASES = {
    "everything": calls.EVERYTHING,
    "broadcast": dataclasses.replace(calls.EVERYTHING, bias="", mask="t"),
    "a mask with rows for key/value heads": dataclasses.replace(calls.EVERYTHING, mask="bks"),
    "plain": Case(dtype="bfloat16", query_length=5, key_length=7, head_dim=8, scale_is_array=True),
    "packed": PACKED,
    "packed with offsets": dataclasses.replace(PACKED, query_offset="bottom_right", num_kv_heads=5, group=2),
}


def test_the_table_has_each_operand_once_and_in_order() -> None:
    assert tuple(OPERANDS) == Operands._fields


def test_what_is_derived_from_the_table() -> None:
    assert QKV == AttentionSpec(1.0).present == ("query", "key", "value")
    numbers = [f"{kind}_numbers" for kind in KINDS]
    integers = [f"{kind}_integers" for kind in KINDS]
    assert (*numbers, *integers) == PLANES
    assert ("query", "key", "value", "bias", "sinks", "scale", *numbers) == DIFFERENTIABLE
    assert compare.Results._fields == ("out", "lse", *(f"d{name}" for name in DIFFERENTIABLE))
    assert compare.Results(1, 2) == (1, 2, *[None] * 11)
    broadcast = [name for name, axes in zip(OPERANDS, batching.axes_of(tuple(OPERANDS)), strict=True) if axes[0] == "b"]
    assert broadcast == ["bias", "mask", "sinks", "scale", "dropout", *PLANES]
    assert [name for name in broadcast if name not in DIFFERENTIABLE] == ["mask", "dropout", *integers]
    heads = {"query": 2, "bias": 1, "mask": 1, "sinks": 1, "dropout": 1, "row_means": 2, "out_rests": 2}
    assert heads | dict.fromkeys(PLANES, 1) == batching.HEAD_AXIS
    assert [name for name, x in OPERANDS.items() if "n" in x.axes] == ["bias", "mask", "dropout", *PLANES]
    assert [name for name, x in OPERANDS.items() if x.per_kv_head] == ["bias", "mask"]


def test_letters_of_the_axes() -> None:
    letters = ["BTNH", "BSKH", "BSKD", "BNTS", "BNTS", "B", "B", "B", "BT", "BS", "BN", "BN", "BMR", "BNW"]
    letters += ["BNP", "BNPT", "BNPS", "BNPU", "BNC"] * 2
    letters += ["L"] * len(KEPT_LISTS) + ["BTN", "BTND"]
    assert [x.letters for x in OPERANDS.values()] == letters


@pytest.mark.parametrize("name", CASES)
def test_operands_are_as_the_table_says(name: str) -> None:
    case = CASES[name]
    given, found = case.operands(jax.random.key(0)), canonicalized(case)
    assert found.present() == given.present() == case.spec().present
    for operand in found.present():
        check(operand, getattr(found, operand), case)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (given, found, case._avals())]
    assert shapes[0] == shapes[1] == shapes[2]


def canonicalized(case: Case) -> Operands:
    """The operands of a call of the public function."""
    spec, operands = case.spec(), case.operands(jax.random.key(0))
    arrays: dict[str, Any] = calls.arrays_of(operands)
    options = calls.options_of(spec)
    if case.packed is None:
        return batched.canonicalize(**arrays, **options)[1]
    del arrays["sequences"]
    arrays |= {name: arrays[name][0] for name in QKV}
    boundaries = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.boundaries(), strict=True))
    return packed.canonicalize(**arrays, **boundaries, **options, query_offset=case.query_offset or 0)[1]


def check(name: str, x: jax.Array, case: Case) -> None:
    """Asserts that axes and dtype of an operand are those of the table."""
    known = OPERANDS[name]
    kinds = {"float": jnp.floating, "integer": jnp.integer}
    dtypes = {"query": case.dtype, "logits": np.promote_types(case.dtype, np.float32)}
    expected = dtypes.get(known.dtype, known.dtype)
    assert jnp.issubdtype(x.dtype, kinds[expected]) if expected in kinds else x.dtype == expected
    for axis, size in zip(known.axes, x.shape, strict=True):
        whole = {"R": 4 if case.query_offset is None else 5, "M": 4, "1": 1}.get(axis) or case.shape[axis.upper()]
        shared = {1} if axis.islower() else set()
        heads = {case.num_kv_heads} if known.per_kv_head and axis == "n" else set()
        assert size in {whole} | shared | heads, (name, axis, size)
