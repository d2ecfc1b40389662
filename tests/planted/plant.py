# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Plants faults, one at a time in a copy of this tree, and runs the cases that have to notice them.

    .venv-newest/bin/python tests/planted/plant.py                          every fault of `faults.toml`
    .venv-newest/bin/python tests/planted/plant.py prepass-rank limit-of-bits    some of them
    .venv-newest/bin/python tests/planted/plant.py --list                   their names, and what each does

First all cases have to pass in a copy without a fault. A fault is caught if one of its cases then fails. It is not if
pytest cannot collect the cases, if only their set-up fails, or if they take longer than `--timeout`. The exit status is
1 if a fault was not caught. Files that git ignores are not copied, except for the C++ extension, which is that of the
Python that runs this; faults in `csrc/` cannot be planted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """A change that makes the code wrong.

    Attributes:
        name: for the command line.
        what: what goes wrong, a sentence.
        file: relative to the root of the repository.
        text: what stands in the file, once.
        planted: what takes its place.
        cases: node ids of pytest, of which at least one has to fail.
    """

    name: str
    what: str
    file: str
    text: str
    planted: str
    cases: list[str]

    def plant(self, tree: Path) -> None:
        """Puts the fault into a tree.

        Raises:
            ValueError: the text does not stand in the file exactly once.
        """
        path = tree / self.file
        before = path.read_text()
        if (count := before.count(self.text)) != 1:
            raise ValueError(
                f"`text` of {self.name} is {count} times in {self.file}; expected once. Adapt faults.toml."
            )
        path.write_text(before.replace(self.text, self.planted))


@dataclass(frozen=True)
class Outcome:
    """What cases did.

    Attributes:
        status: of pytest; None if it did not end in time.
        seconds: of CPU time.
        failures: how each case failed that did; errors of its set-up are none.
        last: the last line that pytest printed.
    """

    status: int | None
    seconds: float
    failures: list[str]
    last: str

    @property
    def is_caught(self) -> bool:
        """Whether a case failed, and nothing else went wrong."""
        return self.status == 1 and len(self.failures) > 0

    @property
    def told(self) -> str:
        """The outcome in a line."""
        return " ".join(self.failures[0].split()) if self.is_caught else f"pytest ends with {self.status}: {self.last}"


def faults() -> dict[str, Fault]:
    """Returns all faults by name."""
    table = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
    return {name: Fault(name, **row) for name, row in table.items()}


def run(cases: Iterable[str], timeout: float, fault: Fault | None = None) -> Outcome:
    """Runs cases in a copy of this tree, into which it plants a fault if one is given."""
    with tempfile.TemporaryDirectory() as folder:
        tree, report = Path(folder) / "tree", Path(folder) / "report.xml"
        _copy(tree)
        if fault is not None:
            fault.plant(tree)
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        before = _cpu_seconds()
        try:
            done = subprocess.run(
                [*command, f"--junitxml={report}", *cases],
                cwd=tree, env=environment, timeout=timeout, capture_output=True, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(None, _cpu_seconds() - before, [], f"no end after {timeout:.0f} s")
        found = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        failures = [failure.get("message", "") for case in found for failure in case.iter("failure")]
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        return Outcome(done.returncode, _cpu_seconds() - before, failures, last)


def _copy(tree: Path) -> None:
    """Copies this tree, as it stands, with the C++ extension."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    extension = Path(_extension())
    shutil.copyfile(extension, tree / "jax_fastattn" / "ffi" / extension.name)


def _extension() -> str:
    """Returns the path of the C++ extension."""
    try:
        found = importlib.util.find_spec("jax_fastattn.ffi._ffi")
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        raise SystemExit("jax_fastattn is not installed here; run `sh tests/run`, then .venv-newest/bin/python")
    return found.origin


def _refuse_another_package() -> None:
    """Ends this process if Python does not import the package from PYTHONPATH: faults would be planted in vain."""
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "jax_fastattn" / "__init__.py"
        module.parent.mkdir()
        module.touch()
        command = [sys.executable, "-c", "import jax_fastattn; print(jax_fastattn.__file__)"]
        environment = {**os.environ, "PYTHONPATH": folder}
        printed = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        if (found := printed.stdout.strip()) != str(module):
            raise SystemExit(f"Python imports {found} whatever PYTHONPATH says; use .venv-newest/bin/python")


def _cpu_seconds() -> float:
    """Returns the CPU time of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    every = faults()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of all faults")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds for the cases of one (default: %(default)s)"
    )
    options = parser.parse_args()
    if unknown := {*options.names} - {*every}:
        parser.error(f"no fault has the name {', '.join(sorted(unknown))}; --list prints all")
    width = max(map(len, every))
    if options.list:
        print("\n".join(f"{name:{width}}  {fault.what}" for name, fault in every.items()))
        return 0
    _refuse_another_package()
    chosen = options.names or [*every]
    cases = dict.fromkeys(case for name in chosen for case in every[name].cases)
    without = run(cases, options.timeout * len(cases))
    if without.status != 0:
        raise SystemExit("\n".join(["Not all cases pass without a fault:", *without.failures, without.last]))
    outcomes = []
    for name in chosen:
        outcome = run(every[name].cases, options.timeout, every[name])
        outcomes.append(outcome)
        state = "caught" if outcome.is_caught else "NOT CAUGHT"
        print(f"{name:{width}}  {state:10}  {outcome.seconds:5.1f} s  {outcome.told[:120]}", flush=True)
    caught = sum(outcome.is_caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught, in {sum(x.seconds for x in outcomes):.0f} s of CPU time")
    return int(caught < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
