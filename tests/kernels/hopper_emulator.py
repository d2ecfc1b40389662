# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`ptx_emulator` for Hopper kernels: TMA, mbarriers, named barriers and wgmma.

The threads of a warpgroup advance together. Warpgroups take turns: each runs until it has to wait or arrives somewhere,
and when all of them wait the kernel hangs, which is an error. Copies and products take effect when they are issued.

What it catches beyond wrong results: deadlocks, barriers that count wrong, accesses outside of the buffers, reads of
shared memory that nothing has filled (it starts as NaN); registers of a product in flight that are touched, shared
memory that is written, but with zeros, while a product in flight reads it, and what threads store for products or bulk
copies without a proxy fence. What it cannot catch: a copy that is not waited for, a missing barrier between the warps
of a warpgroup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from ptx_emulator import _TYPES, Cta, Memory, parse

_WARPGROUP = 128


@dataclass(frozen=True)
class Operand:
    """What a TMA descriptor says: a contiguous 16-bit array `[batch, rows, heads, columns]` and the box of a copy.

    A box has `rows` rows of the 64 (or 32) columns of one swizzle atom.
    """

    address: int
    shape: tuple[int, int, int, int]
    rows: int
    atom: int

    def box(self, memory: Memory, column: int, row: int, head: int, batch: int) -> np.ndarray:
        """Bytes `[rows, 2 * atom]`; zeros outside of the array."""
        array = memory.read(self.address, self.shape, np.uint16)
        box = np.zeros((self.rows, self.atom), np.uint16)
        if 0 <= head < self.shape[2] and 0 <= batch < self.shape[0]:
            first = max(row, 0)
            found = array[batch, first : max(row + self.rows, 0), head, column : column + self.atom]
            box[first - row : first - row + found.shape[0], : found.shape[1]] = found
        return box.view(np.uint8)


@dataclass
class Mbarrier:
    """An mbarrier: arrivals and bytes that its phase still lacks, and the number of phases that have ended."""

    count: int
    arrivals: int = 0
    nbytes: int = 0
    phase: int = 0

    def update(self, arrivals: int = 0, nbytes: int = 0) -> None:
        """Counts arrivals and bytes that are expected (positive) or have come (negative)."""
        self.arrivals += arrivals
        self.nbytes += nbytes
        if self.arrivals > self.count:
            raise RuntimeError(f"{self.arrivals} arrivals on a barrier for {self.count}")
        if self.arrivals == self.count and self.nbytes == 0:
            self.arrivals, self.phase = 0, self.phase + 1


@dataclass
class Shared:
    """What the warpgroups of a CTA share."""

    memory: np.ndarray
    reads: np.ndarray  # by byte: products in flight that read it
    unfenced: np.ndarray  # by byte: whether a thread has stored it without a proxy fence since
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)  # threads, by named barrier
    generations: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Product:
    """A wgmma in flight: its registers, and the bytes of shared memory that it reads."""

    results: list[str]
    factors: list[str]
    places: list[np.ndarray]


def swizzle(addresses: np.ndarray, atom: int) -> np.ndarray:
    """Addresses as the 128-byte (atom 64) or 64-byte (atom 32) swizzle moves them."""
    mask = 7 if atom == 64 else 3
    return addresses ^ (((addresses >> 7) & mask) << 4)


class Warpgroup(Cta):
    """Up to 128 threads of a CTA."""

    def __init__(self, program: tuple, parameters: list[Any], memory: Memory, place: tuple, shared: Shared):
        self.code, self.labels, self.parameter_types, threads = program
        (self.block, self.grid), first = place
        self.parameters, self.memory, self.common = parameters, memory, shared
        self.shared, self.all_threads = shared.memory, threads
        self.threads = min(_WARPGROUP, threads - first)
        self.tid = np.arange(first, first + self.threads)
        self.lane = np.arange(self.threads)
        self.registers: dict[str, np.ndarray] = {}
        # Products in flight, by group; the last group is open.
        self.flying: list[list[Product]] = [[]]
        self.busy: dict[str, int] = {}
        self.stored: list[np.ndarray] = []

    def steps(self) -> Iterator[str]:
        """Runs to the end; yields what it waits for, as often as it is asked in vain."""
        pc, done = np.zeros(self.threads, np.int64), np.zeros(self.threads, bool)
        while not done.all():
            here = int(pc[~done].min())
            active = (pc == here) & ~done
            guard, opcode, operands = self.code[here]
            pc[active] = here + 1
            if guard is not None:
                active = active & (self.registers[guard[1]] ^ guard[0])
                if not active.any():
                    continue
            if opcode.startswith("bra"):
                pc[active] = self.labels[operands[0]]
            elif opcode == "ret":
                done |= active
            elif opcode.startswith("mbarrier.try_wait"):
                yield from self.wait(operands, active)
            elif opcode.startswith(("bar.sync", "barrier.sync")):
                yield from self.sync(operands, active)
            else:
                self.execute(opcode, operands, active)
                if opcode.startswith("mbarrier.arrive.shared"):
                    yield "nothing"

    # Waiting.

    def wait(self, operands: list[str], active: np.ndarray) -> Iterator[str]:
        address = int(self.address(operands[1], np.uint32)[active][0])
        parity = int(self.get(operands[2], np.uint32)[active][0])
        barrier = self.common.mbarriers[address]
        while barrier.phase % 2 == parity:
            yield f"mbarrier {address}, parity {parity}, {barrier}"

    def sync(self, operands: list[str], active: np.ndarray) -> Iterator[str]:
        name = int(self.get(operands[0], np.int32)[active][0])
        expected = int(self.get(operands[1], np.int32)[active][0]) if len(operands) > 1 else self.all_threads
        generation = self.common.generations.get(name, 0)
        self.arrive(name, expected, int(active.sum()))
        while self.common.generations.get(name, 0) == generation:
            yield f"named barrier {name}: {self.common.arrived[name]} of {expected}"

    def arrive(self, name: int, expected: int, threads: int) -> None:
        arrived = self.common.arrived.get(name, 0) + threads
        if arrived > expected:
            raise RuntimeError(f"{arrived} threads at the named barrier {name} for {expected}")
        self.common.arrived[name] = arrived % expected
        if arrived == expected:
            self.common.generations[name] = self.common.generations.get(name, 0) + 1

    def do_bar(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[0] == "arrive":
            name, expected = (int(self.get(x, np.int32)[active][0]) for x in operands)
            self.arrive(name, expected, int(active.sum()))
        elif parts[0] != "warp":
            raise NotImplementedError(f"bar.{parts}")

    do_barrier = do_bar

    def do_mbarrier(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        target = operands[0] if parts[0] == "init" else operands[1]
        address = int(self.address(target, np.uint32)[active][0])
        if parts[0] == "init":
            self.common.mbarriers[address] = Mbarrier(int(self.get(operands[1], np.uint32)[active][0]))
            return
        barrier, operand = self.common.mbarriers[address], self.get(operands[2], np.uint32)[active].astype(int).sum()
        if "expect_tx" in parts:
            barrier.update(arrivals=int(active.sum()), nbytes=operand)
        else:
            barrier.update(arrivals=operand)

    # What has no effect here.

    def _nothing(self, *_: Any) -> None:
        pass

    do_setmaxnreg = do_prefetch = _nothing

    def do_fence(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[0] == "proxy":
            for places in self.stored:
                self.common.unfenced[places] = False
            self.stored = []

    # Operands and lanes.

    def get(self, name: str, kind: Any) -> np.ndarray:
        if (parameter := re.search(r"_param_(\d+)$", name)) is not None:
            return np.full(self.threads, int(parameter[1]), kind)  # where it is: which descriptor
        if name == "%nctaid.x":
            return np.full(self.threads, self.grid, kind)
        if name.startswith("__dynamic_shmem__"):
            return np.zeros(self.threads, kind)
        if kind is bool and name not in self.registers:
            return np.full(self.threads, int(name, 0) != 0)
        if name in self.busy:
            raise RuntimeError(f"{name} is read while a product in flight writes or reads it")
        return super().get(name, kind)

    def put(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        if name in self.busy:
            raise RuntimeError(f"{name} is written while a product in flight uses it")
        super().put(name, value, active)

    def do_shfl(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        value, lane = self.get(operands[1], np.uint32), self.get(operands[2], np.int32)
        source = self.lane ^ lane if parts[1] == "bfly" else self.lane // 32 * 32 + lane % 32
        self.put(operands[0].split("|")[0], value[source], active)

    def do_elect(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        warps = active.reshape(-1, 32)
        leads = np.arange(32) == warps.argmax(1)[:, None]
        self.put(operands[0].split("|")[1], leads.reshape(-1) & active, active)

    def do_vote(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        warps = (self.registers[operands[1]] & active).reshape(-1, 32)
        self.put(operands[0], np.repeat(warps.any(1), 32), active)

    # Matrices.

    def do_ldmatrix(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses = np.where(active, self.address(operands[1], np.uint32), 0)
        rows = self.shared[self.shared_indices(addresses, 16)].view(np.uint16)
        matrices = rows.reshape(-1, 4, 8, 8)
        if "trans" in parts:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 4, 32)
        for i, name in enumerate(self.names(operands[0])):
            self.put(name, pairs[:, i].reshape(-1), active)

    def do_stmatrix(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if not active.all():
            raise RuntimeError("stmatrix by a part of the warpgroup")
        addresses = self.address(operands[0], np.uint32)
        words = np.stack([self.get(x, np.uint32).reshape(-1, 32) for x in self.names(operands[1])], 1)
        matrices = words[..., None].view(np.uint16).reshape(-1, 4, 8, 8)
        if "trans" in parts:
            matrices = matrices.swapaxes(2, 3)
        rows = np.ascontiguousarray(matrices.reshape(-1, 8)).view(np.uint8)
        self.fill(self.shared_indices(addresses, 16), rows, by_thread=True)

    def do_st(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if "shared" not in parts:
            return super().do_st(parts, operands, active)
        values = np.stack([self.get(x, _TYPES[parts[-1]])[active] for x in self.names(operands[1])], 1)
        raw = np.ascontiguousarray(values).view(np.uint8)
        places = self.shared_indices(self.address(operands[0], np.uint32)[active], raw.shape[1])
        self.fill(places, raw, by_thread=True)

    def fill(self, places: np.ndarray, data: np.ndarray, *, by_thread: bool) -> None:
        """Writes shared memory, which no product in flight may read; but zeros, to padding whose scores are masked."""
        if self.common.reads[places].any() and data.any():
            raise RuntimeError("shared memory is written while a product in flight reads it")
        self.shared[places] = data
        self.common.unfenced[places] = by_thread
        if by_thread:
            self.stored.append(places)

    def fenced(self, places: np.ndarray) -> np.ndarray:
        """Places that the asynchronous proxy reads."""
        if self.common.unfenced[places].any():
            raise RuntimeError("shared memory is read by the asynchronous proxy without a fence after the stores")
        return places

    def do_wgmma(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if not active.all() or self.threads != _WARPGROUP:
            raise RuntimeError(f"wgmma.{parts[0]} by a part of a warpgroup")
        if parts[0] == "commit_group":
            self.flying.append([])
        elif parts[0] == "wait_group":
            while len(self.flying) > int(operands[0]) + 1:
                for product in self.flying.pop(0):
                    self.land(product)
        elif parts[0] == "mma_async":
            self.multiply(parts, operands, active)

    def land(self, product: Product) -> None:
        """The end of a product: its registers and its shared memory are free again."""
        for name in product.results + product.factors:
            self.busy[name] -= 1
            if not self.busy[name]:
                del self.busy[name]
        for places in product.places:
            np.subtract.at(self.common.reads, places, 1)

    def multiply(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        dtype = ml_dtypes.bfloat16 if "bf16" in parts else np.float16
        columns = int(re.search(r"n(\d+)k16", parts[3])[1])
        names = self.names(operands[0])
        in_registers = operands[1].startswith("{")
        transposed = [int(x) for x in operands[6:]]
        factors, places = self.names(operands[1]) if in_registers else [], []
        if any(x in earlier.results for x in factors for group in self.flying for earlier in group):
            raise RuntimeError(f"a factor of {factors} is still in flight")
        busy, self.busy = self.busy, {}  # products follow each other in order, on the same accumulators
        if in_registers:
            a, b_transposed = self.fragment(factors, dtype), transposed[0]
        else:
            a, b_transposed = self.matrix(operands[1], 64, bool(transposed[0]), dtype, places), transposed[1]
        product = a @ self.matrix(operands[2], columns, bool(b_transposed), dtype, places).T
        # [warp, half, row, block, quad lane, element] to a register for each (block, half, element).
        pieces = product.reshape(4, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, _WARPGROUP)
        accumulates = self.registers[operands[3]]
        for name, piece in zip(names, pieces, strict=True):
            old = np.where(accumulates, self.get(name, np.float32), np.float32(0)) if name in self.registers else 0
            self.put(name, (old + piece).astype(np.float32), active)
        self.busy = busy
        for name in names + factors:
            busy[name] = busy.get(name, 0) + 1
        for place in places:
            np.add.at(self.common.reads, place, 1)
        self.flying[-1].append(Product(names, factors, places))

    def fragment(self, names: list[str], dtype: Any) -> np.ndarray:
        """A operand `[64, 16]` from registers."""
        words = np.stack([self.get(x, np.uint32) for x in names])  # [right * 2 + lower, thread]
        halves = words[..., None].view(np.uint16).view(dtype).astype(np.float32)
        pieces = halves.reshape(2, 2, 4, 8, 4, 2)  # right, lower, warp, row, quad lane, element
        return pieces.transpose(2, 1, 3, 0, 4, 5).reshape(64, 16)

    def matrix(self, name: str, rows: int, transposed: bool, dtype: Any, read: list[np.ndarray]) -> np.ndarray:
        """An operand `[rows, 16]` from shared memory, by its descriptor; appends the places to `read`."""
        descriptor = int(self.get(name, np.uint64)[0])
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        atom = {1: 64, 2: 32}[descriptor >> 62]
        row, k = np.arange(rows)[:, None], np.arange(16)[None]
        if transposed:  # rows are contiguous
            offsets = row // atom * leading + k // 8 * stride + k % 8 * (2 * atom) + row % atom * 2
        else:
            offsets = row // 8 * stride + row % 8 * (2 * atom) + 2 * k
        places = swizzle(start + offsets, atom)
        read.append(self.fenced(places[..., None] + np.arange(2)))
        pairs = self.shared[read[-1]]
        return np.ascontiguousarray(pairs).view(np.uint16)[..., 0].view(dtype).astype(np.float32)

    # Copies.

    def do_cp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if "tensor" in parts:
            self.copy_box(operands, active)
        elif parts[0] == "reduce":
            self.reduce(operands, active)
        elif "mbarrier::complete_tx::bytes" in parts:
            self.copy_bytes(operands, active)
        elif "wait_group" not in parts and "commit_group" not in parts:
            super().do_cp(parts, operands, active)

    def copy_box(self, operands: list[str], active: np.ndarray) -> None:
        target = int(self.address(operands[0], np.uint32)[active][0])
        descriptor, coordinates = re.match(r"\[([^,]+), (\{.*\})\]", operands[1]).groups()
        operand: Operand = self.parameters[int(self.get(descriptor, np.uint64)[active][0])]
        where = [int(self.get(x, np.int32)[active][0]) for x in self.names(coordinates)]
        box = operand.box(self.memory, *where)
        places = target + np.arange(box.size).reshape(box.shape)
        self.fill(swizzle(places, operand.atom), box, by_thread=False)
        self.common.mbarriers[int(self.address(operands[2], np.uint32)[active][0])].update(nbytes=-box.size)

    def copy_bytes(self, operands: list[str], active: np.ndarray) -> None:
        target = int(self.address(operands[0], np.uint32)[active][0])
        source = int(self.address(operands[1], np.uint64)[active][0]) - self.memory.base
        size = int(operands[2])
        self.memory.indices(np.arange(source, source + size) + self.memory.base, 1)
        self.fill(target + np.arange(size), self.memory.data[source : source + size], by_thread=False)
        self.common.mbarriers[int(self.address(operands[3], np.uint32)[active][0])].update(nbytes=-size)

    def reduce(self, operands: list[str], active: np.ndarray) -> None:
        size = int(operands[2])
        targets, sources = self.address(operands[0], np.uint64)[active], self.address(operands[1], np.uint32)[active]
        for target, source in zip(targets, sources, strict=True):
            terms = self.shared[self.fenced(source + np.arange(size))].view(np.float32)
            self.add(int(target) + 4 * np.arange(size // 4), terms)

    def do_red(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses = self.address(operands[0], np.uint64)[active]
        for i, name in enumerate(self.names(operands[1])):
            self.add(addresses + 4 * i, self.get(name, np.float32)[active])

    def add(self, addresses: np.ndarray, terms: np.ndarray) -> None:
        self.memory.indices(addresses, 4)
        np.add.at(self.memory.data.view(np.float32), (addresses - self.memory.base) // 4, terms)


def launch(ptx: str, parameters: list[Any], memory: Memory, grid: int, shared_bytes: int = 0) -> None:
    """Runs the only kernel of a PTX text, one CTA after another."""
    program = parse(ptx)
    for block in range(grid):
        shared = Shared(
            np.full(shared_bytes, 0xFF, np.uint8), np.zeros(shared_bytes, np.int16), np.zeros(shared_bytes, bool)
        )
        groups = [
            Warpgroup(program, parameters, memory, ((block, grid), first), shared)
            for first in range(0, program[3], _WARPGROUP)
        ]
        with np.errstate(all="ignore"):
            _take_turns([group.steps() for group in groups], shared)


def _take_turns(running: list[Iterator[str]], shared: Shared) -> None:
    """Runs all warpgroups; the last one, which loads, goes on as soon as another has released something."""
    while running:
        before, waits = _progress(shared), {}
        for steps in [x for group in running[:-1] for x in (group, running[-1])] or running[:]:
            if steps in running:
                waits[steps] = next(steps, None)
                if waits[steps] is None:
                    running.remove(steps)
        waiting = [wait for wait in waits.values() if wait is not None]
        if running and len(waiting) == len(waits) and _progress(shared) == before:
            raise RuntimeError("all warpgroups wait: " + "; ".join(waiting))


def _progress(shared: Shared) -> tuple:
    barriers = [(x.count, x.phase, x.arrivals, x.nbytes) for x in shared.mbarriers.values()]
    return tuple(barriers), tuple(shared.generations.items()), tuple(shared.arrived.items())
