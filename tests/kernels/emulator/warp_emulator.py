# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`ptx_emulator` for kernels whose warps have different roles: named barriers block, and warps run in several orders.

What it catches beyond `ptx_emulator`: a missing barrier between warps, if one of the schedules then reads a byte too
early or overwrites one too early; a barrier at which too many threads arrive; warps that wait for an aligned barrier
at different instructions; warps that wait forever. The target of a cp.async is NaN until the warp that issued it waits.
On demand it finds any two accesses to shared memory that no barrier orders, under one schedule (`Races`).

CTAs run one after another. None may wait for a count that a later one changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from ptx_emulator import _TYPES, Cta, Memory, parse

# Which warps run while they can: all in step, those of the first half, those of the second half, or in random orders.
SCHEDULES = ("step", "first", "second", "random")


class Race(RuntimeError):
    """Two warps access a byte of shared memory, one of them writes, and no barrier orders them."""


class Races:
    """Raises `Race` at the second of two such accesses, whichever comes first in this run.

    What a warp does between two of its barriers is one step. A warp knows up to which step of each other one all is
    done: at a barrier, who waits learns what those who arrive know. All lanes of a warp count as one.
    """

    def __init__(self, warps: int, nbytes: int):
        # Steps count from 1; `known[a, b]` is the last one of b that a knows to be done, `known[a, a]` its own present.
        self.known = np.eye(warps, dtype=np.int64)
        self.told: dict[int, np.ndarray] = {}
        words = nbytes // 4
        self.writer, self.written, self.read = (np.zeros(n, np.int64) for n in (words, words, (warps, words)))

    def access(self, warp: int, indices: np.ndarray, *, writes: bool, flies: bool = False) -> None:
        """A warp reads or writes bytes [n, size]; if the write still flies, nobody may know that it is done."""
        words, known = np.unique(indices // 4), self.known[warp]
        writers, written = self.writer[words], self.written[words]
        wrong = (writers != warp) & (written > known[writers])
        if writes:
            others = np.arange(len(known)) != warp
            wrong |= (self.read[np.ix_(others, words)] > known[others, None]).any(0)
            self.writer[words] = warp
            self.written[words] = np.iinfo(np.int64).max if flies else known[warp]
        else:
            self.read[warp, words] = known[warp]
        if wrong.any():
            kind = "writes" if writes else "reads"
            raise Race(f"warp {warp} {kind} byte {4 * words[wrong][0]}; no barrier orders it and another access")

    def arrive(self, warp: int, barrier: int) -> None:
        """A warp tells what it knows, and begins a step."""
        self.told[barrier] = np.maximum(self.told.get(barrier, 0), self.known[warp])
        self.known[warp, warp] += 1

    def leave(self, warps: Iterable[int], barrier: int) -> None:
        """The barrier is complete; these warps have waited for it."""
        told = self.told.pop(barrier)
        for warp in warps:
            self.known[warp] = np.maximum(self.known[warp], told)


class WarpCta(Cta):
    """One CTA whose threads wait at barriers, except at those that are `left_out`."""

    def __init__(
        self, *arguments: Any, schedule: str = "step", left_out: Collection[int] = (), finds_races: bool = False
    ):
        super().__init__(*arguments)
        self.left_out = left_out
        self.races = Races(self.threads // 32, len(self.shared)) if finds_races else None
        self.warps = self.tid // 32
        self.random = np.random.default_rng(0)
        first = self.warps < self.threads // 64
        self.rank = np.zeros(self.threads) if schedule == "step" else np.where(first == (schedule == "first"), 0, 1)
        self.shuffles = schedule == "random"
        # The barrier that a thread waits at, and the instruction, -1 if other threads may wait at another one.
        self.waits_at, self.waits_in = np.full(self.threads, -1), np.full(self.threads, -1)
        self.arrived: dict[int, int] = {}
        self.copies: dict[int, tuple[list[Any], list[Any]]] = {}

    def run(self) -> None:
        """Runs to the end."""
        super().run()
        left = {barrier: arrived for barrier, arrived in self.arrived.items() if arrived}
        if left:
            raise RuntimeError(f"threads have arrived at barriers where none waits: {left}")

    def execute(self, opcode: str, operands: list[str], active: np.ndarray) -> None:
        super().execute(opcode, operands, active)
        if self.shuffles and self.random.random() < 0.02:
            self.rank = self.random.permutation(self.threads // 32)[self.warps]
            self.goes_on = False

    def choose(self, pc: np.ndarray, ready: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Threads that advance together: of the first in rank those with the smallest counter."""
        ready = ready & (self.waits_at < 0)
        if not ready.any():
            raise RuntimeError(f"all warps wait: at barriers {np.unique(self.waits_at)}, arrived {self.arrived}")
        return super().choose(pc, ready & (self.rank == self.rank[ready].min()))

    def do_bar(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[0] != "warp":
            self._barrier(parts, operands, active, aligned=True)

    def do_barrier(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        self._barrier(parts, operands, active, aligned="aligned" in parts)

    def _barrier(self, parts: list[str], operands: list[str], active: np.ndarray, *, aligned: bool) -> None:
        self.goes_on = False
        kind = parts[1] if parts[0] == "cta" else parts[0]
        if kind not in ("sync", "arrive"):
            raise NotImplementedError(parts)
        barriers = np.where(active, self.get(operands[0], np.uint32).astype(np.int64), -1)
        for barrier in np.setdiff1d(barriers[active], list(self.left_out)):
            these = barriers == barrier
            expected = int(self.get(operands[1], np.uint32)[these][0]) if len(operands) > 1 else self.threads
            self.arrived[barrier] = self.arrived.get(barrier, 0) + int(these.sum())
            if kind == "sync":
                self.waits_at[these] = barrier
                self.waits_in[these] = self.here if aligned else -1
            if self.races is not None:
                for warp in np.unique(self.warps[these]):
                    self.races.arrive(warp, barrier)
            if self.arrived[barrier] > expected:
                raise RuntimeError(f"{self.arrived[barrier]} threads at barrier {barrier} of {expected}")
            if self.arrived[barrier] == expected:
                self._complete(barrier)

    def _complete(self, barrier: int) -> None:
        waiting = self.waits_at == barrier
        if len(places := np.unique(self.waits_in[waiting])) > 1:
            raise RuntimeError(f"threads wait at aligned barrier {barrier} in instructions {places}")
        if self.races is not None:
            self.races.leave(np.unique(self.warps[waiting]), barrier)
        self.arrived[barrier] = 0
        self.waits_at[waiting] = -1

    def do_ld(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        # Before it: the address may be among the registers that it writes.
        if any(x.startswith("shared") for x in parts):
            size = len(self.names(operands[0])) * np.dtype(_TYPES[parts[-1]]).itemsize
            self._access(operands[1], size, active, writes=False)
        super().do_ld(parts, operands, active)

    def do_st(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        super().do_st(parts, operands, active)
        if "shared" in parts:
            size = len(self.names(operands[1])) * np.dtype(_TYPES[parts[-1]]).itemsize
            self._access(operands[0], size, active, writes=True)

    def do_ldmatrix(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        self._access(operands[1], 16, active, writes=False)
        super().do_ldmatrix(parts, operands, active)

    def _access(self, operand: str, size: int, active: np.ndarray, *, writes: bool) -> None:
        if self.races is None:
            return
        indices = self.address(operand, np.uint32)[:, None] + np.arange(size)
        for warp in np.unique(self.warps[active]):
            self.races.access(warp, indices[active & (self.warps == warp)], writes=writes)

    def do_cp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        for warp in np.unique(self.warps[active]):
            self.open_copies, self.groups = self.copies.get(warp, ([], []))
            groups = list(self.groups)
            super().do_cp(parts, operands, active & (self.warps == warp))
            self.copies[warp] = (self.open_copies, self.groups)
            if self.races is None or parts[1] == "commit_group":
                continue
            landed = [copy for group in groups[: len(groups) - len(self.groups)] for copy in group]
            for target, _ in landed if parts[1] == "wait_group" else self.open_copies[-1:]:
                self.races.access(warp, target, writes=True, flies=parts[1] != "wait_group")

    def do_setp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        super().do_setp(parts, operands, active)
        if operands[0] == "done" and not self.registers["done"][active].all():
            raise RuntimeError(f"CTA {self.block} waits for a count that only a later one changes")

    def do_red(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses = self.address(operands[0], np.uint64)
        for i, name in enumerate(self.names(operands[1])):
            self.add_to_sums(addresses + 4 * i, self.get(name, _TYPES[parts[-1]]), active)

    def do_atom(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses, terms = self.address(operands[1], np.uint64), self.get(operands[2], np.int32)
        self.put(operands[0], self.add_to_count(parts, addresses, terms, active), active)


def launch(
    ptx: str,
    parameters: list[Any],
    memory: Memory,
    blocks: int,
    shared_bytes: int,
    *,
    begins_early: bool = False,
    **options: Any,
) -> None:
    """Runs `blocks` CTAs (grid x only) one after another. `options` are those of `WarpCta`."""
    program = parse(ptx)
    memory.begin(early=begins_early)
    for block in range(blocks):
        WarpCta(program, parameters, memory, block, shared_bytes, **options).run()
