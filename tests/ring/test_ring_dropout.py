# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a ring with dropout begin: kernels take blocks of whole words alone, or say why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jax_fastattn import dropout
from jax_fastattn.kernels.support import WORD_ROWS, unsupported_reasons
from jax_fastattn.ops.ring import helping, plan
from jax_fastattn.ops.ring.blocks import BlockPlace, block_call
from jax_fastattn.spec import AttentionSpec, Operands, Problem, Ring

SIZE = 4


def make_call(rows: int, layout: Any, **options: Any) -> tuple[AttentionSpec, Operands]:
    """A share of a call, of zeros."""
    x = jnp.zeros((1, rows, 1, 64), jnp.bfloat16)
    operands = Operands(x, x, x, dropout=dropout.numbers(jnp.zeros(2, jnp.uint32), 0.5, 1, 1))
    ring = Ring(("seq",), SIZE, layout=layout, balance=layout == "contiguous")
    return AttentionSpec(1.0, present=operands.present(), ring=ring, **options), operands


def find_blocks(spec: AttentionSpec, operands: Operands) -> list[tuple[plan.Block, int, int, int]]:
    """Blocks of all devices, with the device of the queries, the device of the keys, and the first key fetched."""
    assert spec.ring is not None
    rows = operands.query.shape[1]
    if helping.balances(spec, operands):
        found = [(block, device, device, 0) for block in helping.own_blocks(rows) for device in range(SIZE)]
        steps = helping.steps(spec.ring, rows)
        return found + [
            (step.block, device, (device - step.shift) % SIZE, 0) for step in steps for device in range(SIZE)
        ]
    return [
        (block, device, (device - step.shift) % SIZE, step.fetched[0])
        for step in plan.steps(spec, operands)
        for block in step.blocks
        for device in range(SIZE)
    ]


@pytest.mark.parametrize("rows", [40, 48, 64, 160])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [None, (37, 5)], ids=["causal", "window"])
def test_blocks_begin_with_words_or_take_the_xla_path(rows: int, layout: Any, window: Any) -> None:
    options = {"is_causal": True} if window is None else {"window": window}
    spec, operands = make_call(rows, layout, **options)
    kinds = set()
    for block, device, source, first_key in find_blocks(spec, operands):
        taken = operands._replace(key=operands.key[:, : block.keys.stop], value=operands.value[:, : block.keys.stop])
        place = BlockPlace(jnp.int32(device), jnp.int32(source), rows, rows, first_key)
        found_spec, found = block_call(spec, taken, block, place)
        assert found.dropout is not None
        first = [int(x) for x in found.dropout[0, 0, dropout.FIRST_QUERY : dropout.FIRST_KEY + 1]]
        reasons = {reason.kind for reason in unsupported_reasons(Problem.of(found_spec, found), "sm_80")}
        kinds.add(not reasons)
        assert reasons <= {"dropout"}
        if not reasons:
            assert not any(x % WORD_ROWS for x in first), (block, first)
    # Chunks of zigzag order have half of a device's rows.
    assert kinds == {rows % (2 * WORD_ROWS if layout == "zigzag" else WORD_ROWS) == 0}


def test_a_share_of_the_queries_of_all_keys_may_begin_anywhere() -> None:
    """A backward pass whose rows are whole is still a block."""
    spec, operands = make_call(40, "contiguous")
    assert spec.ring is not None
    spec = dataclasses.replace(spec, ring=dataclasses.replace(spec.ring, whole_keys=True, balance=False))
    (step,) = plan.steps(spec, operands)
    place = BlockPlace(jnp.int32(1), jnp.int32(0), 40, 40, 0)
    found_spec, found = block_call(spec, operands, step.blocks[0], place)
    reasons = unsupported_reasons(Problem.of(found_spec, found), "sm_80")
    assert [reason.text for reason in reasons] == [
        "a block of a ring has 40 queries and 40 keys; with dropout the kernels take multiples of 16"
    ]
