# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The code of the pages for newcomers runs as it stands and prints what the pages say; the site lists every page.

Other pages have tests of their own: README.md, packed.md, kv_cache.md, forward_mode.md and recipes.md.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import jax_fastattn
from jax_fastattn import ffi

DOCS = Path(__file__).parents[2] / "docs"
SITE = (DOCS.parent / "mkdocs.yml").read_text()
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", ["start", "concepts", "migration"])
def test_each_block_prints_what_is_below_it(name: str) -> None:
    if name == "start" and ffi.missing_parts():
        pytest.skip(f"explain names what is missing: {ffi.missing_parts()}")
    blocks = BLOCK.findall((DOCS / f"{name}.md").read_text())
    names: dict[str, Any] = {}
    printed = expected = ""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for kind, text in blocks:
            if kind == "text":
                expected += text
            else:
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(text, names)
                printed += output.getvalue()
    assert expected and printed == expected


def test_the_site_lists_every_page() -> None:
    listed = {line.rpartition(" ")[2] for line in SITE.splitlines() if line.endswith(".md")}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == pages | {"contributing.md", "changes.md"}


def test_the_reference_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text()
    shown = re.findall(r"^::: jax_fastattn\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(jax_fastattn.__all__)
