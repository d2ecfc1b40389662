# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Sets up one environment of `tests/run` or `examples/run`: which Python, which versions, by uv where it can be had.

    python tests/environments.py newest    .venv-newest: the newest jax, flax, compiler for CUDA 13 and linters
    python tests/environments.py oldest    .venv-oldest: the oldest supported jax and flax, and the compiler for CUDA 12
    python tests/environments.py examples  .venv: what `examples/run` needs, with CUDA libraries if there is a GPU
    python tests/environments.py compiler  puts XLA's compiler for GPUs into a folder of the former two
    python tests/environments.py check     fails if another Python would have given .venv-newest a newer jax
    python tests/environments.py raise     writes tests/constraints anew, with the newest versions of today; needs uv

Versions are those of `tests/constraints`, so that no new release of another package can fail a test. They are raised by
hand, with a run of all tests. This module needs the standard library alone, and Python 3.11.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "tests" / "constraints"
MIN_PYTHON = (3, 11)
UV_TOOL = ROOT / ".venv-uv"

# What uv may do here: use the interpreters that are there, and no other.
UV_ENVIRONMENT = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}


@dataclass(frozen=True)
class Environment:
    """One environment.

    Attributes:
        directory: where it is, below the root of the repository.
        extras: of this package.
        groups: of dependencies, of its `pyproject.toml`.
        requirements: what it has besides.
        constraints: name of its file in `tests/constraints`.
        takes_newest: whether it wants the newest Python, or the oldest one.
        compiler: the packages that hold XLA's compiler for GPUs, of the version of its jaxlib.
    """

    directory: str
    extras: tuple[str, ...]
    groups: tuple[str, ...]
    requirements: tuple[str, ...]
    constraints: str
    takes_newest: bool = True
    compiler: tuple[str, ...] = ("jax-cuda13-plugin", "jax-cuda13-pjrt")

    def all_requirements(self) -> list[str]:
        """Returns what to install before this package."""
        text = tomllib.loads((ROOT / "pyproject.toml").read_text())
        project = text["project"]
        extras = [x for extra in self.extras for x in project["optional-dependencies"][extra]]
        groups = [x for group in self.groups for x in text["dependency-groups"][group]]
        return sorted({*project["dependencies"], *extras, *groups, *self.requirements})

    @property
    def constraints_file(self) -> Path:
        return CONSTRAINTS / f"{self.constraints}.txt"

    @property
    def python(self) -> Path:
        return ROOT / self.directory / "bin" / "python"


# Keras is for one test in tests/integrations/test_integrations_jax_nn.py; equinox and Keras are for recipes.
NEWEST = Environment(
    ".venv-newest",
    ("equinox", "examples", "keras"),
    ("dev", "docs", "test"),
    ("nvidia-cutlass-dsl[cu13]>=4.8,<4.9",),
    "newest",
)
OLDEST = Environment(
    ".venv-oldest",
    ("examples",),
    ("test",),
    ("jax==0.8.1", "jaxlib==0.8.1", "flax==0.12.0", "nvidia-cutlass-dsl>=4.8,<4.9"),
    "oldest",
    takes_newest=False,
    compiler=("jax-cuda13-plugin==0.8.1", "jax-cuda13-pjrt==0.8.1"),
)
EXAMPLES = Environment(".venv", ("examples",), (), (), "newest")
EXAMPLES_ON_GPU = Environment(".venv", ("examples", "cuda13"), (), (), "newest")


@dataclass(frozen=True)
class Interpreter:
    """A Python that starts, and has what it takes to make an environment."""

    path: str
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return f"Python {'.'.join(map(str, self.version))} ({self.path})"


def say(text: str) -> None:
    print(text, flush=True)


def interpreters() -> list[Interpreter]:
    """Returns the interpreters of this machine, in the order in which they are preferred among equals."""
    found: dict[tuple[str, tuple[int, int, int]], Interpreter] = {}
    for path in candidates():
        interpreter = started(path)
        if interpreter is not None:
            found.setdefault((os.path.realpath(path), interpreter.version), interpreter)
    return list(found.values())


def candidates() -> Iterator[str]:
    """Yields paths of what may be an interpreter: `$PYTHON`, pyenv's, those on PATH, uv's."""
    if named := os.environ.get("PYTHON"):
        yield named
    if pyenv := shutil.which("pyenv"):
        root = printed([pyenv, "root"]).strip()
        yield from sorted(str(path) for path in Path(root).glob("versions/*/bin/python")) if root else ()
    for directory in os.get_exec_path():
        names = Path(directory).glob("python3*") if Path(directory).is_dir() else ()
        yield from sorted(str(path) for path in names if re.fullmatch(r"python3(\.\d+)?", path.name))
    if uv := shutil.which("uv"):
        listed = printed([uv, "python", "list", "--only-installed", "--output-format", "json"])
        yield from (entry["path"] for entry in json.loads(listed or "[]") if entry.get("path"))


@functools.cache
def started(path: str) -> Interpreter | None:
    """Returns the interpreter at `path`; None if it does not start, is too old or cannot make environments."""
    script = "import sys, venv, ensurepip; print(*sys.version_info[:3], sys.implementation.name)"
    words = printed([path, "-c", script]).split()
    if len(words) != 4 or words[3] != "cpython":
        return None
    major, minor, micro = map(int, words[:3])
    return Interpreter(path, (major, minor, micro)) if (major, minor) >= MIN_PYTHON else None


def printed(command: list[str]) -> str:
    """Returns what a command prints; nothing if it fails."""
    environment = os.environ | UV_ENVIRONMENT
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def jax_version(constraints: Path, python: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the jax that a constraints file gives a Python: lines such as `jax==1.2 ; python_full_version >= '3.12'`.

    Raises:
        ValueError: none of its lines is for that Python.
    """
    line = r"^jax==([\d.]+)(?: ; python_full_version (<|>=) '(\d+)\.(\d+)')?$"
    for version, relation, major, minor in re.findall(line, constraints.read_text(), re.MULTILINE):
        if not relation or (python[:2] >= (int(major), int(minor))) == (relation == ">="):
            return tuple(map(int, version.split(".")))
    raise ValueError(f"{constraints} names no jax for Python {python[0]}.{python[1]}; run `raise` as its header says")


def in_order(environment: Environment, found: Iterable[Interpreter]) -> list[Interpreter]:
    """Returns the interpreters to try, the best one first: `$PYTHON` alone where that is set."""
    if named := os.environ.get("PYTHON"):
        return [interpreter for interpreter in found if interpreter.path == named]
    return sorted(found, key=lambda x: x.version[:2], reverse=environment.takes_newest)


def passed_over(environment: Environment, chosen: tuple[int, ...], found: Iterable[Interpreter]) -> list[Interpreter]:
    """Returns the interpreters that would have given the environment a newer jax than the chosen one does."""
    given = jax_version(environment.constraints_file, chosen)
    return [x for x in found if jax_version(environment.constraints_file, x.version) > given]


@functools.cache
def uv_command() -> str | None:
    """Returns uv: the one on PATH, or one from the index in an environment of its own; None if neither can be had."""
    if on_path := shutil.which("uv"):
        return on_path
    own = UV_TOOL / "bin" / "uv"
    install = ["-m", "pip", "install", "--only-binary", ":all:", "-c", str(CONSTRAINTS / "build.txt"), "uv"]
    if own.exists() or (run([sys.executable, "-m", "venv", str(UV_TOOL)]) and run([f"{own.parent}/python", *install])):
        return str(own)
    say("uv cannot be had; pip takes its place, and minutes longer")
    return None


def set_up(environment: Environment) -> None:
    """Makes the environment, on the best interpreter that its requirements have wheels for."""
    order = in_order(environment, interpreters())
    for interpreter in order:
        if prepared(environment, interpreter):
            install_package(environment)
            versions = jax_version(environment.constraints_file, interpreter.version)
            say(f"{environment.directory}: {interpreter}, jax {'.'.join(map(str, versions))}")
            return
    tried = "; ".join(map(str, order)) or os.environ.get("PYTHON", "none")
    sys.exit(
        f"Found no Python that {environment.directory} can be set up with; tried: {tried}. Install CPython 3.11 or "
        "newer with venv, or name one: PYTHON=/path/to/python. Without a network, an environment has to exist already."
    )


def prepared(environment: Environment, interpreter: Interpreter) -> bool:
    """Installs the requirements; returns whether they are there. What is there from an earlier run stays."""
    directory = ROOT / environment.directory
    mark, facts = directory / "installed.json", wanted_state(environment, interpreter)
    state = json.loads(mark.read_text()) if mark.exists() else {}
    if state == facts and environment.python.exists():
        return True
    say(f"setting up {environment.directory} with {interpreter}")
    if state.get("interpreter") != facts["interpreter"]:
        make(directory, interpreter)
    mark.unlink(missing_ok=True)
    requirements = environment.all_requirements()
    names, by = ", ".join(map(normalized, requirements)), "uv" if uv_command() else "pip"
    say(f"installing {names} and what they need, by {by}; this may take minutes")
    constraints = str(environment.constraints_file)
    command = [
        *installer(environment.python),
        "--only-binary",
        ":all:",
        "-c",
        constraints,
        *requirements,
    ]
    if not run(command):
        say(f"{environment.directory}: the requirements cannot be installed on {interpreter}; see above")
        return False
    mark.write_text(json.dumps(facts))
    return True


def make(directory: Path, interpreter: Interpreter) -> None:
    """Makes an empty environment in the place of whatever is there."""
    shutil.rmtree(directory, ignore_errors=True)
    uv = uv_command()
    command = [uv, "venv", "--quiet", "--python"] if uv else [interpreter.path, "-m", "venv"]
    run([*command, *([interpreter.path] if uv else []), str(directory)])


def wanted_state(environment: Environment, interpreter: Interpreter) -> dict[str, str]:
    """Returns what decides about the contents of an environment."""
    requirements = "\n".join([*environment.all_requirements(), environment.constraints_file.read_text()])
    return {"interpreter": str(interpreter), "requirements": hashlib.sha256(requirements.encode()).hexdigest()}


def installer(python: Path) -> list[str]:
    """Returns the command that installs into the environment of `python`."""
    uv = uv_command()
    if uv:
        return [uv, "pip", "install", "--quiet", "--python", str(python)]
    return [str(python), "-m", "pip", "install", "--quiet"]


def build_constraints() -> tuple[list[str], dict[str, str]]:
    """Returns what pins the versions of isolated builds: options of uv, or variables for pip."""
    build = str(CONSTRAINTS / "build.txt")
    if uv_command():
        return ["--build-constraints", build], {}
    # Which variable pip reads depends on its version.
    return [], {"PIP_CONSTRAINT": build, "PIP_BUILD_CONSTRAINT": build}


def install_package(environment: Environment) -> None:
    """Builds and installs this package as it is now."""
    say("building jax_fastattn and its C++ extension, and installing them")
    options, variables = build_constraints()
    again = ["--reinstall-package", "jax_fastattn"] if uv_command() else ["--force-reinstall"]
    if not run([*installer(environment.python), "--no-deps", *again, *options, str(ROOT)], variables):
        sys.exit(f"Cannot build and install this package into {environment.directory}; see above. It needs g++.")


def put_compiler(environment: Environment) -> None:
    """Puts XLA's compiler for GPUs into the folder `gpu-compiler` of an environment that exists.

    In the environment itself it would make each process look for GPUs.
    """
    folder = ROOT / environment.directory / "gpu-compiler"
    facts = "\n".join([*environment.compiler, environment.constraints_file.read_text()])
    mark, wanted = folder / "installed.txt", hashlib.sha256(facts.encode()).hexdigest()
    if mark.exists() and mark.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    say(f"installing {' and '.join(environment.compiler)} into {folder.relative_to(ROOT)}")
    options = ["--no-deps", "--only-binary", ":all:", "--target", str(folder), "-c", str(environment.constraints_file)]
    if not run([*installer(environment.python), *options, *environment.compiler]):
        sys.exit("XLA's compiler for GPUs cannot be installed; see above")
    mark.write_text(wanted)


def run(command: list[str], more: dict[str, str] | None = None, folder: Path | None = None) -> bool:
    """Runs a command in a folder, and prints its output if it fails; returns whether it succeeded."""
    environment = os.environ | UV_ENVIRONMENT | (more or {})
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        say(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def check() -> None:
    """Fails if a Python was passed over that gives a newer jax; says what the index has beyond the constraints."""
    used = started(str(NEWEST.python))
    better = passed_over(NEWEST, used.version, interpreters()) if used else []
    if used is None or better:
        sys.exit(
            f"{NEWEST.directory} has {used or 'no Python'}, and {', '.join(map(str, better)) or 'another'} gives a "
            "newer jax, which these tests would leave out. Unset PYTHON, or see above why its set-up failed."
        )
    say(beyond_constraints(outdated()))


def outdated() -> list[dict[str, str]] | None:
    """Returns what of `.venv-newest` has a newer release in the index; None if the index does not answer."""
    uv = uv_command()
    command = [uv, "pip", "list", "--python", str(NEWEST.python)] if uv else [str(NEWEST.python), "-m", "pip", "list"]
    listed = printed([*command, "--outdated", "--format", "json"])
    return json.loads(listed) if listed.strip() else None


def beyond_constraints(found: list[dict[str, str]] | None) -> str:
    """Returns a line about the direct requirements with newer releases."""
    if found is None:
        return "newer releases: could not ask the index"
    direct = {normalized(requirement) for requirement in NEWEST.all_requirements()}
    newer = [f"{x['name']} {x['latest_version']}" for x in found if normalized(x["name"]) in direct]
    return f"newer releases than tests/constraints: {', '.join(newer) or 'none'}"


def normalized(requirement: str) -> str:
    """Returns the name of a requirement, in the one spelling that names of packages have."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement)[0]).lower()


def raise_constraints() -> None:
    """Resolves the requirements of each environment anew, for each Python from 3.11 on."""
    uv = uv_command() or sys.exit("`raise` needs uv; install it")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    newest = sorted({*NEWEST.all_requirements(), *EXAMPLES_ON_GPU.all_requirements()})
    wanted = {
        "newest": newest,
        "oldest": [*OLDEST.all_requirements(), *OLDEST.compiler],
        "build": [*build, "cmake", "ninja", "uv"],
    }
    for name, requirements in wanted.items():
        command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--upgrade"]
        command += ["--no-header", "--no-annotate", "--strip-extras", "--only-binary", ":all:", "-"]
        done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        header = "# Versions of the test environments. `python tests/environments.py raise` writes this file.\n"
        (CONSTRAINTS / f"{name}.txt").write_text(header + done.stdout)


def main(name: str) -> None:
    """Does what the command line names."""
    has_driver = shutil.which("nvidia-smi") is not None
    environments = {"newest": NEWEST, "oldest": OLDEST, "examples": EXAMPLES_ON_GPU if has_driver else EXAMPLES}
    if name == "examples":
        say("found nvidia-smi: JAX for CUDA 13" if has_driver else "found no nvidia-smi: JAX for the CPU alone")
    if name in environments:
        set_up(environments[name])
    elif name == "compiler":
        for environment in (NEWEST, OLDEST):
            put_compiler(environment)
    else:
        {"check": check, "raise": raise_constraints}[name]()


if __name__ == "__main__":
    main(sys.argv[1])
