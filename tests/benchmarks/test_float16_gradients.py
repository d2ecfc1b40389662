# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of gradients in float16, in a tiny size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import float16_gradients


@pytest.mark.slow
def test_every_gradient_has_errors_and_a_prediction(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    float16_gradients.main(["--tiny", "--output", str(output), "--commit", "0"])
    rows = json.loads(output.read_text())["rows"]
    assert [set(row["errors"]["ours"]) for row in rows] == [
        {"dquery", "dkey", "dvalue", "dquery of other rows"},
        {"dquery", "dkey", "dvalue", "dbias", "dsinks"},
    ]
    assert all(row["predicted"] and row["ours_not_finite"] == 0 and not row["misses"] for row in rows)


def test_draws_have_each_length_with_and_without_sinks() -> None:
    found = {(draw.keys, draw.has_sinks, draw.log2_cotangents, draw.has_large_row) for draw in float16_gradients.DRAWS}
    assert {(keys, has_sinks, -10, True) for keys in float16_gradients.KEYS for has_sinks in (False, True)} <= found
    assert not any(draw.has_large_row and draw.log2_cotangents > 0 for draw in float16_gradients.DRAWS)
