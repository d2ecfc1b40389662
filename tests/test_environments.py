# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which Python an environment takes, among stand-ins that print a version, and with which versions of packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import environments
import pytest

ROOT = Path(__file__).parents[1]

# What pyenv puts on PATH for each version that it has: it starts nothing if none is selected.
SHIM = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"


def program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def python(path: Path, version: str, implementation: str = "cpython") -> str:
    """A stand-in for an interpreter of that version."""
    return program(path, f"#!/bin/sh\necho {version} {implementation}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a Python; its PATH is the folder `bin`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.delenv("PYTHON", raising=False)
    environments.started.cache_clear()
    return tmp_path


def chosen(environment: environments.Environment = environments.NEWEST) -> str:
    """The path of the interpreter that an environment takes."""
    return environments.in_order(environment, environments.interpreters())[0].path


def test_shims_that_start_nothing_do_not_hide_the_newest_python(machine: Path) -> None:
    """The tests took Python 3.11, hence an older jax, and said nothing."""
    program(machine / "bin" / "python3.13", SHIM)
    python(machine / "bin" / "python3", "3 11 7")
    newest = python(machine / "pyenv" / "versions" / "3.13.0" / "bin" / "python", "3 13 0")
    python(machine / "pyenv" / "versions" / "3.8.18" / "bin" / "python", "3 8 18")
    program(machine / "bin" / "pyenv", f"#!/bin/sh\necho {machine}/pyenv\n")
    assert chosen() == newest
    assert chosen(environments.OLDEST) == f"{machine}/bin/python3"


def test_candidates_come_in_order(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = python(machine / "named", "3 11 2")  # taken although others are newer
    of_pyenv = python(machine / "pyenv" / "versions" / "3.12.1" / "bin" / "python", "3 12 1")
    program(machine / "bin" / "pyenv", f"#!/bin/sh\necho {machine}/pyenv\n")
    on_path = python(machine / "bin" / "python3.12", "3 12 4")
    of_uv = python(machine / "uv" / "python", "3 12 9")
    program(machine / "bin" / "uv", f"#!/bin/sh\necho '{json.dumps([{'path': of_uv}, {'path': None}])}'\n")
    found = [of_pyenv, on_path, of_uv]
    assert [x.path for x in environments.interpreters()] == found
    assert chosen() == of_pyenv
    monkeypatch.setenv("PYTHON", named)
    assert [x.path for x in environments.interpreters()] == [named, *found]
    assert chosen() == chosen(environments.OLDEST) == named


@pytest.mark.parametrize("version", ["3 10 13", "3 12 1 pypy", "no version"])
def test_an_interpreter_that_does_not_serve_is_no_candidate(version: str, machine: Path) -> None:
    python(machine / "bin" / "python3", version, "" if "pypy" in version else "cpython")
    assert environments.interpreters() == []


def test_the_newest_jax_of_each_python() -> None:
    file = environments.NEWEST.constraints_file
    versions = [environments.jax_version(file, (3, minor)) for minor in (11, 12, 13)]
    assert versions[0] < versions[1] == versions[2]
    assert environments.jax_version(environments.OLDEST.constraints_file, (3, 11)) == (0, 8, 1)


@pytest.mark.parametrize(("other", "is_better"), [("3 13 0", True), ("3 11 9", False)])
def test_all_tests_fail_if_a_python_with_a_newer_jax_was_passed_over(
    other: str, is_better: bool, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `PYTHON` set, for example."""
    used = python(machine / "venv" / "bin" / "python", "3 11 7")
    python(machine / "bin" / "python3.13", other)
    monkeypatch.setattr(environments.Environment, "python", Path(used))
    monkeypatch.setattr(environments, "outdated", lambda: None)
    if is_better:
        with pytest.raises(SystemExit, match=r"Python 3\.13\.0 \(.*/bin/python3\.13\) gives a newer jax"):
            environments.check()
    else:
        environments.check()
        assert capsys.readouterr().out == "newer releases: could not ask the index\n"


def test_what_the_index_has_beyond_the_constraints_is_one_line() -> None:
    found = [
        {"name": "jax", "version": "0.12.0.1", "latest_version": "0.13"},
        {"name": "Import_Linter", "version": "2", "latest_version": "3"},
        {"name": "etils", "version": "1", "latest_version": "2"},  # a requirement of a requirement
    ]
    want = "newer releases than tests/constraints: jax 0.13, Import_Linter 3"
    assert environments.beyond_constraints(found) == want
    assert environments.beyond_constraints([]) == "newer releases than tests/constraints: none"


@pytest.mark.parametrize(
    ("environment", "extra"),
    [(environments.NEWEST, "cuda13"), (environments.OLDEST, "cuda12")],
    ids=["newest", "oldest"],
)
def test_the_compiler_is_the_one_that_users_get(environment: environments.Environment, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (compiler,) = (x for x in environment.requirements if x.startswith("nvidia-cutlass-dsl"))
    assert compiler in project["optional-dependencies"][extra]


def test_each_requirement_has_one_version_for_each_python() -> None:
    for environment in (environments.NEWEST, environments.OLDEST, environments.EXAMPLES_ON_GPU):
        lines = environment.constraints_file.read_text().splitlines()
        pinned = {environments.normalized(line) for line in lines if "==" in line}
        requirements = [*environment.all_requirements(), *environment.compiler]
        missing = {environments.normalized(x) for x in requirements} - pinned
        assert not missing, environment


def test_the_compiler_for_gpus_is_put_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put anew if its version changes, and what was there before goes."""
    monkeypatch.setattr(environments, "ROOT", machine)
    monkeypatch.setattr(environments, "uv_command", lambda: None)
    folder, commands = machine / ".venv-newest" / "gpu-compiler", []

    def run(command: list[str]) -> bool:
        commands.append(command)
        folder.mkdir(parents=True)
        return True

    monkeypatch.setattr(environments, "run", run)
    for count, packages in ((1, ("jax-cuda13-pjrt==1",)), (1, ("jax-cuda13-pjrt==1",)), (2, ("jax-cuda13-pjrt==2",))):
        environments.put_compiler(replace(environments.NEWEST, compiler=packages))
        assert len(commands) == count
        assert commands[-1][-1] == packages[0]
    assert commands[0][commands[0].index("--target") + 1] == str(folder)


def test_an_environment_on_another_interpreter_is_made_anew(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "ROOT", machine)
    monkeypatch.setattr(environments.Environment, "all_requirements", lambda self: ["jax"])
    monkeypatch.setattr(environments, "uv_command", lambda: None)
    commands: list[list[str]] = []

    def run(command: list[str], more: dict[str, str] | None = None) -> bool:
        commands.append(command)
        if "venv" in command:
            python(Path(command[-1]) / "bin" / "python", "3 13 0")
        return True

    monkeypatch.setattr(environments, "run", run)
    first, second = (environments.Interpreter(f"/python{i}", (3, 12 + i, 0)) for i in (0, 1))
    for interpreter, made in ((first, True), (first, False), (second, True)):
        commands.clear()
        assert environments.prepared(environments.NEWEST, interpreter)
        assert [command[:3] for command in commands if "venv" in command] == [[interpreter.path, "-m", "venv"]] * made
        assert bool(commands) == made


def test_a_python_without_wheels_is_passed_over(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(machine / "bin" / "python3.15", "3 15 0")
    python(machine / "bin" / "python3.13", "3 13 0")
    tried: list[str] = []

    def prepared(environment: environments.Environment, interpreter: environments.Interpreter) -> bool:
        tried.append(Path(interpreter.path).name)
        return interpreter.version < (3, 15)

    monkeypatch.setattr(environments, "prepared", prepared)
    monkeypatch.setattr(environments, "install_package", lambda environment: None)
    environments.set_up(environments.NEWEST)
    assert tried == ["python3.15", "python3.13"]
    monkeypatch.setattr(environments, "prepared", lambda *_: False)
    with pytest.raises(SystemExit, match=r"tried: Python 3\.15\.0 .*; Python 3\.13\.0"):
        environments.set_up(environments.NEWEST)


def test_a_set_up_says_what_it_does(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line comes before the command that takes its time."""
    steps: list[str] = []

    def run(command: list[str], *_: object) -> bool:
        steps.append(capsys.readouterr().out)
        if "venv" in command:
            python(Path(command[-1]) / "bin" / "python", "3 13 0")
        return True

    python(machine / "bin" / "python3.13", "3 13 0")
    monkeypatch.setattr(environments, "run", run)
    monkeypatch.setattr(environments, "uv_command", lambda: None)
    environments.main("examples")
    making, installing, building = steps
    assert making.startswith("found no nvidia-smi: JAX for the CPU alone\nsetting up .venv with Python 3.13.0")
    assert "installing flax, jax, jaxlib, matplotlib, numpy, optax, tqdm and what they need, by pip" in installing
    assert building == "building jax_fastattn and its C++ extension, and installing them\n"
    assert capsys.readouterr().out.startswith(".venv: Python 3.13.0")


def test_the_scripts_start_with_any_python_that_starts(machine: Path) -> None:
    """`python3` is a shim of nothing."""
    program(machine / "bin" / "python3", SHIM)
    script = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    working = program(machine / "bin" / "python3.12", script)
    command = ["/bin/sh", str(ROOT / "tests" / "find_python.sh")]
    path = {"PATH": f"{machine}/bin:/usr/bin:/bin"}
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("python3.12", working)
