# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/precise_gradients.py` in a tiny size: what a record has."""

from __future__ import annotations

import json
from pathlib import Path

import precise_gradients
import pytest


def test_a_record_has_ratios_of_both_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precise_gradients, "CASES", {"tiny": (8, 32, True)})
    monkeypatch.setattr(precise_gradients, "TOKENS", 64)
    monkeypatch.setattr(precise_gradients, "HIDDEN", 16)
    output = tmp_path / "record.json"
    options = ["--rounds", "2", "--measurement-ms", "0.1", "--commit", "0" * 40]
    precise_gradients.main(["--output", str(output), *options])
    found = json.loads(output.read_text())["cases"]["tiny"]
    ms = found["ms"]
    assert {*found["precise of plain"]} == {*found["predicted"]} == {"forward", "backward"}
    assert found["precise of plain"]["backward"] == ms["precise backward"] / ms["plain backward"]
    assert found["predicted"]["forward"] == pytest.approx(1 + 64 * 16 / 4e9 / ms["plain forward"])
