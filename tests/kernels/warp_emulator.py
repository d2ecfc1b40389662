# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`ptx_emulator` for kernels whose warps have different roles: named barriers block, and warps run in several orders.

What it catches beyond `ptx_emulator`: a missing barrier between warps, if one of the schedules then reads a byte too
early or overwrites one too early; a barrier at which too many threads arrive; warps that wait forever. The target of a
cp.async is NaN until the warp that issued it waits.

CTAs run one after another. None may wait for a count that a later one changes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from ptx_emulator import _TYPES, Cta, Memory, parse

# Which warps run while they can: all in step, those of the first half, those of the second half, or in random orders.
SCHEDULES = ("step", "first", "second", "random")


class WarpCta(Cta):
    """One CTA whose threads wait at barriers, except at those that are `left_out`."""

    def __init__(self, *arguments: Any, schedule: str = "step", left_out: Collection[int] = ()):
        super().__init__(*arguments)
        self.left_out = left_out
        self.warps = self.tid // 32
        self.random = np.random.default_rng(0)
        first = self.warps < self.threads // 64
        self.rank = np.zeros(self.threads) if schedule == "step" else np.where(first == (schedule == "first"), 0, 1)
        self.shuffles = schedule == "random"
        self.waits_at = np.full(self.threads, -1)
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
        if parts[0] == "warp":
            return
        self.goes_on = False
        kind = parts[1] if parts[0] == "cta" else parts[0]
        barriers = np.where(active, self.get(operands[0], np.uint32), -1)
        for barrier in np.setdiff1d(barriers[active], list(self.left_out)):
            these = barriers == barrier
            expected = int(self.get(operands[1], np.uint32)[these][0]) if len(operands) > 1 else self.threads
            self.arrived[barrier] = self.arrived.get(barrier, 0) + int(these.sum())
            if kind == "sync":
                self.waits_at[these] = barrier
            elif kind != "arrive":
                raise NotImplementedError(parts)
            if self.arrived[barrier] > expected:
                raise RuntimeError(f"{self.arrived[barrier]} threads at barrier {barrier} of {expected}")
            if self.arrived[barrier] == expected:
                self.arrived[barrier] = 0
                self.waits_at[self.waits_at == barrier] = -1

    do_barrier = do_bar

    def do_cp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        for warp in np.unique(self.warps[active]):
            self.open_copies, self.groups = self.copies.get(warp, ([], []))
            super().do_cp(parts, operands, active & (self.warps == warp))
            self.copies[warp] = (self.open_copies, self.groups)

    def do_setp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        super().do_setp(parts, operands, active)
        if operands[0] == "done" and not self.registers["done"][active].all():
            raise RuntimeError(f"CTA {self.block} waits for a count that only a later one changes")

    def do_red(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses = self.address(operands[0], np.uint64)[active]
        for i, name in enumerate(self.names(operands[1])):
            terms = self.get(name, _TYPES[parts[-1]])[active]
            self.memory.indices(addresses + 4 * i, 4)
            np.add.at(self.memory.data.view(terms.dtype), (addresses + 4 * i - self.memory.base) // 4, terms)

    def do_atom(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses, terms = self.address(operands[1], np.uint64), self.get(operands[2], np.int32)
        old = np.zeros(self.threads, np.int32)
        for thread in np.flatnonzero(active):
            place = self.memory.indices(addresses[thread : thread + 1], 4)[0]
            old[thread] = self.memory.data[place].view(np.int32)[0]
            self.memory.data[place] = (old[thread : thread + 1] + terms[thread]).view(np.uint8)
        self.put(operands[0], old, active)


def launch(ptx: str, parameters: list[Any], memory: Memory, blocks: int, shared_bytes: int, **options: Any) -> None:
    """Runs `blocks` CTAs (grid x only) one after another. `options` are those of `WarpCta`."""
    program = parse(ptx)
    for block in range(blocks):
        WarpCta(program, parameters, memory, block, shared_bytes, **options).run()
