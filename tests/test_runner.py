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
TOOLS = ("pytest", "ruff", "pyright", "lint-imports", "mkdocs", "python")
SET_UP = """import os, sys
print(sys.argv[1], file=open({log!r}, "a"))
sys.exit(9 * (os.environ["FAILING"] == sys.argv[1]))
"""

Calls = dict[str, list[list[str]]]


def run(directory: Path, *arguments: str, failing: str = "nothing") -> tuple[int, Calls, str]:
    """Returns the exit status, the arguments of each call by `environment/tool`, and what was printed.

    The tool `failing` fails. Calls of tests/environments.py have the name of what they set up and no arguments.
    """
    (directory / "tests").mkdir(exist_ok=True)
    for name in ("run", "find_python.sh"):
        (directory / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    log = directory / "calls"
    (directory / "tests" / "environments.py").write_text(SET_UP.format(log=str(log)))
    # A PYTHONPATH of the caller may name another clone, which the tests would import instead of the installed package.
    shadowed = '[ "${PYTHONPATH:-}" != /another/clone ] || exit 8'
    stand_in = f'#!/bin/sh\n{shadowed}\necho "$0" "$@" >>{log}\ncase $0 in *"$FAILING") exit 9 ;; esac\n'
    for path in [directory / f".venv-{name}" / "bin" / tool for name in ("newest", "oldest") for tool in TOOLS]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stand_in)
        path.chmod(0o755)
    for name, printed in (("nproc", CORES), ("git", "1234567")):
        (directory / name).write_text(f"#!/bin/sh\necho {printed}\n")
        (directory / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "FAILING": failing,
        "PYTHON": sys.executable,
    }
    environment["PYTHONPATH"] = "/another/clone"
    command = ["sh", str(directory / "tests" / "run"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode or done.stdout.endswith("=== passed\n"), done.stderr
    calls: Calls = {}
    for line in log.read_text().splitlines():
        path, *rest = shlex.split(line)
        environment_name, _, tool = path.partition("/bin/")
        calls.setdefault(f"{environment_name.rpartition('-')[2]}/{tool}" if tool else path, []).append(rest)
    return done.returncode, calls, done.stdout


def options(arguments: list[str], name: str) -> list[str]:
    """Returns the values of an option that may be repeated."""
    return [value for option, value in itertools.pairwise(arguments) if option == name]


def test_all_checks_run_on_all_cores(tmp_path: Path) -> None:
    status, calls, _ = run(tmp_path, "all")
    assert status == 0
    assert sorted(calls) == sorted(
        [*(f"newest/{tool}" for tool in TOOLS), "oldest/pytest", "newest", "oldest", "check", "compiler"]
    )
    assert calls["newest/python"] == [["tests/distributions.py"]], "every wheel"
    assert calls["newest/mkdocs"] == [["build", "--strict"]]
    (newest, *programs), (oldest, *others) = calls["newest/pytest"], calls["oldest/pytest"]
    assert programs == others == [["-rs", "tests/test_gpu_programs.py"]]
    assert options(newest, "-n") == options(oldest, "-n") == [str(CORES)]
    # The newest environment leaves nothing out; the oldest what no version of JAX can change, and most cases of others.
    assert not {"--ignore", "--deselect", "--sample", "-k", "-m"} & set(newest)
    assert not {"--deselect", "-k", "-m"} & set(oldest)
    assert options(oldest, "--sample") == ["11"]
    (mainly,) = options(oldest, "--mainly")
    assert {"tests/test_grad.py", "tests/ring/test_ring_automatic.py", "tests/integrations/test_flax.py"} < {
        *mainly.split(",")
    }
    assert all((ROOT / file).is_file() for file in mainly.split(","))
    left_out = options(oldest, "--ignore")
    assert left_out
    for path in left_out:
        files = sorted((ROOT / path).glob("*.py")) or [ROOT / path]
        assert all(file.exists() for file in files), path


def test_ci_leaves_out_cases_alone(tmp_path: Path) -> None:
    _, every, _ = run(tmp_path, "all")
    (tmp_path / "calls").unlink()
    status, calls, _ = run(tmp_path, "ci")
    assert status == 0
    (newest, *_), (every_newest, *_) = calls.pop("newest/pytest"), every.pop("newest/pytest")
    assert newest[: len(every_newest)] == every_newest
    sample = newest[len(every_newest) :]
    assert sample == ["--sample", "11", "--turn", str(0x1234567)]
    (oldest, *_), (every_oldest, *_) = calls.pop("oldest/pytest"), every.pop("oldest/pytest")
    assert [x for x in oldest if x not in sample] == [x for x in every_oldest if x not in sample]
    assert oldest[oldest.index("--sample") :][:4] == sample
    assert calls.pop("newest/python") == [[*every.pop("newest/python")[0], *sample[2:]]]
    assert calls == every


def test_a_sample_has_most_cases_of_the_named_files() -> None:
    files = ["tests/test_reference.py", "tests/test_split.py"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files, "--sample", "4", "--mainly", files[0]]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts = collections.Counter(line.partition("[")[0] for line in printed.splitlines() if "::" in line)
    found = {file: [n for function, n in counts.items() if function.startswith(file)] for file in files}
    assert max(found[files[0]]) > 1 and set(found[files[1]]) == {1}


def test_without_arguments_it_runs_what_a_change_needs(tmp_path: Path) -> None:
    status, calls, _ = run(tmp_path)
    assert status == 0
    assert sorted(calls) == sorted([*(f"newest/{tool}" for tool in TOOLS if tool != "python"), "newest"])
    contract, kernels = calls["newest/pytest"]
    assert options(contract, "-n") == options(kernels, "-n") == [str(CORES)]
    files = {argument for argument in contract if argument.startswith("tests/")}
    assert {"tests/test_api.py", "tests/test_grad.py", "tests/test_transforms.py", "tests/test_vmap.py"} < files
    assert all((ROOT / file).is_file() for file in files)
    assert "@tests/kernels/brief.txt" in kernels


def test_each_kernel_is_compiled_and_emulated_once_by_what_a_change_needs() -> None:
    """Each line of the list names a case that exists; together they have each kernel of both families."""
    pytest.importorskip("cutlass")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "@tests/kernels/brief.txt"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = (ROOT / "tests" / "kernels" / "brief.txt").read_text().split("\n")
    assert {line for line in printed.splitlines() if "::" in line} == {line for line in wanted if line}


@pytest.mark.parametrize("part", ["", "all"])
@pytest.mark.parametrize("tool", ["newest", "newest/bin/pyright", "newest/bin/mkdocs", "newest/bin/pytest"])
def test_a_check_that_fails_fails_the_command(tool: str, part: str, tmp_path: Path) -> None:
    status, calls, printed = run(tmp_path, *part.split(), failing=tool)
    assert status == 9
    assert ("newest/pytest" in calls) == (tool != "newest")
    assert ("=== linters: failed" in printed) == tool.endswith(("pyright", "mkdocs"))


@pytest.mark.parametrize("tool", ["oldest", "check", "newest/bin/python", "oldest/bin/pytest"])
def test_a_check_of_all_that_fails_fails_the_command(tool: str, tmp_path: Path) -> None:
    status, calls, _ = run(tmp_path, "all", failing=tool)
    assert status == 9
    assert ("newest/pytest" in calls) == tool.endswith("pytest")


def test_packages_are_a_part(tmp_path: Path) -> None:
    status, calls, _ = run(tmp_path, "package")
    assert status == 0
    assert calls == {"newest": [[]], "newest/python": [["tests/distributions.py"]]}
    status, _, _ = run(tmp_path, "package", failing="newest/bin/python")
    assert status == 9


def test_each_stage_says_how_long_it_took_last_time(tmp_path: Path) -> None:
    _, _, first = run(tmp_path)
    _, _, second = run(tmp_path)
    assert "=== set-up of .venv-newest (last time: no time known)" in first
    for stage in ("set-up of .venv-newest", "contract, gradients, transformations"):
        assert re.search(rf"=== {stage} \(last time: 0 min \d+ s\)", second)


def test_every_part_is_documented() -> None:
    script = (ROOT / "tests" / "run").read_text()
    parts = re.findall(r"^  ([a-z |]+)\)$", script, re.MULTILINE)
    documented = "".join(line for line in script.splitlines(keepends=True) if line.startswith("#"))
    assert len(parts) == 6
    for part in parts:
        assert part == "change" or re.search(rf"\b{part}\b", documented), part
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        assert all(f"sh tests/run {part}" in text for part in ("all", "ci")), page
    assert (ROOT / ".ci" / "run").read_text().endswith("exec sh tests/run ci\n")
