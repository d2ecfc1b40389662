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
    kinds = ("plain", "dropout", "flax plain", "flax dropout")
    assert {*ms} == {f"{kind} {mode}" for kind in kinds for mode in benchmark.MODES}
    assert found["dropout of plain"]["forward"] == pytest.approx(ms["dropout forward"] / ms["plain forward"])
    assert found["speed of flax"]["backward"] == pytest.approx(ms["dropout backward"] / ms["flax dropout backward"])
    assert found["errors"] == dict.fromkeys(("torch plain", "torch dropout"), "RuntimeError: no such backend")
    assert not found["speed of torch"]


def test_flax_is_left_out_where_its_weights_take_much_memory() -> None:
    with pytest.raises(MemoryError, match=r"all weights take 8.6 GB"):
        benchmark.of_flax(benchmark.CASES["d128-8192-full"], 0.1)
