# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The lines of use in README.md run as they stand, on shorter sequences."""

import re
from pathlib import Path
from typing import Any


def test_lines_of_use() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("4096", "96"), names)
    assert names["out"].shape == names["dq"].shape == names["q"].shape == (2, 96, 32, 128)
    assert (abs(names["out"] - 1) < 2**-7).all()  # the mean of ones, with weights that are rounded to bfloat16
