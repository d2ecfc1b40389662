# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Words of a product are made in one file: other kinds of words take the place of its final."""

import re
from pathlib import Path

import jax_fastattn

KERNELS = Path(jax_fastattn.__file__).parent / "kernels"


def test_kernels_round_numbers_past_their_words() -> None:
    makers = {
        str(path.relative_to(KERNELS))
        for path in KERNELS.rglob("*.py")
        if re.search(r"\b(?:ptx\.|import .*\b)pack\b", path.read_text())
    }
    assert makers == {"device/products.py"}
