# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The code of the pages for newcomers runs as it stands and prints what the pages say; the site lists every page.

Other pages have tests of their own: README.md, packed.md, kv_cache.md, forward_mode.md and recipes.md.
"""

import contextlib
import io
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest

import jax_fastattn
from jax_fastattn import ffi

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = (ROOT / "mkdocs.yml").read_text()
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", ["start", "concepts", "migration", "profiling"])
def test_each_block_prints_what_is_below_it(name: str) -> None:
    if name in ("start", "profiling") and ffi.missing_parts():
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


def test_no_page_and_no_message_asks_an_index_for_the_package() -> None:
    """No index has the name, which anybody may register there. A wheel or a clone is a path."""
    asks = re.compile(r"jax[_-]fastattn\[|\b(?:install|add)\b[^`\n]*(?<![\w./-])jax[_-]fastattn(?![\w./-])")
    assert asks.search("pip install 'jax_fastattn[flax]'") and asks.search("uv add jax-fastattn")
    assert not asks.search("pip install './jax_fastattn-0.1.0-cp313.whl[flax]'")
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    pages += (ROOT / "examples" / "recipes").glob("Dockerfile")
    sources = [*(ROOT / "jax_fastattn").rglob("*.py"), *(ROOT / "csrc").glob("*.cc")]
    found = [(path.name, asks.search(path.read_text())) for path in (*pages, *sources)]
    assert [(name, match[0]) for name, match in found if match] == []


@pytest.mark.parametrize(("name", "missing"), [("train_gpt", "tqdm"), ("generate", "flax"), ("mean_flow", "optax")])
def test_an_example_without_its_extra_says_what_to_install(
    name: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with a traceback."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "train_gpt", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with warnings.catch_warnings(), pytest.raises(SystemExit, match=f"{missing} is not installed. Install the extra"):
        # flax 0.12.0 looks up two names while it is imported that jax 0.8.0 deprecates.
        warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def test_kernels_in_profiles_are_those_of_the_package() -> None:
    """The name of a kernel has its module and class, without dots."""
    folder = ROOT / "jax_fastattn" / "kernels"
    modules = {"".join(x.relative_to(folder.parent).with_suffix("").parts): x.read_text() for x in folder.rglob("*.py")}
    classes = re.compile(r"^class (\w+)", re.MULTILINE)
    known = {f"{name}{found}" for name, text in modules.items() for found in classes.findall(text)}
    shown = set(re.findall(r"`(kernels\w+Kernel)`", (DOCS / "profiling.md").read_text()))
    assert len(shown) == 15 and shown <= known


def test_the_site_lists_every_page() -> None:
    listed = {line.rpartition(" ")[2] for line in SITE.splitlines() if line.endswith(".md")}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == pages | {"contributing.md", "changes.md"}


def test_the_reference_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text()
    shown = re.findall(r"^::: jax_fastattn\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(jax_fastattn.__all__)


def linked(page: Path) -> set[Path]:
    """Returns the pages to which a page links."""
    targets = re.findall(r"\]\(([\w./]+\.md)[#)]", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("recipes/bert_flax.md", "BERT padding Flax"),
        ("recipes/dropout.md", "dropout"),
        ("recipes/float32_models.md", "float32 Keras"),
        ("recipes/alibi.md", "ALiBi learned"),
        ("recipes/t5_bias.md", "T5 relative position bias"),
        ("recipes/maxtext.md", "MaxText packed"),
        ("recipes/gpt_oss.md", "gpt-oss sinks"),
        ("kv_cache.md", "paged KV cache"),
        ("recipes/tensor_parallel.md", "eight devices GPUs"),
        ("recipes/score_function.md", "own score function score_mod FlexAttention"),
        ("recipes/cross_attention.md", "cross attention"),
        ("migration.md", "flash-attn"),
        ("forward_mode.md", "MeanFlow jvp"),
        ("recipes/export.md", "export"),
        ("profiling.md", "which kernel ran profiling Nsight"),
        ("long_sequences.md", "ring attention sequence context parallelism"),
    ],
)
def test_a_task_is_found(page: str, words: str) -> None:
    """The page is at most two links from the home page, and its beginning has the words that one searches for."""
    first = linked(DOCS / "index.md")
    assert (DOCS / page) in first.union(*map(linked, first))
    beginning = (DOCS / page).read_text()[:700].lower()
    assert [word for word in words.lower().split() if word not in beginning] == []
