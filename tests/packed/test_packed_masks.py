# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences with a mask function as calls without sequences; emulators run them in `test_mask_mods.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention_varlen, target_arch
from jax_fastattn.canonical import packed
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.layouts import packed_masks
from jax_fastattn.reference import visible_pairs
from jax_fastattn.spec import AttentionSpec, Operands, Problem

T, S, N, H = 50, 61, 2, 64
STARTS = {"cu_seqlens_q": jnp.array([3, 20, 20, 45]), "cu_seqlens_k": jnp.array([0, 17, 30, 58])}
WIDTHS = jnp.array([4, 9, 30])
OFFSET = jnp.array([5, 0, -7])


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    """It reads planes of queries and of keys, which sequences and rows make."""
    return (jnp.abs(q - k) <= WIDTHS[b]) & ((q + k + h) % 5 != 0)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def call(**options: Any) -> tuple[AttentionSpec, Operands]:
    query, key = (jnp.zeros((length, N, H), jnp.bfloat16) for length in (T, S))
    return packed.canonicalize(query, key, key, **STARTS, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "query_offset": OFFSET},
        {"local_window_size": (6, 3), "query_offset": "bottom_right"},
        {"local_window_size": (8, None), "query_offset": jnp.array([1 << 30, 0, -(1 << 30)])},
        {"is_causal": True, "score_mod": lambda s, b, h, q, k: s * (q // 3 + h)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("mask_mod", [near, lambda b, h, q, k: q != k], ids=["near", "positions"])
def test_a_query_sees_the_same_keys(mask_mod: Any, options: dict[str, Any]) -> None:
    spec, operands = call(mask_mod=mask_mod, **options)
    rows_spec, rows = packed_masks.by_rows(spec, operands)
    assert rows_spec.present == rows.present() and rows.sequences is None and rows_spec.bounds == (None, None)
    expected = np.asarray(visible_pairs(spec, operands))
    assert 0 < expected.sum() < expected.size / 2
    np.testing.assert_array_equal(visible_pairs(rows_spec, rows), expected)
    # A batch of two packs, of which one has other sequences.
    assert operands.sequences is not None
    others = operands._replace(sequences=operands.sequences.at[:, 2, 0].set(9))
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), operands, others)
    found = visible_pairs(*packed_masks.by_rows(spec, both))
    np.testing.assert_array_equal(found, visible_pairs(spec, both))
    assert (found[0] != found[1]).any()
    # The sizes alone say the same, except that planes may be for all heads next to a `score_mod`.
    wanted, problem = Problem.of(rows_spec, rows), packed_masks.problem_by_rows(Problem.of(spec, operands))
    if "score_mod" in options:
        assert problem.mask_mod_shape == (1, N)
        wanted = dataclasses.replace(wanted, mask_mod_shape=(1, N))
    assert problem == wanted and packed_masks.problem_by_rows(wanted) == wanted


NUMBERS = jnp.asarray(np.random.default_rng(0).standard_normal((T + S, N)), jnp.float32)
COLUMNS = jnp.asarray(np.random.default_rng(1).standard_normal((3, S)), jnp.float32)


def of_distances(b: Any, h: Any, q: Any, k: Any) -> Any:
    """It reads floats of distances and of a sequence's keys, a logarithm of distances, and positions."""
    near = (NUMBERS[k - q + T, h] < 0.6) & (jnp.log1p(jnp.abs(q - k)) < 3) & (COLUMNS[b, k] < 1.2)
    return near & (q - k < WIDTHS[b]) & ((q + 2 * k) % 5 != 0)


def shown(mask_mod: Any, bounds: tuple[int, int], offsets: Any) -> np.ndarray:
    """Returns which pairs of the packed arrays a function shows, pair by pair."""
    found = np.zeros((N, T, S), bool)
    starts, starts_k = (np.asarray(x) for x in STARTS.values())
    for b, offset in enumerate(offsets):
        rows, keys = starts[b + 1] - starts[b], starts_k[b + 1] - starts_k[b]
        h, q, k = np.ogrid[:N, :rows, :keys]
        at = np.broadcast_arrays(np.int32(b), h, q, k)
        seen = jnp.vectorize(mask_mod)(*(jnp.asarray(x, jnp.int32) for x in at)) if rows and keys else True
        seen = seen & (k - q <= offset + bounds[1]) & (k - q >= offset - bounds[0])
        found[:, starts[b] : starts[b + 1], starts_k[b] : starts_k[b + 1]] = seen
    return found


@pytest.mark.parametrize("name", ["causal", "offsets", "scores"])
def test_a_query_sees_the_same_keys_in_aligned_rows(name: str) -> None:
    """Sequences begin at the same row on both sides, so that a distance inside of them is one of rows."""
    options: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "offsets": {"local_window_size": (9, 20), "query_offset": OFFSET},
        "scores": {"is_causal": True, "score_mod": lambda s, b, h, q, k: s + NUMBERS[k - q + T, h] + q // 3},
    }
    mask_mod = near if name == "scores" else of_distances
    spec, operands = call(mask_mod=mask_mod, **options[name])
    bounds = (9, 20) if name == "offsets" else (T, 0)
    expected = shown(mask_mod, bounds, OFFSET if name == "offsets" else [0] * 3)
    assert 0 < expected.sum() < expected.size / 4
    np.testing.assert_array_equal(visible_pairs(spec, operands)[0], expected)
    aligned = packed_masks.RowsCall.of(spec, operands)
    assert aligned.order is not None and aligned.spec.present == aligned.operands.present()
    assert aligned.spec.bounds == ((None, None) if name == "offsets" else (None, 0))
    rows, keys = (np.asarray(x[0]) for x in aligned.order.targets)
    found = np.asarray(visible_pairs(aligned.spec, aligned.operands))[0]
    of_tokens = found[:, rows[:, None], keys] & (rows[:, None] >= 0) & (keys >= 0)
    np.testing.assert_array_equal(of_tokens, expected)
    assert found.sum() == expected.sum()
    # A batch of two packs, of which one has other sequences.
    assert operands.sequences is not None
    others = operands._replace(sequences=operands.sequences.at[:, 2, 0].set(9))
    both = packed_masks.RowsCall.of(spec, jax.tree.map(lambda x, y: jnp.concatenate([x, y]), operands, others))
    second = packed_masks.RowsCall.of(spec, others)
    np.testing.assert_array_equal(
        visible_pairs(both.spec, both.operands), [found, visible_pairs(second.spec, second.operands)[0]]
    )
    # The sizes alone say the same, except that planes may be for all heads next to a `score_mod`.
    for one, given in ((aligned, operands), (both, both.packed)):
        wanted, problem = Problem.of(one.spec, one.operands), packed_masks.problem_by_rows(Problem.of(spec, given))
        if name == "scores":
            wanted = dataclasses.replace(wanted, mask_mod_shape=problem.mask_mod_shape)
        assert problem == wanted and packed_masks.problem_by_rows(wanted) == wanted


def test_limits_keep_planes_of_queries() -> None:
    """Those of `score_mod` come first, with numbers for each head, then those of `mask_mod`."""
    spec, operands = call(mask_mod=near, score_mod=lambda s, b, h, q, k: s * (q // (h + 1)), is_causal=True)
    assert operands.query_integers is not None
    before, rows = operands.query_integers, packed_masks.by_rows(spec, operands)[1].query_integers
    assert rows is not None and rows.shape == (1, before.shape[1], before.shape[2] + 1, T)
    np.testing.assert_array_equal(rows[:, :, :-1], before)


def test_kernels_take_a_function_of_packed_sequences() -> None:
    problem = Problem.of(*call(mask_mod=near, is_causal=True))
    assert not unsupported_reasons(problem, "sm_90a") and not unsupported_reasons(problem, "sm_80")
    spec, operands = call(mask_mod=near, dropout_rate=0.5, dropout_key=jax.random.key(0))
    reasons = [reason.text for reason in unsupported_reasons(Problem.of(spec, operands), "sm_90a")]
    assert "no kernel drops weights of packed sequences with a `mask_mod`" in reasons
    (found,) = unsupported_reasons(Problem.of(*call(mask_mod=lambda b, h, q, k: jnp.exp(q * k) < 3)), "sm_90a")
    assert "`mask_mod` computes `exp`" in found.text


def test_a_call_runs_a_prepass_for_each_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    query, key = (jax.ShapeDtypeStruct((length, N, H), jnp.bfloat16) for length in (T, S))

    def loss(query: jax.Array, key: jax.Array) -> jax.Array:
        starts, others = STARTS["cu_seqlens_q"], STARTS["cu_seqlens_k"]
        return attention_varlen(query, key, key, starts, others, mask_mod=near).astype(jnp.float32).sum()

    with target_arch("sm_90a"):
        assert calls.count_launches(calls.cuda_text(loss, query, key)) == 2
        assert calls.count_launches(calls.cuda_text(jax.grad(loss), query, key)) == 4
