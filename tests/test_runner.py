# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a copy of `tests/run` whose tools are stand-ins that write down their arguments, and checks what it calls."""

from __future__ import annotations

import collections
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORES = 7
TOOLS = ("python", "pytest", "ruff", "pyright", "lint-imports")

Calls = dict[str, list[list[str]]]


def run(directory: Path, *arguments: str, failing: str = "") -> tuple[int, Calls]:
    """Returns the exit status and the arguments of each call, by `environment/tool`; the tool `failing` fails."""
    (directory / "tests").mkdir()
    (directory / "tests" / "run").write_text((ROOT / "tests" / "run").read_text())
    log = directory / "calls"
    stand_in = f'#!/bin/sh\necho "$0" "$@" >>{log}\ncase $0 in *"$FAILING") exit 9 ;; esac\necho jax 0.0.0\n'
    paths = [directory / f".venv-{name}" / "bin" / tool for name in ("newest", "oldest") for tool in TOOLS]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stand_in)
        path.chmod(0o755)
    nproc = directory / "nproc"
    nproc.write_text(f"#!/bin/sh\necho {CORES}\n")
    nproc.chmod(0o755)
    environment = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}", "FAILING": failing or "nothing"}
    command = ["sh", str(directory / "tests" / "run"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode or done.stdout.endswith("=== passed\n"), done.stderr
    calls: Calls = {}
    for line in log.read_text().splitlines():
        path, *rest = shlex.split(line)
        environment_name, _, tool = path.partition("/bin/")
        calls.setdefault(f"{environment_name.rpartition('-')[2]}/{tool}", []).append(rest)
    return done.returncode, calls


def options(arguments: list[str], name: str) -> list[str]:
    """Returns the values of an option that may be repeated."""
    return [value for option, value in itertools.pairwise(arguments) if option == name]


def test_all_checks_run_on_all_cores(tmp_path: Path) -> None:
    status, calls = run(tmp_path)
    assert status == 0
    assert sorted(calls) == sorted(
        [f"newest/{tool}" for tool in TOOLS] + [f"oldest/{tool}" for tool in ("python", "pytest")]
    )
    (newest,), (oldest,) = calls["newest/pytest"], calls["oldest/pytest"]
    assert options(newest, "-n") == options(oldest, "-n") == [str(CORES)]
    # The newest environment leaves nothing out; the oldest what no version of JAX can change, and cases of numbers.
    assert not {"--ignore", "--deselect", "--sample", "-k", "-m"} & set(newest)
    assert not {"--deselect", "-k", "-m"} & set(oldest)
    assert options(oldest, "--sample") == ["4"]
    left_out = options(oldest, "--ignore")
    assert left_out
    for path in left_out:
        files = sorted((ROOT / path).glob("*.py")) or [ROOT / path]
        assert all(file.exists() for file in files), path


def test_a_sample_has_a_case_of_each_function() -> None:
    def collected(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_reference.py", *arguments]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [line for line in printed.splitlines() if "::" in line]

    every, sample = collected(), collected("--sample", "4")
    assert set(sample) < set(every)
    functions = collections.Counter(line.partition("[")[0] for line in every)
    assert collections.Counter(line.partition("[")[0] for line in sample) == {
        function: -(-cases // 4) for function, cases in functions.items()
    }


def test_quick_is_part_of_the_tests_with_the_newest_jax(tmp_path: Path) -> None:
    status, calls = run(tmp_path, "quick", "-x")
    assert status == 0
    assert sorted(calls) == ["newest/pytest", "newest/python"]
    (arguments,) = calls["newest/pytest"]
    assert options(arguments, "-n") == [str(CORES)]
    assert "-x" in arguments
    files = [argument for argument in arguments if argument.startswith("tests/")]
    assert {"tests/test_api.py", "tests/test_grad.py", "tests/test_transforms.py", "tests/test_vmap.py"} < set(files)
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize(
    "tool", ["newest/bin/python", "newest/bin/pyright", "oldest/bin/python", "newest/bin/pytest", "oldest/bin/pytest"]
)
def test_a_check_that_fails_fails_the_command(tool: str, tmp_path: Path) -> None:
    status, calls = run(tmp_path, failing=tool)
    assert status == 9
    assert ("newest/pytest" in calls) == tool.endswith("pytest")


def test_every_part_is_documented() -> None:
    script = (ROOT / "tests" / "run").read_text()
    parts = re.findall(r"^  ([a-z |]+)\)$", script, re.MULTILINE)
    documented = "".join(line for line in script.splitlines(keepends=True) if line.startswith("#"))
    for part in " | ".join(parts).split(" | "):
        assert part == "all" or re.search(rf"\b{part}\b", documented), part
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "sh tests/run quick" in (ROOT / page).read_text(), page
