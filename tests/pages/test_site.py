# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the site makes of pages: where links lead, and what its search finds."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mkdocs")

HOOKS = Path(__file__).parents[2] / "docs" / "hooks" / "repository_links.py"


@pytest.fixture
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("repository_links", HOOKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(address: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=address), meta={})


@pytest.mark.parametrize("has_address", [False, True])
def test_links_to_files_lead_to_no_reserved_host(
    has_address: bool, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of the site named a repository "None", and 19 links of the recipes led to a host that is reserved."""
    monkeypatch.setattr(hooks, "HAS_ADDRESS", has_address)
    config = hooks.on_config(SimpleNamespace(repo_url=None, repo_name=None))
    assert (config.repo_url, config.repo_name) == ((hooks.SOURCE, "jax_fastattn") if has_address else (None, None))
    recipe = page("recipes/padding.md")
    text = hooks.on_page_markdown("[`padding.py`](../../examples/recipes/padding.py)", recipe, None, None)
    link = f"{hooks.SOURCE}/blob/HEAD/examples/recipes/padding.py"
    assert text == f"[`padding.py`]({link})"
    html = hooks.on_page_content(f'<p><a href="{link}"><code>padding.py</code></a></p>', recipe, None, None)
    assert ("href" in html) == has_address and "<code>padding.py</code>" in html


def test_the_reserved_host_is_no_address(hooks: Any) -> None:
    assert ("https://jax-fastattn.example/" not in hooks.SOURCE) == hooks.HAS_ADDRESS


@pytest.mark.parametrize(
    ("address", "search"),
    [
        ("notebook/masks.md", {"exclude": True}),
        ("kernels/masks.md", {"boost": 0.1}),
        ("concepts.md", None),
    ],
)
def test_the_search_leads_to_pages_for_users(address: str, search: dict[str, Any] | None, hooks: Any) -> None:
    """For "causal" and "padding mask" the first five results were of the notebook."""
    found = page(address)
    hooks.on_page_markdown("# A title", found, None, None)
    assert found.meta.get("search") == search
