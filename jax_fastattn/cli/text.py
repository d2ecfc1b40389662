# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Formats sizes and tables."""

from __future__ import annotations

from collections.abc import Sequence


def file_size(size: int) -> str:
    """Returns bytes in a unit that reads well, such as `1.4 MB`."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as lines, with columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
