# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The bits of a row do not depend on the other sequences of its batch, without a GPU: whole launches in an emulator."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_decode
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


def alone(b: int, sizes: Sizes = SIZES) -> Sizes:
    """The sizes of one batch entry."""
    return dataclasses.replace(
        sizes,
        batch=1,
        query_lengths=sizes.query_lengths[b : b + 1],
        key_lengths=sizes.key_lengths[b : b + 1],
        offsets=sizes.offsets[b : b + 1],
    )


@pytest.mark.slow
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


def few_queries(family: Family, page: int = 0, queries: int = 1) -> tuple[KernelSpec, Sizes]:
    """The compile key of a deterministic call of few queries, with portions of two tiles, and ragged lengths."""
    causal = {"window_right": True, "query_offset": True, "key_value_seq_lengths": True}
    spec = KernelSpec("decode", ARCH[family], "bfloat16", 128, 128, family=family, group=2, page=page, **causal)
    spec = configured(spec)
    assert spec.config.keys == 64
    # Two portions, one tile, and a key after a portion, which the first of three queries does not see.
    lengths, offsets = (200, 64, 130), (200 - queries, 64 - queries, 130 - queries)
    sizes = Sizes(3, queries, 208, kv_heads=2, right=0, key_lengths=lengths, offsets=offsets)
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, portion=2)), sizes


@pytest.mark.slow
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("family", FORWARD)
def test_few_queries_of_a_batch_entry_have_the_bits_that_they_have_alone(family: Family, page: int) -> None:
    """On another number of SMs, whose shares begin within other portions; and those of pages have the dense bits."""
    spec, sizes = few_queries(family, page)
    arrays, _ = draw_operands(spec, sizes)
    together = emulated_decode.run(spec, sizes, arrays, multiprocessors=6, side_heads=2)
    dense = dataclasses.replace(spec, page=0)
    for b in (0, 2):
        found = emulated_decode.run(dense, alone(b, sizes), entry(arrays, b), multiprocessors=3)
        for name, x in together.items():
            np.testing.assert_array_equal(found[name], x[b : b + 1], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", FORWARD)
def test_queries_have_the_bits_that_they_have_one_at_a_time(family: Family) -> None:
    """As proposed tokens have that are checked at once. The first one sees one portion, and its log-sum-exp is rounded
    once more where the others see two.
    """
    spec, sizes = few_queries(family, queries=3)
    arrays, _ = draw_operands(spec, sizes)
    arrays, sizes = entry(arrays, 2), alone(2, sizes)
    together = emulated_decode.run(spec, sizes, arrays)
    for i in range(3):
        place = {"key_value_seq_lengths": np.array([128 + i], np.int32), "query_offset": np.array([127 + i], np.int32)}
        step = arrays | place | {"query": arrays["query"][:, i : i + 1]}
        found = emulated_decode.run(spec, dataclasses.replace(sizes, queries=1), step)
        np.testing.assert_array_equal(found["out"], together["out"][:, i : i + 1])
        np.testing.assert_allclose(found["lse"], together["lse"][:, i : i + 1], rtol=0 if i else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "start"), [("sm90", 64), ("sm80", 128)])
def test_a_chunk_of_a_prefill_has_the_bits_of_the_whole_one(family: Family, start: int) -> None:
    """It begins at a tile of queries, since rows of a warp rescale together. The arrays of keys are equally long."""
    spec = configured(key("forward", family, window_right=True), short=True)
    chunk = configured(key("forward", family, window_right=True, query_offset=True), short=True)
    assert spec.config == chunk.config and start % spec.config.rows == 0
    sizes = dataclasses.replace(SIZES, batch=1, keys=133, kv_heads=1)
    arrays, _ = draw_operands(spec, sizes)
    whole = FORWARD[family](spec, sizes, arrays)
    rest = {"query": arrays["query"][:, start:], "query_offset": np.array([start], np.int32)}
    found = FORWARD[family](chunk, dataclasses.replace(sizes, queries=133 - start), arrays | rest)
    for name, x in whole.items():
        np.testing.assert_array_equal(found[name], x[:, start:], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", FORWARD)
def test_a_packed_sequence_has_the_bits_that_it_has_at_another_place(family: Family) -> None:
    spec = key("forward", family, window_right=True, packed=True)
    sizes = Sizes(kv_heads=2, right=0)
    pack = Pack((37, 133, 70), (37, 133, 70), sizes=sizes)
    arrays, _ = emulated_packed.draw(spec, pack)
    rows = [slice(pack.padding[side][0] + 37, pack.padding[side][0] + 170) for side in (0, 1)]
    # Rows of a warp rescale together, so rows of a neighbor in the same tile must not make them do it.
    arrays["query"][:, rows[0].stop : rows[0].stop + 70] *= 64
    together = emulated_packed.run_forward(spec, pack, arrays)
    sides = {"query": 0, "key": 1, "value": 1}
    by_itself = Pack((133,), (133,), padding=((0, 0), (0, 0)), sizes=sizes)
    found = emulated_packed.run_forward(spec, by_itself, {x: arrays[x][:, rows[side]] for x, side in sides.items()})
    for name, x in together.items():
        np.testing.assert_array_equal(found[name], x[:, rows[0]], err_msg=name)
