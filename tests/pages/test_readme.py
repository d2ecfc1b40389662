# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""README.md is right: its code prints what it says, its tables are those of the package, and links of pages lead on."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from generators.support_table import problems

import jax_fastattn
from jax_fastattn.cases.coverage import COVERAGE
from jax_fastattn.kernels.architectures import ARCHITECTURES
from jax_fastattn.kernels.support import unsupported_reasons

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/kernels", "docs/recipes", "notebook")
PAGES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))]
README = (ROOT / "README.md").read_text()
SEPARATOR = "-- next block --"
NUMBER = re.compile(r"\d+\.\d+")

# A block of code, and the block of output below it, with at most a line of text between them.
EXAMPLES = re.findall(r"```python\n(.*?)```\n+(?:[^`\n]+\n+)?```text\n(.*?)```", README, re.DOTALL)

# Runs after the blocks, with their names.
CHECKS = """
assert out.shape == dq.shape == q.shape == (2, 96, 32, 128)
assert (abs(out - 1) < 2**-7).all()  # the mean of ones, with weights that are rounded to bfloat16
"""


def shorter(text: str) -> str:
    """Returns a block for sequences that a CPU computes in a second."""
    return text.replace("4096", "96")


def python(*arguments: str) -> str:
    """Runs Python on the CPU and returns what it prints."""
    command = [sys.executable, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": folder}
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_printed(found: str, expected: str) -> None:
    """Compares output; numbers with a decimal point may differ by 2 %, as versions of JAX and CPUs round otherwise."""
    assert NUMBER.sub("#", found.strip()) == NUMBER.sub("#", expected.strip())
    pairs = zip(NUMBER.findall(found), NUMBER.findall(expected), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(float(x), float(y), rtol=0.02, atol=0.011)


def test_each_block_of_python_prints_what_is_below_it() -> None:
    assert len(EXAMPLES) == README.count("```python") == README.count("```text") == 1
    code = f"\nprint({SEPARATOR!r})\n".join(shorter(code) for code, _ in EXAMPLES) + CHECKS
    printed = python("-c", code).split(f"{SEPARATOR}\n")
    for found, (_, expected) in zip(printed, EXAMPLES, strict=True):
        assert_printed(found, shorter(expected))


@pytest.mark.parametrize(("found", "expected"), [("loss 2.38", "loss 2.50"), ("loss 2.38", "los 2.38"), ("", "1")])
def test_other_output_is_noticed(found: str, expected: str) -> None:
    assert_printed(found, found)
    with pytest.raises(AssertionError):
        assert_printed(found, expected)


def test_each_command_of_the_package_prints_what_is_below_it() -> None:
    (block,) = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    command, _, expected = block.partition("\n")
    prompt = "$ python "
    assert command.startswith(prompt)
    assert python(*command.removeprefix(prompt).split()).endswith(expected)


def test_features_are_those_of_the_kernels() -> None:
    """Each argument and dtype of docs/support.md is in the table, with one answer for all kernels."""
    rows = re.findall(r"^\| (.*?) \| (kernels|XLA) \| (kernels|XLA) \| XLA \|", README, re.MULTILINE)
    shown = {name.strip("` "): tuple(answers) for names, *answers in rows for name in names.split(",")}
    single = {label: problem for label, problem in problems().items() if " of `" not in label}
    for label, problem in single.items():
        names = re.findall(r"`(\w+)`", label) or ([label] if "float" in label else [])
        if names:
            run = ["XLA" if unsupported_reasons(problem, arch) else "kernels" for arch in ARCHITECTURES]
            hopper = run.pop(ARCHITECTURES.index("sm_90a"))
            assert {(hopper, other) for other in run} == {shown.pop(name) for name in names}, label
    assert not shown


def test_gpus_that_ran_nothing_are_named() -> None:
    rows = [line.strip("| ").split(" | ") for line in README.splitlines() if line.startswith("| ")]
    shown = {gpu: has_run for gpus, _, has_run in (row for row in rows if len(row) == 3) for gpu in gpus.split(", ")}
    for known in COVERAGE.values():
        for gpu in known.gpus.split(", "):
            assert shown[gpu].startswith("no:") == (known.ran == "nothing"), gpu


def test_the_table_is_short_and_a_sentence_says_that_no_peer_is_faster_in_it() -> None:
    """Ours is bold where it is best or level. If new records change that, the sentence has to go."""
    table = README.partition("<!-- benchmarks: begin -->")[2].partition("<!-- benchmarks: end -->")[0]
    rows = [
        line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ") and "| case" not in line
    ]
    assert len(rows) == 12
    slower = [case for case, ours, *_ in rows if any("**" not in figure for figure in ours.split(" / "))]
    assert not slower
    assert "In the runs of these rows no peer is faster" in README


def test_the_wheel_and_the_citation_have_the_version() -> None:
    assert f"/jax_fastattn-{jax_fastattn.__version__}-cp313-cp313-" in README
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jax_fastattn.__version__}\n" in citation


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link
