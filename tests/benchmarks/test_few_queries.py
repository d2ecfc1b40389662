# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/few_queries.py` in a tiny size: what a record has, and that calls are what their cases say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import few_queries
from few_queries import Few

TINY = {"tiny": Few(2, 40, queries=3, heads=4, kv_heads=2, head_dim=8), "ragged": Few(3, 24, 1, 2, 1, 8, "ragged")}


def test_a_record_has_times_and_shares_and_errors_of_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_queries, "CASES", TINY)
    output = tmp_path / "record.json"
    few_queries.main(["--rounds", "2", "--measurement-ms", "0.1", "--output", str(output), "--commit", "0" * 40])
    found = json.loads(output.read_text())["cases"]
    assert [*found] == [*TINY]
    for name, record in found.items():
        case, us = TINY[name], record["us"]
        assert {*us} == {"jax_fastattn", "copy"}
        assert "jax.nn-cudnn" in record["errors"]  # there is no GPU
        nbytes = int(case.seen().sum()) * case.kv_heads * case.head_dim * 2 * 2
        assert record["tb_per_s"] == pytest.approx(nbytes / us["jax_fastattn"] / 1e6)
        copied = 2 * 2 * case.batch * case.keys * case.kv_heads * case.head_dim * 2
        assert record["copy_tb_per_s"] == pytest.approx(copied / us["copy"] / 1e6)


def test_deterministic_calls_are_compared_with_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_queries, "CASES", {"tiny": TINY["tiny"]})
    output, names = tmp_path / "record.json", ["jax_fastattn", "jax_fastattn-deterministic"]
    options = ["--rounds", "2", "--measurement-ms", "0.1", "--output", str(output), "--commit", "0" * 40]
    few_queries.main(["--implementations", *names, *options])
    record = json.loads(output.read_text())["cases"]["tiny"]
    us = record["us"]
    assert {*us} == {*names, "copy"} and not record["errors"]
    assert record["of_jax_fastattn-deterministic"] == pytest.approx(us[names[1]] / us[names[0]])


def test_lengths_hide_keys() -> None:
    case = Few(3, 24, 1, 2, 1, 8, "ragged")
    query, key, value = (
        jax.random.normal(jax.random.key(i), (3, rows, heads, 8))
        for i, (rows, heads) in enumerate(((1, 2), (24, 1), (24, 1)))
    )
    lengths = case.seen()
    assert lengths.min() >= 1 and len({*lengths}) > 1

    def outputs(value: Any) -> np.ndarray:
        return np.asarray(few_queries.ours(query, key, value, jax.numpy.asarray(lengths)))

    hidden = np.arange(24)[None] >= lengths[:, None]
    np.testing.assert_array_equal(outputs(value), outputs(jax.numpy.where(hidden[..., None, None], np.nan, value)))
