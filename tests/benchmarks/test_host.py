# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/host.py` in a tiny size: what a record has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import host

from jax_fastattn.cases.case import Case


def test_a_record_has_times_of_calls_and_errors_of_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CASE", Case("float32", 1, 5, 7, num_kv_heads=1, head_dim=8))
    monkeypatch.setattr(host, "MORE", 2)
    output = tmp_path / "record.json"
    options = ["--rounds", "2", "--runs", "2", "--output", str(output), "--commit", "0" * 40]
    host.main(["--implementations", "jax_fastattn-xla", "jax.nn-cudnn", *options])
    found = json.loads(output.read_text())["us"]
    assert "error" in found["jax.nn-cudnn"]  # there is no GPU
    ours = found["jax_fastattn-xla"]
    for row in ("eager", "jitted", "eager gradient", "jitted gradient"):
        assert 0 < ours[row]["least"] <= ours[row]["us"] <= ours[row]["greatest"]
    for kind in ("dependent", "independent"):
        assert ours[kind]["us"] == pytest.approx((ours[f"{kind} 3"]["us"] - ours[f"{kind} 1"]["us"]) / 2)
