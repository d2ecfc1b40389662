# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/dropout_peers.py` in a tiny size: what a record has, and that a peer that fails is an error in it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import dropout_peers as benchmark


def test_a_record_has_times_ratios_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, benchmark.Program]:
        raise RuntimeError("no such backend")

    name = "d64-512-causal"
    tiny = dataclasses.replace(benchmark.CASES[name], length=24, tokens=48, hidden=128)
    monkeypatch.setattr(benchmark, "CASES", {name: tiny})
    monkeypatch.setattr(benchmark, "of_torch", fail)
    output = tmp_path / "record.json"
    benchmark.main(["--rounds", "2", "--measurement-ms", "0.1", "--output", str(output), "--commit", "0" * 40])
    found = json.loads(output.read_text())["cases"][name]
    ms = found["ms"]
    assert {*ms} == {f"{kind} {mode}" for kind in ("plain", "dropout") for mode in benchmark.MODES}
    assert found["dropout of plain"]["forward"] == pytest.approx(ms["dropout forward"] / ms["plain forward"])
    assert found["errors"] == {"torch plain": "no such backend", "torch dropout": "no such backend"}
    assert not found["speed of torch"]
