# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The code of docs/long_sequences.md runs as it stands, and its table is the arithmetic that the page shows."""

import functools
import re
from pathlib import Path
from typing import Any

import calls
import pytest

import jax_fastattn

PAGE = (Path(__file__).parents[2] / "docs" / "long_sequences.md").read_text()


def test_code(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/long_sequences.md", "exec"), names)
    attend = functools.partial(jax_fastattn.attention, is_causal=True)
    expected = attend(names["q"], names["k"], names["v"])
    calls.assert_same(names["out"], expected)
    calls.assert_same(names["zigzag_out"], expected)
    calls.assert_same(names["padded_out"], jax_fastattn.attention(*(names[x][:, :59] for x in "qkv")))
    assert names["out"].sharding.is_equivalent_to(names["rows"], 4)
    capsys.readouterr()


def test_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) ms \|$", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for row in rows:
        devices, length, *milliseconds = map(float, row)
        assert devices * length == 131072
        exact = [8192 * length**2 / 7e11, *(4096 * length / bandwidth * 1e3 for bandwidth in (238e9, 40e9))]
        assert milliseconds == pytest.approx(exact, rel=0.01, abs=0.006)
