# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The calls of published models: the mask arrays and ids spell what the flags say, and the XLA path runs them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from testing import combinations

from jax_fastattn.cases import models
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.models import BIASED, CALLS, DOCUMENTS, MODELS
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.reference import visible_pairs


def small(name: str, length: int = 64) -> Case:
    """A call with one key/value head and few rows, in float32."""
    return dataclasses.replace(models.cut(CALLS[name], length, 1), dtype="float32")


def pairs(case: Case) -> np.ndarray:
    """Which query sees which key, `[B, T, S]`."""
    case = dataclasses.replace(case, head_dim=1, v_head_dim=None, group=1)
    return np.asarray(visible_pairs(case.spec(), case.operands(jax.random.key(0)))[:, 0])


@pytest.mark.parametrize("name", [name for name in CALLS if "-mask" in name])
def test_masks_show_what_the_flags_show(name: str) -> None:
    base, _, kind = name.partition("-mask")
    flags = {"bert-large": "bert-large-padding", "pretraining": "pretraining-ids"}.get(base, base)
    found, expected = pairs(small(name)), pairs(small(flags))
    np.testing.assert_array_equal(found, expected)
    assert not found.all()
    case = CALLS[name]
    assert case.mask == (kind.strip("-") if base == "bert-large" else "bts")
    assert case.spec().bounds == ((None, 0) if kind == "-causal" else (None, None))


@pytest.mark.parametrize("name", [name for name in CALLS if name.endswith("-ids")])
def test_ids_separate_documents(name: str) -> None:
    case = small(name, 128)
    ids = np.asarray(case.operands(jax.random.key(0)).query_segment_ids)
    same = ids[:, :, None] == ids[:, None, :]
    plain = pairs(dataclasses.replace(case, documents=None))
    np.testing.assert_array_equal(pairs(case), same & plain)
    assert not same.all()


def test_documents_fill_their_rows() -> None:
    assert [sum(lengths) for lengths in DOCUMENTS] == [8192, 8192, 8192, 7560]
    ids = np.asarray(dataclasses.replace(CALLS["pretraining-ids"], head_dim=1).operands(jax.random.key(0))[9])
    assert (ids[:, 0] == 1).all() and (ids[3, 7560:] == 0).all() and ids[1].max() == 6


def test_packed_sequences_are_the_documents() -> None:
    case, ids = small("pretraining-packed", 256), small("pretraining-ids", 64)
    found = pairs(case)[0]
    for row, lengths in enumerate(ids.documents or ()):
        count = sum(lengths)
        first = sum(sum(x) for x in (ids.documents or ())[:row])
        block = found[first : first + count, first : first + count]
        np.testing.assert_array_equal(block, pairs(ids)[row][:count, :count])


# One of each sort.
COMPUTED = (
    "gemma2-9b-window-mask",
    "gpt-oss-20b-window-ids",
    "qwen2.5-7b-mask",
    "deepseek-v3-ids",
    "vit-l",
    "bert-large-mask-bs",
    "pretraining-mask-causal",
)


@pytest.mark.numbers
@pytest.mark.parametrize("name", COMPUTED)
def test_the_xla_path_runs_them(name: str) -> None:
    combinations.check(small(name, 40))


def first_entries(case: Case) -> Case:
    """A call of three entries of the batch, with its own lengths of keys."""
    lengths = case.key_value_seq_lengths
    spelled = case.spelled and first_entries(case.spelled)
    return dataclasses.replace(case, batch=3, spelled=spelled, key_value_seq_lengths=lengths and lengths[1:4])


@pytest.mark.numbers
@pytest.mark.parametrize("name", BIASED)
def test_the_xla_path_runs_those_with_a_bias(name: str) -> None:
    combinations.check(dataclasses.replace(first_entries(models.cut(BIASED[name], 40, 2)), dtype="float32"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_take_all(arch: str) -> None:
    assert not any(unsupported_reasons(case.problem(), arch) for case in CALLS.values())


def test_every_causal_layer_is_called_in_three_ways() -> None:
    layers = [case for cases in MODELS.values() for case in cases if case.is_causal]
    ways = [name for name in CALLS if not name.startswith(("bert", "vit", "pretraining"))]
    assert len(ways) == 3 * len(layers)
