# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the site from pages that a code host shows, too: mkdocs.yml loads this module.

Pages outside of `docs/` join the site: README's neighbors, the notebook, and plots. A link from one page to another
keeps its meaning, whichever folder each lies in. A link to any other file of the repository leads to the code host.
A page that a docstring names becomes a link. mkdocs reports what leads nowhere.
"""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

# Files outside of docs/, by their address in the site.
JOINED = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}
JOINED |= {path.as_posix(): path.as_posix() for path in (x.relative_to(ROOT) for x in ROOT.glob("notebook/*.md"))}
JOINED |= {f"plots/{path.name}": path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/results/*.png")}

_ADDRESSES = {path: address for address, path in JOINED.items()}
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_MENTION = re.compile(r"\bdocs/([\w/]+\.md)\b")


def on_config(config: Any) -> Any:
    """Takes the address of the repository from pyproject.toml, the one place that has it, and lists the notebook."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.repo_url = urls["Source"]
    (section,) = (x for x in config.nav if "Notebook" in x)
    section["Notebook"] = _notebook()
    return config


def _notebook() -> list[Any]:
    """Returns the notebook's part of the navigation: `topic-question.md` comes below `topic.md`, which has an index."""
    pages = sorted(path.name for path in (ROOT / "notebook").glob("*.md"))
    below = {page: [x for x in pages if x.startswith(f"{page.removesuffix('.md')}-")] for page in pages}
    shown: list[Any] = ["notebook/README.md"]
    for page in pages:
        if below[page]:
            title = (ROOT / "notebook" / page).read_text().partition("\n")[0].removeprefix("# ").partition(":")[0]
            shown.append({title: [f"notebook/{x}" for x in (page, *below[page])]})
        elif page != "README.md" and not any(page in found for found in below.values()):
            shown.append(f"notebook/{page}")
    return shown


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside of docs/."""
    for address, path in JOINED.items():
        files.append(File.generated(config, address, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page, except in code."""
    address = page.file.src_uri
    pieces = _CODE.split(markdown)
    pieces[::2] = [_LINK.sub(lambda link: _rewritten(address, link, config), piece) for piece in pieces[::2]]
    return "".join(pieces)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Links the pages that docstrings name, such as `docs/semantics.md`."""
    if page.file.src_uri != "api.md":
        return html
    return _MENTION.sub(lambda mention: _linked(mention, page.file, files), html)


def _linked(mention: re.Match[str], here: File, files: Files) -> str:
    there = files.get_file_from_path(mention[1])
    if there is None:
        raise PluginError(f"A docstring names {mention[0]}, which is no page of the site. Correct the name.")
    return f'<a href="{there.url_relative_to(here)}">{mention[0]}</a>'


def _rewritten(address: str, link: re.Match[str], config: Any) -> str:
    path, anchor = link.groups(default="")
    own = JOINED.get(address, f"docs/{address}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(own), path))
    if target == "README.md":
        target = "docs/index.md" if not anchor else target  # the site's first page takes its place
    if target in _ADDRESSES:
        return f"]({os.path.relpath(_ADDRESSES[target], posixpath.dirname(address) or '.')}{anchor})"
    if target.startswith("docs/") and (ROOT / target).is_file():
        there = target.removeprefix("docs/")
        return f"]({os.path.relpath(there, posixpath.dirname(address) or '.')}{anchor})"
    if (ROOT / target).exists():
        return f"]({config.repo_url}/blob/HEAD/{target}{anchor})"
    return link[0]
