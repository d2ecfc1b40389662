# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/new_functions.py`: what a record has, without a compiler."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import new_functions


def test_a_record_has_a_row_for_each_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_functions, "measured", lambda name: {"cpu_seconds": len(name)})
    output = tmp_path / "record.json"
    new_functions.main(["--rows", "none", "t5-learned", "--output", str(output), "--commit", "0" * 40])
    found: dict[str, Any] = json.loads(output.read_text())
    assert found["rows"] == {"none": {"cpu_seconds": 4}, "t5-learned": {"cpu_seconds": 10}}


def test_preparing_a_function_takes_time() -> None:
    assert 0 < new_functions.trace_ms("t5-learned", runs=3) < 1000
    assert 0 < new_functions.eager_ms("t5-learned", runs=3) < 1000
