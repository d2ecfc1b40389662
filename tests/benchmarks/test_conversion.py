# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/conversion.py` in a tiny size."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import conversion


def test_a_record_has_times_and_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(conversion.CASES["d64-causal"], batch=1, length=24, heads=2, head_dim=32)
    monkeypatch.setattr(conversion, "CASES", {"tiny": tiny})
    # No CPU has the products of TF32.
    monkeypatch.setattr(conversion, "PRECISION", "highest")
    output = tmp_path / "record.json"
    quick = ["--rounds", "1", "--measurement-ms", "0.1", "--commit", "0" * 40]
    conversion.main(["--output", str(output), *quick])
    found = json.loads(output.read_text())["cases"]["tiny"]
    ms = found["ms"]
    assert {*ms} == {"float32", "float16", "conversion"} and min(ms.values()) > 0
    assert found["share"] == pytest.approx(1 - ms["float16"] / ms["float32"])
    assert [case.dtype for case in tiny.cases()] == ["float32", "float16"]
