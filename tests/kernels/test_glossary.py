# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The glossary of kernels' words, and the files that CONTRIBUTING.md names for each task."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "jax_fastattn" / "kernels"
GLOSSARY = (ROOT / "docs" / "kernels" / "glossary.md").read_text()
WORDS = dict(re.findall(r"^\| ([^|`]+) \| [^|]+ \| `([^`]+)` \|$", GLOSSARY, re.MULTILINE))


def test_every_row_names_a_file() -> None:
    rows = [line for line in GLOSSARY.splitlines() if line.startswith("| ") and line != "| word | meaning | file |"]
    assert len(rows) == len(WORDS) > 50


def test_a_word_moved_away_from_its_file() -> None:
    """Each word is in the file of its row, in some form."""
    missing = []
    for term, path in WORDS.items():
        text = path + (KERNELS / path).read_text().lower()
        parts = re.findall(r"[a-z]+", re.sub(r"\(.*\)", "", term).lower())
        missing += [f"{term}: {path}" for part in parts if part not in text]
    assert missing == []


def test_a_file_of_a_task_is_gone() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| I want to ... | file |")[2].partition("\n\n")[0]
    paths = re.findall(r"`([^`]+)`", table)
    assert len(paths) > 20
    assert [x for x in paths if not any((top / x).exists() for top in (ROOT, ROOT / "jax_fastattn"))] == []
