# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`ptx_emulator` for Hopper kernels: TMA, mbarriers, named barriers and wgmma.

The threads of a warpgroup advance together. The warpgroups of a CTA take turns: each runs until it has to wait or
arrives somewhere, and when all of them wait the kernel hangs, which is an error. CTAs run one after another: none may
wait for a later one. Copies and products take effect when they are issued.

What it catches beyond wrong results: deadlocks, barriers that count wrong, bar.sync by several instructions in one
round, accesses outside of the buffers, reads of shared memory that nothing has filled (it starts as NaN); registers of
a product in flight that are touched, shared memory that is written, but with zeros, while a product in flight reads it,
and what threads store for products or bulk copies without a proxy fence.

It also catches races in shared memory, whatever the turns were. Every warpgroup and every mbarrier is an agent with a
time; an arrival hands on the times that a warpgroup knows, and a wait learns them. A warpgroup that uses a byte has to
know of the accesses before it, those of copies included; a warpgroup that uses an mbarrier has to know of its
initialization. A CTA may exit when it knows of the end of all copies to it.

A product reads until the wait that ends it. A copy may overwrite what others have read only if the barrier that its
warp waited for last knows of those reads, so that a buffer that is released too early shows even where another barrier
happens to order the accesses.

What it cannot catch: a missing barrier between the warps of a warpgroup (and a wait of one warp counts for all), races
in global memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from ptx_emulator import _TYPES, Cta, Memory, parse

_WARPGROUP = 128
# Warpgroups and mbarriers that a CTA may have, and releases of counts in global memory, whose time is `Memory.time`.
_AGENTS = 256
_RELEASES = _AGENTS - 1


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


def _times() -> np.ndarray:
    """A time, or none yet, of every agent."""
    return np.zeros(_AGENTS, np.int64)


@dataclass
class Handover:
    """What those who arrive at a barrier know, and what those who have waited for it learn."""

    gathered: np.ndarray = field(default_factory=_times, repr=False, kw_only=True)
    released: np.ndarray = field(default_factory=_times, repr=False, kw_only=True)


@dataclass
class Barrier(Handover):
    """A named barrier: threads that have arrived, and rounds that have ended.

    Attributes:
        awaits: instructions at which threads wait in this round.
        aligned: whether one of them promises that there is no other.
    """

    arrived: int = 0
    rounds: int = 0
    awaits: set[int] = field(default_factory=set)
    aligned: bool = False

    def update(self, threads: int, expected: int) -> None:
        """Counts threads that arrive."""
        self.arrived += threads
        if self.arrived > expected:
            raise RuntimeError(f"{self.arrived} threads at a barrier for {expected}")
        if self.arrived == expected:
            self.arrived, self.rounds, self.released = 0, self.rounds + 1, self.gathered.copy()
            self.awaits, self.aligned = set(), False

    def wait_at(self, instruction: int, *, aligned: bool) -> None:
        """Notes where threads wait."""
        self.awaits.add(instruction)
        self.aligned |= aligned
        if self.aligned and len(self.awaits) > 1:
            raise RuntimeError("threads wait at an aligned barrier by different instructions")


@dataclass
class Mbarrier(Handover):
    """An mbarrier: arrivals and bytes that its phase still lacks, and the number of phases that have ended.

    As an agent its time is that number.
    """

    count: int
    agent: int
    made: tuple[int, int] = field(repr=False)  # the agent that has initialised it, and when
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
            self.gathered[self.agent] = self.phase
            self.released = self.gathered.copy()


class Shared:
    """What the warpgroups of a CTA share.

    Args:
        nbytes: of shared memory.
        groups: their number; mbarriers are the agents after them.
    """

    def __init__(self, nbytes: int, groups: int):
        self.memory = np.full(nbytes, 0xFF, np.uint8)
        # By byte: products in flight that read it, and whether a thread has stored it without a proxy fence since.
        self.reads, self.unfenced = np.zeros(nbytes, np.int16), np.zeros(nbytes, bool)
        # By byte: agent and time of the last write, and the time of every warpgroup's last read.
        self.writer, self.written = np.zeros(nbytes, np.int16), np.zeros(nbytes, np.int32)
        self.read = np.zeros((groups, nbytes), np.int32)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, Barrier] = defaultdict(Barrier)
        self.agents = self.running = groups
        # What has to be over when the CTA exits, and what is known to be by the warpgroups that have.
        self.touched, self.known = _times(), _times()
        # Additions to global memory that others may wait for.
        self.additions = 0


@dataclass(frozen=True)
class Product:
    """A wgmma in flight: its registers, and the bytes of shared memory that it reads."""

    results: tuple[str, ...]
    factors: tuple[str, ...]
    places: list[np.ndarray]


def swizzle(addresses: np.ndarray, atom: int) -> np.ndarray:
    """Addresses as the 128-byte (atom 64) or 64-byte (atom 32) swizzle moves them; rows of 16 bytes stay."""
    mask = {64: 7, 32: 3, 8: 0}[atom]
    return addresses ^ (((addresses >> 7) & mask) << 4)


@functools.lru_cache(1024)
def _places(descriptor: int, rows: int, transposed: bool) -> np.ndarray:
    """Bytes `[rows, 16, 2]` of an operand in shared memory, each of them once."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    atom = {0: 8, 1: 64, 2: 32}[descriptor >> 62]
    row, k = np.arange(rows)[:, None], np.arange(16)[None]
    if transposed:  # rows are contiguous
        offsets = row // atom * leading + k // 8 * stride + k % 8 * (2 * atom) + row % atom * 2
    else:
        beyond = k // 8 * (leading - 16) if atom == 8 else 0
        offsets = row // 8 * stride + row % 8 * (2 * atom) + 2 * k + beyond
    return swizzle(start + offsets, atom)[..., None] + np.arange(2)


def _parts(threads: int) -> list[tuple[int, int]]:
    """(First thread, threads) of what runs for itself in a CTA: warpgroups; of the last of three or four, each warp."""
    parts = [(first, min(_WARPGROUP, threads - first)) for first in range(0, threads, _WARPGROUP)]
    if len(parts) < 3:
        return parts
    return parts[:-1] + [(first, 32) for first in range(parts[-1][0], threads, 32)]


class Warpgroup(Cta):
    """Up to 128 threads of a CTA."""

    def __init__(self, program: tuple, parameters: list[Any], memory: Memory, place: tuple, common: Shared):
        self.code, self.labels, self.parameter_types, threads = program
        self.block, self.grid, index = place
        self.parameters, self.memory, self.common = parameters, memory, common
        self.shared, self.all_threads = self.common.memory, threads
        first, self.threads = _parts(threads)[index]
        self.tid = np.arange(first, first + self.threads)
        self.lane = np.arange(self.threads)
        self.begin()
        # Products in flight, by group; the last group is open.
        self.flying: list[list[Product]] = [[]]
        self.busy: dict[str, int] = {}
        self.stored: list[np.ndarray] = []
        self.agent = index
        self.clock = _times()
        self.clock[self.agent] = 1
        # What the barrier knew that this warpgroup waited for last.
        self.heard = _times()

    def steps(self) -> Iterator[str]:
        """Runs to the end; yields what it waits for, as often as it is asked in vain."""
        for opcode, operands, active in self.issues():
            if opcode.startswith("mbarrier.try_wait"):
                yield from self.wait(operands, active)
            elif opcode.startswith("ld.acquire"):
                yield from self.wait_for_count(opcode, operands, active, self.code[self.here + 1])
            elif opcode.startswith(("bar.sync", "barrier.sync")):
                yield from self.sync(opcode, operands, active)
            else:
                self.execute(opcode, operands, active)
                if opcode.startswith("mbarrier.arrive") and "expect_tx" not in opcode:
                    yield "nothing"
        self.exit()

    def exit(self) -> None:
        """The end of the warpgroup; with the last one the CTA's shared memory is gone."""
        common = self.common
        self.check_waited()
        common.running -= 1
        np.maximum(common.known, self.clock, out=common.known)
        if not common.running and (common.known < common.touched).any():
            raise RuntimeError(f"CTA {self.block} exits without waiting for the last use of its shared memory")

    # Waiting.

    def wait(self, operands: list[str], active: np.ndarray) -> Iterator[str]:
        address = int(self.address(operands[1], np.uint32)[active][0])
        parity = int(self.get(operands[2], np.uint32)[active][0])
        barrier = self.mbarrier(address)
        while barrier.phase % 2 == parity:
            yield f"mbarrier {address} of CTA {self.block}, parity {parity}, {barrier}"
        self.learn(barrier)

    def wait_for_count(self, opcode: str, operands: list[str], active: np.ndarray, test: tuple) -> Iterator[str]:
        """A loop around a load from global memory, which ends when `test` of what it has found is true."""
        _, comparison, (_, found, count) = test
        if not comparison.startswith("setp.eq"):
            raise NotImplementedError(f"a wait with {comparison}")
        wanted = self.get(count, np.int32)[active]
        while True:
            self.execute(opcode, operands, active)
            counts = self.get(found, np.int32)[active]
            if (counts == wanted).all():
                return
            yield f"CTA {self.block}: {counts[0]} of {wanted[0]} in global memory"

    def sync(self, opcode: str, operands: list[str], active: np.ndarray) -> Iterator[str]:
        name = int(self.get(operands[0], np.int32)[active][0])
        expected = int(self.get(operands[1], np.int32)[active][0]) if len(operands) > 1 else self.all_threads
        barrier = self.common.named[name]
        rounds = barrier.rounds
        barrier.wait_at(self.here, aligned=opcode.startswith("bar.") or opcode.endswith(".aligned"))
        self.arrive(barrier, threads=int(active.sum()), expected=expected)
        while barrier.rounds == rounds:
            yield f"named barrier {name} of CTA {self.block}: {barrier.arrived} of {expected}"
        self.learn(barrier)

    def arrive(self, barrier: Barrier | Mbarrier, **update: int) -> None:
        """Hands on what the warpgroup knows; what it does after that is later."""
        np.maximum(barrier.gathered, self.clock, out=barrier.gathered)
        self.clock[self.agent] += 1
        barrier.update(**update)

    def learn(self, barrier: Handover) -> None:
        np.maximum(self.clock, barrier.released, out=self.clock)
        self.heard = barrier.released

    def do_bar(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[0] == "arrive":
            name, expected = (int(self.get(x, np.int32)[active][0]) for x in operands)
            self.arrive(self.common.named[name], threads=int(active.sum()), expected=expected)
        elif "red" in parts:
            # Of one warpgroup, whose threads advance together.
            assert active.all() and int(self.get(operands[2], np.int32)[0]) == _WARPGROUP
            self.put(operands[0], np.full(self.threads, self.registers[operands[3]].any()), active)
        elif parts[0] != "warp":
            raise NotImplementedError(f"bar.{parts}")

    do_barrier = do_bar

    def mbarrier(self, offset: int) -> Mbarrier:
        barrier = self.common.mbarriers.get(offset)
        if barrier is None or self.clock[barrier.made[0]] < barrier.made[1]:
            raise RuntimeError(f"CTA {self.block} uses an mbarrier at {offset:#x} that is not known to be initialised")
        return barrier

    def do_mbarrier(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[0] == "init":
            address = int(self.address(operands[0], np.uint32)[active][0])
            count = int(self.get(operands[1], np.uint32)[active][0])
            made = self.agent, int(self.clock[self.agent])
            self.common.mbarriers[address] = Mbarrier(count, self.common.agents, made)
            self.common.agents += 1
            return
        arrives = parts[0] == "arrive"
        if not arrives and parts[0] != "expect_tx":
            raise NotImplementedError(f"mbarrier.{parts}")
        target, *operand = operands[1:] if arrives else operands
        addresses = self.address(target, np.uint32)[active]
        values = self.get(operand[0] if operand else "1", np.uint32)[active].astype(int)
        for address in np.unique(addresses):
            barrier, theirs = self.mbarrier(int(address)), values[addresses == address]
            if not arrives:
                barrier.update(nbytes=int(theirs.sum()))
            elif "expect_tx" in parts:
                self.arrive(barrier, arrivals=len(theirs), nbytes=int(theirs.sum()))
            else:
                self.arrive(barrier, arrivals=int(theirs.sum()))

    def order(self, places: np.ndarray, *, writes: bool, copies: bool = False) -> None:
        """Checks an access, which has to know of all writes of the bytes and, if it writes, of all reads.

        A copy has to know of reads by others from the barrier that the warpgroup waited for last.
        """
        places, shared = places.reshape(-1), self.common
        if (self.clock[shared.writer[places]] < shared.written[places]).any():
            raise RuntimeError(f"CTA {self.block} uses shared memory without waiting for what is written there")
        if not writes:
            shared.read[self.agent, places] = self.clock[self.agent]
            return
        known = (self.heard if copies else self.clock)[: len(shared.read)].copy()
        known[self.agent] = self.clock[self.agent]
        if (shared.read[:, places] > known[:, None]).any():
            raise RuntimeError(f"CTA {self.block} writes shared memory without waiting for those who read it")

    # What has no effect here.

    def _nothing(self, *_: Any) -> None:
        pass

    do_setmaxnreg = do_prefetch = _nothing

    def do_fence(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[0] == "proxy":
            for places in self.stored:
                self.common.unfenced[places] = False
            self.stored = []

    def acquire(self, addresses: np.ndarray, active: np.ndarray) -> None:
        super().acquire(addresses, active)
        self.clock[_RELEASES] = max(self.clock[_RELEASES], self.known[active].max())

    def knows(self, active: np.ndarray) -> np.ndarray:
        return np.maximum(super().knows(active), self.clock[_RELEASES])

    # Operands and lanes.

    def get(self, name: str, kind: Any) -> np.ndarray:
        if name in self.busy:
            raise RuntimeError(f"{name} is read while a product in flight writes or reads it")
        return super().get(name, kind)

    def constant(self, name: str, dtype: np.dtype) -> Any:
        if (parameter := re.search(r"_param_(\d+)$", name)) is not None:
            return np.array(int(parameter[1]), dtype)  # where it is: which descriptor
        if name == "%nctaid.x":
            return np.array(self.grid, dtype)
        if name.startswith("__dynamic_shmem__"):
            return np.zeros((), dtype)
        if dtype.kind == "b":
            return np.bool_(int(name, 0) != 0)
        return super().constant(name, dtype)

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

    # Matrices.

    def do_ldmatrix(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses = np.where(active, self.address(operands[1], np.uint32), 0)
        places = self.shared_indices(addresses, 16)
        self.order(places[active], writes=False)
        rows = self.shared[places].view(np.uint16)
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
        self.fill(self.shared_indices(addresses, 16), rows)

    def load_shared(self, space: str, addresses: np.ndarray, size: int) -> np.ndarray:
        places = self.shared_indices(addresses, size)
        self.order(places, writes=False)
        return self.shared[places]

    def do_st(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if "async" in parts:
            raise NotImplementedError(f"st.{parts}")
        if not any(x.startswith("shared") for x in parts):
            return super().do_st(parts, operands, active)
        values = np.stack([self.get(x, _TYPES[parts[-1]])[active] for x in self.names(operands[1])], 1)
        raw = np.ascontiguousarray(values).view(np.uint8)
        self.fill(self.shared_indices(self.address(operands[0], np.uint32)[active], raw.shape[1]), raw)

    def fill(self, places: np.ndarray, data: np.ndarray, copy: tuple | None = None) -> None:
        """Writes shared memory, by threads or by a copy that is over at the time of an mbarrier, (agent, time).

        Zeros that threads write count as a read: every warpgroup clears padding, whose scores are masked, for itself.
        """
        writes, shared = copy is not None or data.any(), self.common
        if writes and shared.reads[places].any():
            raise RuntimeError("shared memory is written while a product in flight reads it")
        self.order(places, writes=writes, copies=copy is not None)
        shared.memory[places] = data
        shared.unfenced[places] = copy is None
        if copy is None:
            self.stored.append(places)
        if writes:
            shared.writer[places], shared.written[places] = copy or (self.agent, self.clock[self.agent])

    def fenced(self, places: np.ndarray) -> np.ndarray:
        """Places that the asynchronous proxy reads."""
        if self.common.unfenced[places].any():
            raise RuntimeError("shared memory is read by the asynchronous proxy without a fence after the stores")
        self.order(places, writes=False)
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
        """Ends a product: its registers and its shared memory are free again, and this is when it has read."""
        for name in product.results + product.factors:
            self.busy[name] -= 1
            if not self.busy[name]:
                del self.busy[name]
        for places in product.places:
            self.common.reads[places] -= 1
            self.common.read[self.agent, places] = self.clock[self.agent]

    def multiply(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        dtype = ml_dtypes.bfloat16 if "bf16" in parts else np.float16
        columns = int(re.search(r"n(\d+)k16", parts[3])[1])
        names = self.names(operands[0])
        in_registers = operands[1].startswith("{")
        transposed = [int(x) for x in operands[6:]]
        factors, places = self.names(operands[1]) if in_registers else (), []
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
        if (accumulates := self.registers[operands[3]]).any():
            zeros = np.zeros(_WARPGROUP, np.float32)
            old = np.stack([self.get(x, np.float32) if x in self.registers else zeros for x in names])
            pieces = self.add(np.where(accumulates, old, np.float32(0)), pieces)
        for name, piece in zip(names, pieces, strict=True):
            self.put(name, piece, active)
        self.busy = busy
        for name in names + factors:
            busy[name] = busy.get(name, 0) + 1
        for place in places:
            self.common.reads[place] += 1
        self.flying[-1].append(Product(names, factors, places))

    def add(self, old: np.ndarray, product: np.ndarray) -> np.ndarray:
        """Adds the product of a step to an accumulator. It rounds; tensor cores truncate."""
        return old + product

    def fragment(self, names: tuple[str, ...], dtype: Any) -> np.ndarray:
        """A operand `[64, 16]` from registers."""
        words = np.stack([self.get(x, np.uint32) for x in names])  # [right * 2 + lower, thread]
        halves = words[..., None].view(np.uint16).view(dtype).astype(np.float32)
        pieces = halves.reshape(2, 2, 4, 8, 4, 2)  # right, lower, warp, row, quad lane, element
        return pieces.transpose(2, 1, 3, 0, 4, 5).reshape(64, 16)

    def matrix(self, name: str, rows: int, transposed: bool, dtype: Any, read: list[np.ndarray]) -> np.ndarray:
        """An operand `[rows, 16]` from shared memory, by its descriptor; appends the places to `read`."""
        read.append(self.fenced(_places(int(self.get(name, np.uint64)[0]), rows, transposed)))
        pairs = self.shared[read[-1]]
        return pairs.view(np.uint16)[..., 0].view(dtype).astype(np.float32)

    # Copies.

    def do_cp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if "tensor" in parts:
            self.copy_box(parts, operands, active)
        elif "mbarrier::complete_tx::bytes" in parts:
            self.copy_bytes(parts, operands, active)
        elif "wait_group" not in parts and "commit_group" not in parts:
            super().do_cp(parts, operands, active)

    def copy_box(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        target, barrier = (int(self.address(x, np.uint32)[active][0]) for x in (operands[0], operands[2]))
        descriptor, coordinates = re.match(r"\[([^,]+), (\{.*\})\]", operands[1]).groups()
        operand: Operand = self.parameters[int(self.get(descriptor, np.uint64)[active][0])]
        where = [int(self.get(x, np.int32)[active][0]) for x in self.names(coordinates)]
        if not self.waited.all():
            start = operand.address - self.memory.base
            written = self.memory.times[start : start + 2 * math.prod(operand.shape)].max()
            self.memory.check_read(written, self.knows(active))
        box = operand.box(self.memory, *where)
        self.deliver(swizzle(target + np.arange(box.size).reshape(box.shape), operand.atom), box, barrier)

    def deliver(self, places: np.ndarray, data: np.ndarray, address: int) -> None:
        """Writes a copy and counts its bytes on an mbarrier, with whose phase it will be over."""
        barrier = self.mbarrier(address)
        time = barrier.phase + 1
        self.fill(places, data, (barrier.agent, time))
        self.common.touched[barrier.agent] = time
        barrier.update(nbytes=-data.size)

    def copy_bytes(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        """Copies of the active threads from global memory."""
        if parts[3] != "global":
            raise NotImplementedError(f"cp.{parts}")
        targets, barriers = (self.address(x, np.uint32)[active] for x in (operands[0], operands[3]))
        sources = self.address(operands[1], np.uint64)[active]
        sizes = self.get(operands[2], np.uint32)[active].astype(int)
        for copy in zip(targets, sources, sizes, barriers, strict=True):
            target, source, size, address = map(int, copy)
            if (target | source | size) % 16:
                raise IndexError("misaligned bulk copy")
            places = self.memory.indices(np.arange(source, source + size), 1)
            if not self.waited.all():
                self.memory.check_read(self.memory.times[places].max(), self.knows(active))
            self.deliver(target + np.arange(size), self.memory.data[places[:, 0]], address)

    def do_red(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses = self.address(operands[0], np.uint64)
        for i, name in enumerate(self.names(operands[1])):
            self.add_to_sums(addresses + 4 * i, self.get(name, np.float32), active)

    def do_atom(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[-2:] != ["add", "s32"] or "global" not in parts:
            raise NotImplementedError(f"atom.{parts}")
        addresses, terms = self.address(operands[1], np.uint64), self.get(operands[2], np.int32)
        found = self.add_to_count(parts, addresses, terms, active)
        self.common.additions += 1
        self.put(operands[0], found, active)


def launch(
    ptx: str,
    parameters: list[Any],
    memory: Memory,
    grid: int,
    shared_bytes: int = 0,
    *,
    begins_early: bool = False,
) -> None:
    """Runs the only kernel of a PTX text, one CTA after another."""
    program = parse(ptx)
    memory.begin(early=begins_early)
    parts = _parts(program[3])
    whole = sum(threads == _WARPGROUP for _, threads in parts)
    for block in range(grid):
        common = Shared(shared_bytes, len(parts))
        with np.errstate(all="ignore"):
            running = [
                Warpgroup(program, parameters, memory, (block, grid, part), common).steps()
                for part in range(len(parts))
            ]
            _take_turns(running, whole if whole < len(parts) else whole - 1, common)


def _take_turns(parts: list[Iterator[str]], computing: int, common: Shared) -> None:
    """Runs all parts; those that do not compute, the last ones, go on as soon as another has released something."""
    running = list(parts)
    loaders, others = parts[computing:], parts[:computing]
    while running:
        before, waits = _progress(common), {}
        for steps in [x for group in others for x in (group, *loaders)] or loaders:
            if steps in running:
                waits[steps] = next(steps, None)
                if waits[steps] is None:
                    running.remove(steps)
        waiting = [wait for wait in waits.values() if wait is not None]
        if running and len(waiting) == len(waits) and _progress(common) == before:
            raise RuntimeError("all warpgroups wait: " + "; ".join(waiting))


def _progress(common: Shared) -> tuple:
    phases = tuple((x.count, x.phase, x.arrivals, x.nbytes) for x in common.mbarriers.values())
    return phases, common.additions, tuple((x.arrived, x.rounds) for x in common.named.values())
