# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the site from pages that a code host shows, too: mkdocs.yml loads this module.

Pages outside of `docs/` join the site: README's neighbors, the notebook, and plots. The notebook is found neither by
the search nor in the navigation, and the search shows pages for developers last. A link from one page to another keeps
its meaning, whichever folder each lies in. A link to any other file of the repository leads to the code host; as long
as the project has no address, its text stands alone. A page that a docstring names becomes a link. mkdocs reports what
leads nowhere.
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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]
HAS_ADDRESS = not posixpath.dirname(SOURCE).endswith(".example")  # a host that RFC 2606 reserves

# Files outside of docs/, by their address in the site.
JOINED = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}
JOINED |= {path.as_posix(): path.as_posix() for path in (x.relative_to(ROOT) for x in ROOT.glob("notebook/*.md"))}
JOINED |= {f"plots/{path.name}": path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/results/*.png")}

_ADDRESSES = {path: address for address, path in JOINED.items()}
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_TO_SOURCE = re.compile(rf'<a href="{re.escape(SOURCE)}[^"]*">(.*?)</a>', re.DOTALL)
_MENTION = re.compile(r"\bdocs/([\w/]+\.md)\b")


def on_config(config: Any) -> Any:
    """Names the repository in the header of each page, once it has an address."""
    if HAS_ADDRESS:
        config.repo_url, config.repo_name = SOURCE, PROJECT["name"]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the files outside of docs/."""
    for address, path in JOINED.items():
        files.append(File.generated(config, address, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page, except in code; says whether the search finds the page."""
    address = page.file.src_uri
    if address.startswith("notebook/"):
        page.meta["search"] = {"exclude": True}
    elif address.startswith(("kernels/", "contributing.md", "changes.md")):
        page.meta["search"] = {"boost": 0.1}  # users look for other pages
    pieces = _CODE.split(markdown)
    pieces[::2] = [_LINK.sub(lambda link: _rewritten(address, link), piece) for piece in pieces[::2]]
    return "".join(pieces)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Takes links to the code host away if it has no address; links the pages that docstrings name."""
    if not HAS_ADDRESS:
        html = _TO_SOURCE.sub(r"\1", html)
    if page.file.src_uri != "api.md":
        return html
    return _MENTION.sub(lambda mention: _linked(mention, page.file, files), html)


def _linked(mention: re.Match[str], here: File, files: Files) -> str:
    there = files.get_file_from_path(mention[1])
    if there is None:
        raise PluginError(f"A docstring names {mention[0]}, which is no page of the site. Correct the name.")
    return f'<a href="{there.url_relative_to(here)}">{mention[0]}</a>'


def _rewritten(address: str, link: re.Match[str]) -> str:
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
        return f"]({SOURCE}/blob/HEAD/{target}{anchor})"
    return link[0]
