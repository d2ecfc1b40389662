# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Each recipe of examples/recipes runs as it stands, and compares itself with other code at its end."""

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jax_fastattn
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.ops import call_sites
from jax_fastattn.spec import Problem

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "examples" / "recipes").glob("*.py"))}
DOCKERFILE = ROOT / "examples" / "recipes" / "Dockerfile"
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
NEEDS = {
    "equinox_dropout": ["equinox"],
    "equinox_layer": ["equinox"],
    "export": ["cutlass"],
    "float32_models": ["equinox", "keras"],
    "keras_model": ["keras"],
}


def _run(path: Path) -> None:
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # flax 0.12.0 looks up two names while it is imported that jax 0.8.0 deprecates.
        warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
        runpy.run_path(str(path))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own comparisons hold, and the kernels take each of its calls on an H100."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for module in NEEDS.get(name, []):
        pytest.importorskip(module)
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    problems: list[Problem] = []
    monkeypatch.setattr(call_sites, "note", lambda *call: problems.append(Problem.of(*call)))
    _run(RECIPES[name])
    assert problems
    reasons = {reason.kind for problem in problems for reason in unsupported_reasons(problem, "sm_90a")}
    assert not reasons


@pytest.mark.parametrize("name", ["alibi", "gemma2", "gpt_oss", "kv_cache", "maxtext", "score_function"])
def test_a_recipe_notices_wrong_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its comparisons would mean nothing: this attention shows each query one key too many."""
    right = jax_fastattn.attention

    def wrong(*args: Any, query_offset: Any = 0, **options: Any) -> Any:
        return right(*args, query_offset=query_offset + 1, **options)

    monkeypatch.setattr(jax_fastattn, "attention", wrong)
    with pytest.raises(AssertionError):
        _run(RECIPES[name])


@pytest.mark.parametrize("path", [*RECIPES.values(), DOCKERFILE], ids=lambda path: path.stem)
def test_recipe_is_short_and_shown(path: Path) -> None:
    """One page includes the whole file after the two lines of the license, and the list of recipes has that page."""
    shown = path.read_text().splitlines()[2:]
    assert len([line for line in shown if line]) <= 40
    name = path.relative_to(ROOT)
    (page,) = (page for page in PAGES if f'--8<-- "{name}:3"' in page.read_text())
    assert f"](../../{name})" in page.read_text()
    title = page.read_text().partition("\n")[0].removeprefix("# ")
    assert f"[{title}](recipes/{page.name})" in (ROOT / "docs" / "recipes.md").read_text()


def test_each_page_shows_a_recipe() -> None:
    assert len(PAGES) == len(RECIPES) + 1


@pytest.mark.slow
def test_image(tmp_path: Path) -> None:
    """The steps of the Dockerfile after the installation, in a directory of the test's, by one user."""
    pytest.importorskip("cutlass")
    cache = str(tmp_path / "cache")
    text = DOCKERFILE.read_text().replace("/opt/jax_fastattn", cache)
    (name, value) = re.findall(r"^ENV (\w+)=(\S+)$", text, re.MULTILINE)[0]
    steps = [step for step in re.findall(r"^RUN (.*)$", text, re.MULTILINE) if not step.startswith("pip")]
    assert len(steps) == 3 and value == cache
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    package = str(Path(jax_fastattn.__file__).parents[1])  # the one that this process tests
    environment = os.environ | {name: value, "PATH": path, "PYTHONPATH": package, "JAX_PLATFORMS": "cpu"}
    for step in steps:
        subprocess.run(["bash", "-o", "pipefail", "-c", step], env=environment, check=True, cwd=tmp_path)
    assert np.all([file.stat().st_mode & 0o444 == 0o444 for file in Path(cache).rglob("*") if file.is_file()])
    assert list(Path(cache).rglob("*"))
