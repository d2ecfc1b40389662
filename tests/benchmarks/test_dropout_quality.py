# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/dropout_quality.py` in a tiny size: what a record has, and that it notices fewer products."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import dropout_quality as benchmark

from jax_fastattn import dropout


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "MOVES", (0, 8))
    monkeypatch.setattr(benchmark, "CORNERS", (1,))


def test_a_record_has_the_figures_of_each_family(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    benchmark.main(["--heads", "2", "--length", "96", "--output", str(output), "--commit", "0" * 40])
    found = json.loads(output.read_text())
    assert found["decisions"] == 2 * 96**2
    assert found["dropped"]["0.1"] == pytest.approx(0.1 * found["decisions"], rel=0.1)
    assert {name: x["figures"] for name, x in found["families"].items()} == {
        "counts": 4,
        "sums": 8,
        "neighbors": 12,
        "heads": 2,
        "neighbors of all heads": 6,
        "count of all heads": 2,
        "rectangles": 4,
        "rectangles of all heads": 2,
        "keys": 80,
    }
    assert all(0.5 < x["predicted"] < benchmark.LIMIT for x in found["families"].values())


def test_weak_products_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "MULTIPLIERS", (dropout.MULTIPLIERS[0], 1, 1, 1, dropout.MULTIPLIERS[4]))
    jax.clear_caches()
    with pytest.raises(SystemExit, match=r"figures above 5.0: .*rectangles"):
        benchmark.main(["--heads", "2", "--length", "512", "--output", str(tmp_path / "record.json")])
    jax.clear_caches()
