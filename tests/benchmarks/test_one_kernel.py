# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/one_kernel.py` runs a small case in an emulator. It prints registers and fails for a wrong result."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import one_kernel

CASE = ["more keys than queries", "--change", "query_length=7, key_length=65"]


def test_registers_and_time_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_kernel.main(CASE) == 0
    printed = capsys.readouterr().out
    assert re.search(r"q7-kv65\nsm90 forward, ForwardConfig\(", printed)
    assert re.search(r"ForwardKernel.kernel: [1-9]\d* registers, 0 bytes of local memory, [1-9]\d* bytes of", printed)
    assert re.search(r"emulated in \d+\.\d s\nright\n$", printed)


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel is not run, so its buffers keep their poison."""
    monkeypatch.setattr(emulated_ops, "_forward", lambda *_: None)
    assert one_kernel.main(CASE) == 1
    assert "wrong: out: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    {
        "case": (["nothing"], "`case` is 'nothing'"),
        "arch": ([*CASE, "--arch", "sm_90-a100"], "`--arch` is 'sm_90-a100'; expected one of sm_80"),
        "gpu-arch": ([*CASE, "--gpu", "--arch", "sm_80"], "`--arch` is 'sm_80'; expected one of sm_90-a100"),
    }.values(),
    ids=["case", "arch", "gpu-arch"],
)
def test_wrong_input(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        one_kernel.main(arguments)
    assert error in capsys.readouterr().err
