# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Finds instructions of compiled kernels that read a register which no instruction can have written before.

    python benchmarks/undefined_reads.py                     # all rows of tests/kernels/test_resources.py: 10 minutes
    python benchmarks/undefined_reads.py --rows 'sm80-*'
    python benchmarks/undefined_reads.py --cache ~/.cache/jax_fastattn      # kernels that have been compiled already

ptxas has compiled such a kernel: it read a thread's index one instruction ahead of the load (notebook/checks.md). PTX
has no such read, so no test of PTX finds it. Needs nvdisasm (`pip install --group dev`), and no GPU.

A register counts as written where some way from the kernel's entry writes it, under whatever predicate: what is left
can have no value. Uniform registers are left out, since nvdisasm does not print how many a descriptor has.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from machine_code import TEST_FOLDERS, blocks, disassembled, kernel_name, matching

ROOT = Path(__file__).parents[1]
# The first operand of these is no result.
_NO_RESULT = {
    "BAR", "BMOV", "BRA", "BREAK", "BSSY", "BSYNC", "CALL", "CCTL", "DEPBAR", "ERRBAR", "EXIT", "FENCE",
    "KILL", "LDGDEPBAR", "LDGSTS", "MEMBAR", "NANOSLEEP", "NOP", "PREEXIT", "RED", "RET", "ST", "STG", "STL", "STS",
    "STSM", "UBLKCP", "UBLKRED", "USETMAXREG", "UTMALDG", "UTMAPF", "UTMASTG", "WARPGROUP", "WARPSYNC",
    "YIELD",
}  # fmt: skip
_PREDICATES = {"DSETP", "FCHK", "FSETP", "HSETP2", "ISETP", "PLOP3", "R2P", "UISETP", "UPLOP3"}
_REGISTER = re.compile(r"(?<![\w.])R(\d+)(\.64)?(?!\w)")
# The stack pointer has a value at the entry.
_STACK = 1


class Read(NamedTuple):
    """A read of a register without a value.

    Attributes:
        index: the index of the instruction.
        register: the number of the register.
        instruction: the instruction.
    """

    index: int
    register: int
    instruction: str


class _Operands(NamedTuple):
    written: range
    read: tuple[int, ...]


def undefined_reads(instructions: Sequence[str]) -> list[Read]:
    """Returns the reads of registers that no way from the entry writes, in the order of the instructions.

    Args:
        instructions: of one kernel, as `machine_code.read_listing` has them.
    """
    operands = [_operands(x) for x in instructions]
    starts, successors = blocks(instructions)
    ends = [*starts[1:], len(instructions)]
    written = [{r for x in operands[a:b] for r in x.written} for a, b in zip(starts, ends, strict=True)]
    before: list[set[int] | None] = [None] * len(starts)
    before[0] = {_STACK}
    changed = [0]
    while changed:
        block = changed.pop()
        after = (before[block] or set()) | written[block]
        for following in successors[block]:
            known = before[following]
            if known is None or not after <= known:
                before[following] = after | (known or set())
                changed.append(following)
    found = []
    for start, end, known in zip(starts, ends, before, strict=True):
        if known is None:
            continue  # nothing leads there
        for i in range(start, end):
            found += [Read(i, r, instructions[i]) for r in operands[i].read if r not in known]
            known.update(operands[i].written)
    return found


def _operands(instruction: str) -> _Operands:
    """Returns which registers an instruction writes and reads."""
    if instruction.startswith("@!PT "):
        return _Operands(range(0), ())  # never runs
    words = re.sub(r"^@!?U?P\w+ ", "", instruction.replace(".reuse", ""))
    opcode, _, rest = words.partition(" ")
    name, arguments = opcode.split(".")[0], [x.strip() for x in rest.split(",")]
    written = range(0)
    if name not in _NO_RESULT and name not in _PREDICATES:
        while arguments and re.fullmatch(r"!?U?P\w+", arguments[0]):
            arguments.pop(0)
        result = arguments.pop(0) if arguments else ""
        if found := re.fullmatch(r"R(\d+)(\.64)?", result):
            written = range(int(found[1]), int(found[1]) + _result_registers(opcode))
    read = [(int(x[1]), x[2]) for argument in arguments for x in _REGISTER.finditer(argument)]
    registers = {r for first, is_pair in read for r in (first, *([first + 1] if is_pair else []))}
    if name == "LOP3" and registers == {*written}:
        registers = set()  # some bits of a register of flags get a value, which keeps the others
    return _Operands(written, tuple(sorted(registers)))


def _result_registers(opcode: str) -> int:
    """Returns how many registers an instruction writes."""
    if found := re.match(r"[A-Z]GMMA\.64x(\d+)x", opcode):
        return int(found[1]) // 2
    name, *kinds = opcode.split(".")
    if name in ("HMMA", "IMMA") or "128" in kinds:
        return 4
    if name == "LDSM":
        return int(kinds[-1]) if kinds[-1].isdigit() else 1
    return 2 if "64" in kinds or "WIDE" in kinds or (name == "CS2R" and "32" not in kinds) else 1


def of_object(code: bytes) -> dict[str, list[Read]]:
    """Returns the reads of the kernels of an object file, by class and method."""
    return {kernel_name(symbol): undefined_reads(found) for symbol, found in disassembled(code).items()}


def of_spec(spec: Any) -> dict[str, list[Read]]:
    """Compiles a compile key, and returns the reads of its kernels."""
    from jax_fastattn.compilation import compiler

    return of_object(compiler.compile_launches(spec)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="rows to check (default: all)")
    parser.add_argument("--cache", type=Path, help="a folder of compiled kernels, in place of rows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    options = parser.parse_args()
    kernels = failed = 0
    for name, found in _of_cache(options) if options.cache else _of_rows(options):
        kernels += len(found)
        for kernel, reads in found.items():
            failed += bool(reads)
            for read in reads:
                print(f"{name} {kernel}: instruction {read.index} reads R{read.register}: {read.instruction}")
    print(f"{kernels} kernels, {failed} with such reads")
    return int(failed > 0)


def _of_rows(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, list[Read]]]]:
    import test_resources  # type: ignore[import-not-found]

    rows = test_resources.rows()
    names = matching(list(rows), options.rows)
    with ProcessPoolExecutor(options.jobs) as pool:
        yield from zip(names, pool.map(of_spec, (rows[name] for name in names)), strict=True)


def _of_cache(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, list[Read]]]]:
    paths = [x for x in sorted(options.cache.rglob("*")) if x.is_file() and b"\x7fELF" in x.read_bytes()[:4096]]
    with ThreadPoolExecutor(options.jobs) as pool:
        yield from zip([x.name for x in paths], pool.map(lambda path: of_object(path.read_bytes()), paths), strict=True)


sys.path += [str(ROOT / folder) for folder in TEST_FOLDERS]

if __name__ == "__main__":
    raise SystemExit(main())
