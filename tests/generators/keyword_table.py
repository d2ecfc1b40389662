# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Generates the table of keywords in docs/migration.md from `keywords.PEERS`, from which errors take their remedies.

Run `python tests/generators/keyword_table.py docs/migration.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jax_fastattn.keywords import PEERS

BEGIN, END = "<!-- keywords: begin -->\n", "<!-- keywords: end -->\n"


def keyword_table() -> str:
    """Returns the table."""
    rows = ["| keyword | of | here |", "|---|---|---|"]
    for row in PEERS:
        names = ", ".join(f"`{name}`" for name in row.names)
        rows.append(f"| {names} | {row.libraries} | {row.remedy} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """Returns a page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{keyword_table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
