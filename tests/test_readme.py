# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The lines of use in README.md run as they stand, on shorter sequences; its table is short; links of pages lead on."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [path for top in (".", "docs", "docs/kernels", "notebook") for path in sorted((ROOT / top).glob("*.md"))]


def test_lines_of_use() -> None:
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("4096", "96"), names)
    assert names["out"].shape == names["dq"].shape == names["q"].shape == (2, 96, 32, 128)
    assert (abs(names["out"] - 1) < 2**-7).all()  # the mean of ones, with weights that are rounded to bfloat16


def test_the_table_is_short_and_has_what_is_slow() -> None:
    table = (ROOT / "README.md").read_text().partition("<!-- benchmarks: begin -->")[2]
    cases = {line.split()[1] for line in table.splitlines() if line.startswith("| ")} - {"case"}
    assert len(cases) == 12
    assert {"bias-d64-2k", "mask-d64-2k", "decode-64x8k-gqa-32-8-d128"} <= cases


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link
