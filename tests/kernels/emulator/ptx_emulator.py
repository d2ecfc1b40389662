# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of a kernel on the CPU, so that its numbers can be checked on a machine without a GPU.

`warp_emulator` and `hopper_emulator` run launches by what is here: global memory, and the instructions of a CTA.

All threads of a CTA advance together, one numpy operation per instruction; where they diverge, the group with the
smallest program counter runs first, which reconverges structured code. Only the instructions that our kernels contain
are known; any other raises `NotImplementedError`.

What it catches beyond wrong results: an access outside the buffers raises, shared memory starts as NaN, and the target
of a cp.async is NaN from its issue until the wait that completes it, so a missing wait or an early overwrite shows in
the output. A launch that begins early may read what earlier launches wrote once it has waited for them, or for a count
that was released after the write; see `Memory.begin`. Each of its threads has to wait before it exits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

_POISON = 0xFF  # 0xFFFF is a NaN in bfloat16 and float16, 0xFFFFFFFF one in float32
_TYPES = {
    "u8": np.uint8, "s8": np.int8,
    "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f16": np.float16,
}  # fmt: skip
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WIDE = {np.int16: np.int32, np.uint16: np.uint32, np.int32: np.int64, np.uint32: np.uint64}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "neu": lambda a, b: (a != b) | np.isnan(a) | np.isnan(b),
    "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "leu": lambda a, b: ~(a > b), "ltu": lambda a, b: ~(a >= b),
    "geu": lambda a, b: ~(a < b), "gtu": lambda a, b: ~(a <= b),
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
# An ordered "ne" is false for NaN, unlike numpy's.
_FLOAT_NE = lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b))


@dataclass
class Memory:
    """A flat global memory; `add` places arrays with a guard of poison between them.

    Attributes:
        data: the bytes, the first one at address `base`.
        spans: begin and end of each array.
        times: when each byte was written. Times count launches, and releases in them.
        time: the present one. What was there before the first launch is of time 1.
        begun: when the present launch began.
        known: threads of the present launch know what was written until then before they wait.
        promised: the same of the next launch, if it begins early.
        released: when a count was released, by its address.
    """

    data: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    base: int = 1 << 20
    spans: list[tuple[int, int]] = field(default_factory=list)
    times: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    time: int = 1
    begun: int = 1
    known: int = 0
    promised: int = 0
    released: dict[int, int] = field(default_factory=dict)

    def add(self, array: np.ndarray) -> int:
        """Copies an array in and returns its address (aligned to 256 bytes)."""
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        start = (len(self.data) + 511) // 256 * 256
        grown = np.full(start + len(raw) + 256, _POISON, np.uint8)
        grown[: len(self.data)] = self.data
        grown[start : start + len(raw)] = raw
        self.data, self.times = grown, np.ones(len(grown), np.int32)
        self.spans.append((self.base + start, self.base + start + len(raw)))
        return self.base + start

    def read(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array back out."""
        start = address - self.base
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(self.data[start : start + size].tobytes(), dtype).reshape(shape)

    def begin(self, *, early: bool) -> None:
        """Begins a launch: early, or when all launches before it have ended.

        An early one knows what all CTAs of the launch before it knew when they let it begin. Of what the launches of
        another call wrote, which may have been all operands, the first launch of a call knows nothing if it is early.
        """
        self.known = self.promised if early else self.time
        self.time += 1
        self.begun, self.promised = self.time, self.time - 1

    def write(self, places: np.ndarray, data: np.ndarray) -> None:
        """Writes bytes."""
        self.data[places] = data
        self.times[places] = self.time

    def release(self, address: int) -> None:
        """Releases a count: who acquires it knows all writes until now."""
        self.released[address] = self.time
        self.time += 1

    def check_read(self, written: np.ndarray, known: np.ndarray) -> None:
        """Raises if earlier launches wrote something that is read, at times `written`, after what its reader knows."""
        if ((written > known) & (written < self.begun)).any():
            raise RuntimeError(
                "a launch that begins early reads what an earlier launch wrote, and has not waited for it"
            )

    def indices(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Byte indices [n, size] of accesses, all of which must lie inside of one array."""
        addresses = addresses.astype(np.int64)
        lows, highs = np.array(self.spans, np.int64).reshape(-1, 2).T
        span = np.searchsorted(lows, addresses, side="right") - 1
        inside = (span >= 0) & (addresses + size <= highs[span])
        if not inside.all():
            raise IndexError(f"global access outside of any array: {hex(int(addresses[~inside][0]))}")
        if (addresses % size).any():
            raise IndexError("misaligned global access")
        return (addresses - self.base)[:, None] + np.arange(size)


@functools.lru_cache(8)
def parse(ptx: str) -> tuple[list[tuple[Any, ...]], dict[str, int], list[str], int]:
    """(instructions, labels, parameter types, threads) of the only kernel in a PTX text."""
    header, body = ptx[ptx.index(".entry") :].split("\n{", 1)
    parameters = re.findall(r"\.param \.(\w+)", header)
    threads = int(re.search(r"\.reqntid (\d+)", header)[1])
    code: list[tuple[Any, ...]] = []
    labels: dict[str, int] = {}
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        if (label := re.match(r"^(\$\w+):", line)) is not None:
            labels[label[1]] = len(code)
            continue
        # A loop that waits for an mbarrier or a count, whose labels are local: the emulator waits by itself.
        if not line or line.startswith((".", "@done", "bra again")) or line in "{}" or re.match(r"\w+:$", line):
            continue
        guard = re.match(r"^@(!?)(%p\d+)\s+", line)
        line = line[guard.end() :] if guard else line
        opcode, _, rest = line.rstrip(";").strip().partition(" ")
        if "\t" in opcode:
            opcode, _, more = opcode.partition("\t")
            rest = f"{more} {rest}"
        operands = [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]
        code.append((guard and (guard[1] == "!", guard[2]), opcode.strip(), operands))
    return code, labels, parameters, threads


@functools.cache
def _method(opcode: str) -> tuple[str, list[str]]:
    """The method for an opcode, and the parts of the opcode after its name."""
    name, *parts = opcode.split(".")
    return f"do_{name}", parts


@functools.cache
def _names(operand: str) -> tuple[str, ...]:
    return tuple(x.strip() for x in operand.strip("{}").split(","))


@functools.cache
def _base_and_offset(operand: str) -> tuple[str, int]:
    base, _, offset = operand.strip("[]").partition("+")
    return base.strip(), int(offset or "0", 0)


class Cta:
    """One CTA: registers, shared memory, program counters. No array in `registers` or `constants` is ever changed."""

    def __init__(self, program: tuple, parameters: list[Any], memory: Memory, block: int, shared_bytes: int):
        self.code, self.labels, self.parameter_types, self.threads = program
        self.parameters, self.memory, self.block = parameters, memory, block
        self.shared = np.full(shared_bytes, _POISON, np.uint8)
        self.tid = np.arange(self.threads)
        self.begin()
        self.open_copies: list[tuple] = []
        self.groups: list[list[tuple]] = []

    def begin(self) -> None:
        """Sets up what `issues` needs."""
        self.registers: dict[str, np.ndarray] = {}
        self.constants: dict[tuple[str, Any], np.ndarray] = {}
        self.everyone = np.ones(self.threads, bool)
        # Where the current instruction is, and whether the threads that advance together may go on with the next one.
        self.here, self.goes_on = 0, True
        # Which threads know all that earlier launches wrote, and until when the others know it.
        self.waited = np.full(self.threads, self.memory.known == self.memory.begun - 1)
        self.known = np.full(self.threads, self.memory.known)

    def run(self) -> None:
        """Runs to the end."""
        with np.errstate(all="ignore"):
            for opcode, operands, active in self.issues():
                self.execute(opcode, operands, active)
        self.check_waited()

    def check_waited(self) -> None:
        """Raises if a thread has not waited for the launches before: the next launch relies on all of them."""
        if not self.waited.all():
            raise RuntimeError(f"CTA {self.block} exits without waiting for the launches before it")

    def issues(self) -> Iterator[tuple[str, list[str], np.ndarray]]:
        """Instructions but for branches, with the threads that execute them; the caller does so before the next one."""
        pc, live = np.zeros(self.threads, np.int64), self.everyone.copy()
        while live.any():
            group, here, end = self.choose(pc, live)
            self.goes_on = True
            while here < end and self.goes_on:
                self.here = here
                guard, opcode, operands = self.code[here]
                here += 1
                active = group
                if guard is not None:
                    negate, name = guard
                    active = group & (self.registers[name] ^ negate)
                    if not active.any():
                        continue
                if opcode.startswith("bra"):
                    target = self.labels[operands[0]]
                    if active is group or np.array_equal(active, group):
                        here = target
                        continue
                    pc[group], pc[active] = here, target
                    break
                if opcode == "ret":
                    live = live & ~active
                    group = group & ~active
                    if not group.any():
                        break
                else:
                    yield opcode, operands, active
            else:
                pc[group] = here

    def choose(self, pc: np.ndarray, ready: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Threads that advance together, those with the smallest counter; the counter, and the next larger one."""
        counters = pc[ready]
        here = int(counters.min())
        later = counters[counters > here]
        if not later.size and ready.all():
            return self.everyone, here, len(self.code) + 1
        return ready & (pc == here), here, int(later.min()) if later.size else len(self.code) + 1

    # Operands.

    def get(self, name: str, kind: Any) -> np.ndarray:
        """An operand as an array [threads] of the numpy type `kind`."""
        value = self.registers.get(name)
        if value is None:
            value = self.constants.get((name, kind))
            if value is None:
                value = self.constants[name, kind] = np.full(self.threads, self.constant(name, np.dtype(kind)))
            return value
        if kind is bool:
            return value
        dtype = np.dtype(kind)
        if value.itemsize != dtype.itemsize:
            value = value.astype(_UNSIGNED[dtype.itemsize])
        return value.view(dtype)

    def constant(self, name: str, dtype: np.dtype) -> Any:
        """An operand that is no register, for one thread or for each."""
        if name.startswith("0f"):
            # The bits, for an integer type too.
            bits = np.array([int(name[2:], 16)], np.uint32)
            return (bits.view(np.float32)[0] if dtype.kind == "f" else bits[0]).astype(dtype)
        if name == "%tid.x":
            return self.tid.astype(dtype)
        if name == "%ctaid.x":
            return np.array(self.block, dtype)
        if name == "__dynamic_shmem__0":
            return np.zeros((), dtype)
        if name.startswith("%"):
            raise NotImplementedError(f"operand {name}")
        bits = np.array([int(name, 0) & (256**dtype.itemsize - 1)], np.uint64)
        return bits.astype(_UNSIGNED[dtype.itemsize]).view(dtype)[0]

    def put(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        """Writes a register of the active threads."""
        value = np.asarray(value)
        size = value.itemsize
        if value.dtype.kind != "b":
            width = {"%rd": 8, "%rs": 2}.get(name[:3], 4)
            value = value.view(_UNSIGNED[size])
            if size != width:
                value = value.astype(_UNSIGNED[width])
        if active is not self.everyone and (old := self.registers.get(name)) is not None:
            value = np.where(active, value, old)
        self.registers[name] = value

    @staticmethod
    def names(operand: str) -> tuple[str, ...]:
        """Registers of `{a, b}` or of a single operand."""
        return _names(operand)

    def address(self, operand: str, kind: Any) -> np.ndarray:
        """Value of `[register + offset]`."""
        base, offset = _base_and_offset(operand)
        address = self.get(base, kind).astype(np.int64) + offset
        return address % 2**32 if kind is np.uint32 else address

    def shared_indices(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Byte indices [n, size] into shared memory."""
        if (addresses < 0).any() or (addresses + size > len(self.shared)).any() or (addresses % size).any():
            raise IndexError("shared access out of range or misaligned")
        return addresses[:, None] + np.arange(size)

    # Instructions.

    def execute(self, opcode: str, operands: list[str], active: np.ndarray) -> None:
        """One instruction for the active threads."""
        name, parts = _method(opcode)
        handler = getattr(self, name, None)
        if handler is None:
            raise NotImplementedError(f"{opcode} {operands}")
        handler(parts, operands, active)

    def _simple(self, function: Any, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = bool if parts[-1] == "pred" else _TYPES[parts[-1]]
        values = [self.get(x, kind) for x in operands[1:]]
        self.put(operands[0], np.asarray(function(*values)).astype(kind, copy=False), active)

    def do_griddepcontrol(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        del operands
        if parts == ["wait"]:
            self.waited = self.waited | active
        else:
            self.memory.promised = min(self.memory.promised, int(self.knows(active).min()))

    def do_add(self, *a: Any) -> None:
        self._simple(np.add, *a)

    def do_sub(self, *a: Any) -> None:
        self._simple(np.subtract, *a)

    def do_and(self, *a: Any) -> None:
        self._simple(np.bitwise_and, *a)

    def do_or(self, *a: Any) -> None:
        self._simple(np.bitwise_or, *a)

    def do_xor(self, *a: Any) -> None:
        self._simple(np.bitwise_xor, *a)

    def do_not(self, *a: Any) -> None:
        self._simple(np.invert, *a)

    def do_neg(self, *a: Any) -> None:
        self._simple(np.negative, *a)

    def do_abs(self, *a: Any) -> None:
        self._simple(np.abs, *a)

    def do_min(self, *a: Any) -> None:
        self._simple(np.fmin, *a)

    def do_max(self, parts: list[str], *a: Any) -> None:
        self._simple(np.maximum if "NaN" in parts else np.fmax, parts, *a)

    def do_ex2(self, *a: Any) -> None:
        self._simple(np.exp2, *a)

    def do_lg2(self, *a: Any) -> None:
        self._simple(np.log2, *a)

    def do_rcp(self, *a: Any) -> None:
        self._simple(np.reciprocal, *a)

    def do_sqrt(self, *a: Any) -> None:
        self._simple(np.sqrt, *a)

    def do_rsqrt(self, *a: Any) -> None:
        self._simple(lambda x: 1 / np.sqrt(x), *a)

    def do_popc(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        self.put(operands[0], np.bitwise_count(self.get(operands[1], np.uint32)).astype(np.uint32), active)

    def do_bmsk(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        first, count = (np.minimum(self.get(x, np.uint32), 32).astype(np.uint64) for x in operands[1:])
        one = np.uint64(1)
        self.put(operands[0], (((one << count) - one) << first).astype(np.uint32), active)

    def do_tanh(self, *a: Any) -> None:
        self._simple(np.tanh, *a)

    def do_fma(self, *a: Any) -> None:
        def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
            return x.astype(np.float64) * y + z

        self._simple(fused, *a)

    def do_div(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[-1] == "f32":
            return self._simple(np.divide, parts, operands, active)

        def truncated(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            y = np.where(y == 0, 1, y)
            return np.sign(x) * np.sign(y) * (np.abs(x.astype(np.int64)) // np.abs(y.astype(np.int64)))

        return self._simple(truncated, parts, operands, active)

    def do_rem(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        self._simple(lambda x, y: np.fmod(x, np.where(y == 0, 1, y)), parts, operands, active)

    def do_shl(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = _TYPES[parts[-1]]
        self.put(operands[0], self.get(operands[1], kind) << self.get(operands[2], np.uint32).astype(kind), active)

    def do_shr(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = _TYPES[parts[-1]]
        self.put(operands[0], self.get(operands[1], kind) >> self.get(operands[2], np.uint32).astype(kind), active)

    def do_prmt(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts != ["b32"]:
            raise NotImplementedError(f"prmt.{parts}")
        x, y = (self.get(operand, np.uint32).astype(np.uint64) for operand in operands[1:3])
        both, selector = y << np.uint64(32) | x, self.get(operands[3], np.uint32).astype(np.uint64)
        found = np.zeros_like(both)
        for i in range(4):
            chosen = selector >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> np.uint64(8) * (chosen & np.uint64(7)) & np.uint64(255)
            sign = np.where(byte > np.uint64(127), np.uint64(255), np.uint64(0))
            found |= np.where(chosen > np.uint64(7), sign, byte) << np.uint64(8 * i)
        self.put(operands[0], found.astype(np.uint32), active)

    def do_shf(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts != ["l", "wrap", "b32"]:
            raise NotImplementedError(f"shf.{parts}")
        low, high = (self.get(x, np.uint32).astype(np.uint64) for x in operands[1:3])
        both, count = high << np.uint64(32) | low, self.get(operands[3], np.uint64) % np.uint64(32)
        self.put(operands[0], (both << count >> np.uint64(32)).astype(np.uint32), active)

    def do_mul(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = _TYPES[parts[-1]]
        a, b = (self.get(x, kind) for x in operands[1:])
        if "wide" in parts:
            wide = _WIDE[kind]
            self.put(operands[0], a.astype(wide) * b.astype(wide), active)
        elif "hi" in parts:
            bits = 8 * a.dtype.itemsize
            self.put(operands[0], (a.astype(object) * b.astype(object) >> bits).astype(kind), active)
        else:
            self.put(operands[0], a * b, active)

    def do_mad(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = _TYPES[parts[-1]]
        a, b = (self.get(x, kind) for x in operands[1:3])
        if "wide" in parts:
            kind = _WIDE[kind]
            a, b = a.astype(kind), b.astype(kind)
        self.put(operands[0], a * b + self.get(operands[3], kind), active)

    def do_setp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = _TYPES[parts[-1]]
        a, b = (self.get(x, kind) for x in operands[1:])
        compare = _FLOAT_NE if parts[0] == "ne" and kind is np.float32 else _COMPARE[parts[0]]
        self.put(operands[0], compare(a, b), active)

    def do_selp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = _TYPES[parts[-1]]
        a, b = (self.get(x, kind) for x in operands[1:3])
        self.put(operands[0], np.where(self.registers[operands[3]], a, b), active)

    def do_mov(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        target, source = operands
        if target.startswith("{"):
            value = self.get(source, np.uint64 if parts[0] == "b64" else np.uint32)
            half = 32 if parts[0] == "b64" else 16
            small = np.uint32 if half == 32 else np.uint16
            for i, name in enumerate(self.names(target)):
                if name != "_":
                    self.put(name, (value >> value.dtype.type(half * i)).astype(small), active)
        elif source.startswith("{"):
            big, half = (np.uint64, 32) if parts[0] == "b64" else (np.uint32, 16)
            low, high = (self.get(x, np.uint32 if half == 32 else np.uint16).astype(big) for x in self.names(source))
            self.put(target, low | (high << big(half)), active)
        else:
            self._simple(lambda x: x, parts, operands, active)

    def do_cvta(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        self._simple(lambda x: x, parts, operands, active)

    def do_cvt(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[-2] in ("bf16x2", "f16x2"):
            dtype = ml_dtypes.bfloat16 if parts[-2] == "bf16x2" else np.float16
            values = [self.get(x, np.float32) for x in operands[1:]]
            if "relu" in parts:
                values = [np.where(x < 0, np.float32(0), x) for x in values]
            high, low = (x.astype(dtype).view(np.uint16).astype(np.uint32) for x in values)
            self.put(operands[0], low | (high << np.uint32(16)), active)
        else:
            target, source = (_TYPES[x] for x in parts[-2:])
            self.put(operands[0], self.get(operands[1], source).astype(target), active)

    def do_shfl(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        value = self.get(operands[1], np.uint32)
        lane = self.get(operands[2], np.int32)
        source = self.tid ^ lane if parts[1] == "bfly" else self.tid // 32 * 32 + lane
        self.put(operands[0].split("|")[0], value[source], active)

    def do_vote(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        warps = (self.registers[operands[1]] & active).reshape(-1, 32)
        if "ballot" in parts:
            words = (warps.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
            return self.put(operands[0], np.repeat(words, 32), active)
        self.put(operands[0], np.repeat(warps.any(1), 32), active)

    def do_redux(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        reduce = {"min": np.minimum, "max": np.maximum, "or": np.bitwise_or}[parts[1]].reduce
        warps = active.reshape(-1, 32)
        if (warps.any(1) != warps.all(1)).any():
            raise RuntimeError("redux reached by a part of a warp")
        values = self.get(operands[1], _TYPES[parts[-1]]).reshape(-1, 32)
        self.put(operands[0], np.repeat(reduce(values, 1), 32), active)

    def do_bar(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[0] != "warp" and not active.all():
            raise RuntimeError("barrier reached by a part of the CTA")

    do_barrier = do_bar

    # Memory.

    def knows(self, active: np.ndarray) -> np.ndarray:
        """Returns until when each active thread knows what earlier launches wrote."""
        return np.where(self.waited, self.memory.begun - 1, self.known)[active]

    def acquire(self, addresses: np.ndarray, active: np.ndarray) -> None:
        """Learns what was written before the active threads' counts were released."""
        times = [self.memory.released.get(int(address), 0) for address in addresses[active]]
        self.known[active] = np.maximum(self.known[active], times)

    def read_places(self, addresses: np.ndarray, size: int, active: np.ndarray) -> np.ndarray:
        """Byte indices [n, size] into global memory of what the active threads read, given all threads' addresses."""
        places = self.memory.indices(addresses[active], size)
        if not self.waited.all():
            self.memory.check_read(self.memory.times[places].max(1), self.knows(active))
        return places

    def add_to_count(
        self, parts: list[str], addresses: np.ndarray, terms: np.ndarray, active: np.ndarray
    ) -> np.ndarray:
        """Adds to counts, one thread after the other, and returns what they were before, int32."""
        found = np.zeros(self.threads, np.int32)
        for thread in np.flatnonzero(active):
            alone = np.arange(self.threads) == thread
            place = self.read_places(addresses, 4, alone)[0]
            found[thread] = self.memory.data[place].view(np.int32)[0]
            # When the count was set stays: who reads it knows of that, and of additions by what they released.
            self.memory.data[place] = (found[thread : thread + 1] + terms[thread]).astype(np.int32).view(np.uint8)
            if {"acquire", "acq_rel"} & {*parts}:
                self.acquire(addresses, alone)
            if {"release", "acq_rel"} & {*parts}:
                self.memory.release(int(addresses[thread]))
        return found

    def add_to_sums(self, addresses: np.ndarray, terms: np.ndarray, active: np.ndarray) -> None:
        """Adds the active threads' terms to words of global memory, given all threads' addresses."""
        places = self.read_places(addresses, 4, active)
        np.add.at(self.memory.data.view(terms.dtype), places[:, 0] // 4, terms[active])
        self.memory.times[places] = self.memory.time

    def do_ld(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = _TYPES[parts[-1]]
        if parts[0] == "param":
            index = int(re.search(r"_param_(\d+)", operands[1])[1])
            value = np.full(self.threads, self.parameters[index], _TYPES[self.parameter_types[index]])
            return self.put(operands[0], value, active)
        names = self.names(operands[0])
        size = len(names) * np.dtype(kind).itemsize
        if (space := next((x for x in parts if x.startswith("shared")), None)) is not None:
            data = self.load_shared(space, self.address(operands[1], np.uint32)[active], size)
        else:
            addresses = self.address(operands[1], np.uint64)
            data = self.memory.data[self.read_places(addresses, size, active)]
            if "acquire" in parts:
                self.acquire(addresses, active)
        loaded = np.ascontiguousarray(data).view(kind)
        for i, name in enumerate(names):
            value = np.zeros(self.threads, kind)
            value[active] = loaded[:, i]
            self.put(name, value, active)

    def load_shared(self, space: str, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes [n, size] of shared memory; `space` as in the instruction."""
        del space
        return self.shared[self.shared_indices(addresses, size)]

    def do_st(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        kind = _TYPES[parts[-1]]
        values = np.stack([self.get(x, kind)[active] for x in self.names(operands[1])], 1)
        raw = np.ascontiguousarray(values).view(np.uint8)
        if "shared" in parts:
            self.shared[self.shared_indices(self.address(operands[0], np.uint32)[active], raw.shape[1])] = raw
        else:
            self.memory.write(self.memory.indices(self.address(operands[0], np.uint64)[active], raw.shape[1]), raw)

    def do_cp(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        if parts[1] == "commit_group":
            self.groups.append(self.open_copies)
            self.open_copies = []
        elif parts[1] == "wait_group":
            pending = int(operands[0])
            while len(self.groups) > pending:
                for target, data in self.groups.pop(0):
                    self.shared[target] = data
        else:
            width = int(operands[2])
            target = self.shared_indices(self.address(operands[0], np.uint32)[active], width)
            size = self.get(operands[3], np.uint32)[active] if len(operands) > 3 else np.full(active.sum(), width)
            data = np.zeros((len(target), width), np.uint8)
            copied = size == width
            reading = active.copy()
            reading[active] = copied
            data[copied] = self.memory.data[self.read_places(self.address(operands[1], np.uint64), width, reading)]
            self.shared[target] = _POISON
            self.open_copies.append((target, data))

    def do_ldmatrix(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        addresses = np.where(active, self.address(operands[1], np.uint32), 0)
        rows = self.shared[self.shared_indices(addresses, 16)].view(np.uint16)  # [threads, 8]
        matrices = rows.reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        if "trans" in parts:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, 4, 32)  # lane = row * 4 + column / 2
        for i, name in enumerate(self.names(operands[0])):
            self.put(name, pairs[:, i].reshape(-1), active)

    def do_movmatrix(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        assert "trans" in parts
        matrices = self.get(operands[1], np.uint32).view(np.uint16).reshape(-1, 8, 8)  # warp, row, column
        pairs = np.ascontiguousarray(matrices.swapaxes(1, 2)).view(np.uint32)
        self.put(operands[0], pairs.reshape(-1), active)

    def do_mma(self, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        dtype = ml_dtypes.bfloat16 if "bf16" in parts else np.float16

        def halves(names: tuple[str, ...]) -> np.ndarray:  # [register, warp, lane // 4, lane % 4 and pair]
            words = np.stack([self.get(x, np.uint32) for x in names])
            return words.view(np.uint16).view(dtype).astype(np.float32).reshape(len(names), -1, 8, 8)

        a, b = halves(self.names(operands[1])), halves(self.names(operands[2]))
        warps = a.shape[1]
        left = a.reshape(2, 2, warps, 8, 8).transpose(2, 1, 3, 0, 4).reshape(warps, 16, 16)
        right = b.transpose(1, 0, 3, 2).reshape(warps, 16, 8)
        # [warp, half, row, quad lane, element] to a register for each (half, element).
        pieces = (left @ right).reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for name, old, piece in zip(self.names(operands[0]), self.names(operands[3]), pieces, strict=True):
            self.put(name, self.get(old, np.float32) + piece, active)
