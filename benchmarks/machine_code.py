# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the machine code of two commits, kernel by kernel: a change of structure alone leaves it as it is.

    python benchmarks/machine_code.py --before main --after HEAD
    python benchmarks/machine_code.py --before main --after HEAD --rows 'sm90-*-forward-*' '*-d192v128-*'

Compiles the compile keys of `rows` in `tests/kernels/test_resources.py`, those of each commit in a git worktree of it,
and disassembles them with nvdisasm (`pip install --group dev`). Needs no GPU and no C++ extension. For each kernel of a
row that both commits have it prints

    equal          every instruction is the same
    moved          every instruction is the same, except for where parameters lie
    same opcodes   the same instructions, with other operands or in another order
    fewer, more    fewer or more instructions
    other          as many instructions, of which some are others

and what changed among registers, local and shared memory, the number of instructions, and that in each loop. The exit
status is 1 if a kernel changed beyond the limits: registers, local and shared memory have to be equal; a kernel may
have `MORE_INSTRUCTIONS` more, a loop `MORE_IN_LOOP` or `MORE_OF_LOOP`. Listings are kept by commit, so that a second
comparison compiles only what is new. Commits from before this script have no `rows`.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gzip
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "machine_code"
# Where `test_resources` and its helpers are.
TEST_FOLDERS = ("tests", "tests/kernels", "tests/kernels/emulator")

# Loops of at most so many instructions wait for a barrier or a counter; ptxas may split or join them.
_WAIT = 6
# Classes and methods of kernels that have other names today: kernels of two commits pair by class and method, wherever
# their module lies.
RENAMED: dict[str, str] = {
    "FusedKernel.kernel": "DkdvDqKernel.kernel",
    "WideKernel.kernel": "DkdvKernel.kernel",
    "StatisticsKernel.kernel": "PreprocessKernel.prologue",
    "StatisticsKernel.later": "PreprocessKernel.background",
}
# By how many instructions a kernel may grow, and a loop, where the larger one of a number and of a share of it counts.
MORE_INSTRUCTIONS, MORE_IN_LOOP, MORE_OF_LOOP = 10, 2, 0.01


@dataclass(frozen=True)
class Kernel:
    """What one kernel compiles to.

    Attributes:
        registers: per thread.
        local_bytes: of local memory per thread; 0 if nothing is spilled.
        shared_bytes: of dynamic shared memory per CTA.
        instructions: in order; a branch names the index of its target.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    instructions: list[str] = field(repr=False)


@dataclass(frozen=True)
class Change:
    """What became of a kernel.

    Attributes:
        verdict: see the docstring of the module.
        details: what changed, for people.
        allowed: whether a change of structure may do that.
    """

    verdict: str
    details: tuple[str, ...]
    allowed: bool


def compare(before: Kernel, after: Kernel) -> Change:
    """Returns what became of a kernel."""
    old, new = before.instructions, after.instructions
    details, allowed = [], True
    for name in ("registers", "local_bytes", "shared_bytes"):
        values = getattr(before, name), getattr(after, name)
        if values[0] != values[1]:
            details.append(f"{name} {values[0]} -> {values[1]}")
            allowed = False
    if old == new:
        return Change("equal", tuple(details), allowed)
    if [_without_parameters(x) for x in old] == [_without_parameters(x) for x in new]:
        return Change("moved", tuple(details), allowed)
    if len(old) != len(new):
        details.append(f"instructions {len(old)} -> {len(new)}")
    allowed &= len(new) <= len(old) + MORE_INSTRUCTIONS
    sizes = loop_sizes(old), loop_sizes(new)
    if len(sizes[0]) != len(sizes[1]):
        details.append(f"loops {sizes[0]} -> {sizes[1]}")
        allowed = False
    for size, new_size in zip(*sizes, strict=False):
        if size != new_size:
            details.append(f"loop {size} -> {new_size}")
            allowed &= new_size <= size + max(MORE_IN_LOOP, size * MORE_OF_LOOP)
    if _opcodes(old) == _opcodes(new):
        return Change("same opcodes", tuple(details), allowed)
    verdict = "fewer" if len(new) < len(old) else "more" if len(new) > len(old) else "other"
    return Change(verdict, tuple(details), allowed)


def _without_parameters(instruction: str) -> str:
    return re.sub(r"c\[0x0\]\[0x[0-9a-f]+\]", "c[0x0][]", instruction)


def _opcode(instruction: str) -> str:
    words = instruction.split(" ")
    return words[1] if words[0].startswith("@") else words[0]


def _opcodes(instructions: Sequence[str]) -> Counter[str]:
    return Counter(_opcode(x) for x in instructions)


# Listings


def read_listing(text: str) -> dict[str, list[str]]:
    """Reads the instructions of every kernel from what `nvdisasm -c` prints, by the kernel's symbol."""
    kernels = {}
    for section in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]:
        symbol = section[: section.index(",")]
        instructions: list[str] = []
        labels: dict[str, int] = {}
        for line in section.splitlines():
            if label := re.match(r"(\.L_\w+):", line):
                labels[label[1]] = len(instructions)
            elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
                instructions.append(re.sub(r"\s+", " ", found[1]))
        while instructions and instructions[-1] == "NOP":  # up to a multiple of 128 bytes
            instructions.pop()
        kernels[symbol] = [_with_indices(x.replace(symbol, "kernel"), labels) for x in instructions]
    return kernels


def _with_indices(instruction: str, labels: dict[str, int]) -> str:
    return re.sub(r"\.L_\w+", lambda label: f"@{labels[label[0]]}" if label[0] in labels else label[0], instruction)


def kernel_name(symbol: str) -> str:
    """Returns a kernel's class and method, without its module, the types of its arguments and its number."""
    found = re.search(r"cutlass_(\w+?)_jax_fastattnkernels[a-z0-9_]*([A-Z]\w*?)_object", symbol)
    return f"{found[2]}.{found[1]}" if found else symbol


# Loops


def loop_sizes(instructions: Sequence[str]) -> list[int]:
    """Returns how many instructions each natural loop has, those of inner loops included, in the order of their heads.

    Leaves out loops that only wait. Code that ptxas has put out of line counts for the loop that it belongs to.
    """
    starts, successors = blocks(instructions)
    predecessors: list[list[int]] = [[] for _ in starts]
    for block, following in enumerate(successors):
        for other in following:
            predecessors[other].append(block)
    dominators = _dominators(successors, predecessors)
    loops: dict[int, set[int]] = {}
    for block, following in enumerate(successors):
        for head in following:
            if dominators[block] >> head & 1:
                loops[head] = loops.get(head, {head}) | _body(head, block, predecessors)
    ends = [*starts[1:], len(instructions)]
    sizes = [sum(ends[block] - starts[block] for block in loops[head]) for head in sorted(loops)]
    return [size for size in sizes if size > _WAIT]


def blocks(instructions: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Returns the first instruction of each basic block, and the blocks that follow each."""
    targets = [_target(x) for x in instructions]
    leads = {0} | {target for target in targets if target is not None}
    leads |= {i + 1 for i, x in enumerate(instructions) if targets[i] is not None or _ends(x)}
    starts = sorted(start for start in leads if start < len(instructions))
    index = {start: block for block, start in enumerate(starts)}
    successors = []
    for end in [*starts[1:], len(instructions)]:
        last, target = instructions[end - 1], targets[end - 1]
        following = [] if target is None else [index[target]]
        if not _ends(last) and end < len(instructions):
            following.append(index[end])
        successors.append(following)
    return starts, successors


def _target(instruction: str) -> int | None:
    """The index of the instruction that this one names: where a branch goes, or where threads meet again."""
    found = re.search(r"\(@(\d+)\)", instruction)
    return int(found[1]) if found else None


def _ends(instruction: str) -> bool:
    """Returns whether the next instruction never follows this one."""
    return bool(re.match(r"(BRA|EXIT|JMP|RET\S*)( |$)", instruction)) and not re.search(r" !?U?P\d", instruction)


def _dominators(successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each block those that all ways to it pass, as the bits of an integer; 0 if there is no way."""
    order, seen, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:
        block, following = stack[-1]
        other = next((x for x in following if x not in seen), None)
        if other is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(other)
            stack.append((other, iter(successors[other])))
    dominators = [-1 if block in seen else 0 for block in range(len(successors))]
    dominators[0] = 1
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            bits = -1
            for other in predecessors[block]:
                bits &= dominators[other] if other in seen else -1
            bits |= 1 << block
            changed |= bits != dominators[block]
            dominators[block] = bits
    return dominators


def _body(head: int, tail: int, predecessors: Sequence[Sequence[int]]) -> set[int]:
    body, stack = {head, tail}, [tail] if tail != head else []
    while stack:
        for block in predecessors[stack.pop()]:
            if block not in body:
                body.add(block)
                stack.append(block)
    return body


# Commits


def main() -> int:
    options = parse_arguments()
    if options.worker:
        compile_rows(options)
        return 0
    sides = [listings(git("rev-parse", f"{commit}^{{commit}}"), options) for commit in (options.before, options.after)]
    return report(*sides)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="a commit")
    parser.add_argument("--after", default="HEAD", help="a commit (default: HEAD)")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="rows to compare (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile (default: all cores)")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of listings (default: {CACHE})")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("NUMBER", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.before and not options.worker:
        parser.error("--before is required")
    return options


def report(before: dict[str, dict[str, Kernel]], after: dict[str, dict[str, Kernel]]) -> int:
    """Prints what became of every kernel; returns the exit status."""
    verdicts: Counter[str] = Counter()
    failed = 0
    for row in sorted(before.keys() & after.keys()):
        pairs = dict.fromkeys([*before[row], *after[row]])
        for name in pairs:
            old, new = before[row].get(name), after[row].get(name)
            if old is None or new is None:
                change = Change("gone" if new is None else "new", (), allowed=False)
            else:
                change = compare(old, new)
            verdicts[change.verdict] += 1
            failed += not change.allowed
            mark = "" if change.allowed else "  <-- beyond the limits"
            print(f"{row:50} {name:36} {change.verdict:12} {', '.join(change.details)}{mark}")
    for title, rows in (("before", before.keys() - after.keys()), ("after", after.keys() - before.keys())):
        if rows:
            print(f"rows only {title}: {', '.join(sorted(rows))}")
    if not verdicts:
        print("no row of both commits matches")
        return 1
    counts = [f"{count} {verdict}" for verdict, count in verdicts.most_common()]
    print("; ".join([*counts, f"{failed} beyond the limits"]))
    return int(failed > 0)


def listings(commit: str, options: argparse.Namespace) -> dict[str, dict[str, Kernel]]:
    """Returns the kernels of the rows of a commit, compiled where they are not in the cache."""
    folder = options.cache / commit / f"dsl-{importlib.metadata.version('nvidia-cutlass-dsl')}"
    folder.mkdir(parents=True, exist_ok=True)
    names = folder / "rows.json"
    if not names.exists() or not all(
        (folder / f"{row}.json.gz").exists() for row in matching(json.loads(names.read_text()), options.rows)
    ):
        with worktree(commit) as tree:
            environment = {
                **os.environ,
                "PYTHONPATH": ":".join([tree, *(f"{tree}/{folder}" for folder in TEST_FOLDERS)]),
            }
            command = [sys.executable, __file__, "--cache", str(folder), "--rows", *options.rows, "--worker"]
            workers = [
                subprocess.Popen([*command, str(i), str(options.jobs)], env=environment, cwd=tree)
                for i in range(options.jobs)
            ]
            if any([worker.wait() for worker in workers]):
                raise SystemExit(f"rows of {commit} do not compile")
    return {row: load(folder / f"{row}.json.gz") for row in matching(json.loads(names.read_text()), options.rows)}


def matching(rows: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Returns the rows that some pattern matches."""
    return [row for row in rows if any(fnmatch.fnmatchcase(row, pattern) for pattern in patterns)]


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[str]:
    """Checks a commit out, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        tree = f"{folder}/tree"
        git("worktree", "add", "--detach", "--quiet", tree, commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", tree)


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def load(path: Path) -> dict[str, Kernel]:
    """Reads what `compile_rows` wrote, by today's names."""
    listing = json.loads(gzip.decompress(path.read_bytes()))
    return {RENAMED.get(name, name): Kernel(**kernel) for name, kernel in listing.items()}


# One of the processes that compile. Its jax_fastattn and its rows are those of the worktree.


def compile_rows(options: argparse.Namespace) -> None:
    """Compiles a share of the rows of the commit whose tree is on the path."""
    # The folders of the worktree come first. A commit whose `resources` lies in the package is read by today's.
    sys.path += [str(ROOT / folder) for folder in TEST_FOLDERS]
    import test_resources  # type: ignore[import-not-found]

    number, count = options.worker
    rows = test_resources.rows()
    write(options.cache / "rows.json", json.dumps(list(rows)).encode())
    for row in matching(list(rows), options.rows)[number::count]:
        path = options.cache / f"{row}.json.gz"
        if not path.exists():
            print(f"compiling {row}", file=sys.stderr, flush=True)
            write(path, gzip.compress(json.dumps(compiled(rows[row])).encode()))


def write(path: Path, content: bytes) -> None:
    """Writes a file at once: others may write it too."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def compiled(spec: Any) -> dict[str, dict[str, Any]]:
    """Returns the kernels of a compile key, as the fields of `Kernel`."""
    from resources import kernel_resources  # type: ignore[import-not-found]

    from jax_fastattn.compilation import compiler

    code, shared_bytes = compiler.compile_launches(spec)
    instructions = disassembled(code)
    return {
        kernel_name(kernel.name): {
            "registers": kernel.registers,
            "local_bytes": kernel.local_bytes,
            "shared_bytes": kernel.shared_bytes,
            "instructions": instructions[kernel.name],
        }
        for kernel in kernel_resources(code, shared_bytes)
    }


def disassembled(code: bytes) -> dict[str, list[str]]:
    """Returns the instructions of every kernel in an object file, by the kernel's symbol."""
    from resources import cubin  # type: ignore[import-not-found]

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(code))
        file.flush()
        text = subprocess.run([disassembler(), "-c", file.name], check=True, stdout=subprocess.PIPE, text=True).stdout
    return read_listing(text)


def disassembler() -> str:
    """Path of nvdisasm: that of the package of the group `dev`, else that of a CUDA toolkit on PATH.

    Raises:
        SystemExit: there is neither.
    """
    packaged = [path for folder in sys.path for path in Path(folder or ".").glob("nvidia/*/bin/nvdisasm")]
    found = str(packaged[0]) if packaged else shutil.which("nvdisasm")
    if found is None:
        raise SystemExit("nvdisasm is not installed; run `pip install --group dev`")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
