# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what compiled kernels cost from their object file: registers and local memory. Needs neither GPU nor tools.

The object holds the cubin, an ELF file of its own, whose section `.nv.info` lists `(symbol, value)` attributes. Their
numbers are not documented by NVIDIA; they are those that `cuobjdump --dump-elf` prints by name.

Importing this module loads the standard library alone: `benchmarks/machine_code.py` imports it next to the package of
another commit.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_fastattn.kernels.key import KernelSpec

_ELF_MAGIC = b"\x7fELF"
_EM_CUDA = 190
_SYMBOL_SIZE = 24

# An attribute is (format, number, size or value); only this format has a payload.
_FORMAT_WITH_PAYLOAD = 4
_FRAME_SIZE = 0x11
_REGISTER_COUNT = 0x2F


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel.

    Attributes:
        name: the kernel's symbol.
        registers: per thread.
        local_bytes: local memory per thread: spilled registers and indexed arrays. 0 means that nothing is spilled.
        shared_bytes: dynamic shared memory per CTA.
    """

    name: str
    registers: int
    local_bytes: int
    shared_bytes: int


def inspect_kernel(spec: KernelSpec) -> tuple[KernelResources, ...]:
    """Compiles the kernel of `spec` and returns what each kernel that it launches costs."""
    from jax_fastattn.compilation import compiler  # loads the compiler, which takes seconds

    return kernel_resources(*compiler.compile_launches(spec))


def kept_resources(spec: KernelSpec) -> tuple[KernelResources, ...]:
    """Returns the same as `inspect_kernel`, of an object that an earlier run of the tests may have compiled."""
    return kernel_resources(*kept_object(spec))


def kept_object(spec: KernelSpec) -> tuple[bytes, dict[str, int]]:
    """Returns the object file of a compile key, and the shared memory of its kernels, from an earlier run if it can."""
    import kept_kernels

    from jax_fastattn.compilation import compiler

    def compiled() -> bytes:
        kernel, shared_bytes = compiler.compile_launches(spec)
        return json.dumps(shared_bytes).encode() + b"\n" + kernel

    shared_bytes, _, kernel = kept_kernels.kernel("object", spec, None, compiled).partition(b"\n")
    return kernel, json.loads(shared_bytes)


def kernel_resources(kernel: bytes, shared_bytes: dict[str, int]) -> tuple[KernelResources, ...]:
    """Returns the resources of every kernel in an object file, in the order of their names.

    Args:
        kernel: the object file, see `compiler.compile_kernel`.
        shared_bytes: dynamic shared memory by kernel, where there is some: launches set it, the cubin does not know it.

    Raises:
        ValueError: there is no cubin in the object, or not every kernel that `shared_bytes` names.
    """
    sections = _sections(cubin(kernel))
    registers, frames = {}, {}
    for number, symbol, value in _attributes(sections[".nv.info"]):
        name = _symbol_name(sections, symbol)
        if number == _REGISTER_COUNT:
            registers[name] = value
        elif number == _FRAME_SIZE:
            frames[name] = value
    if not shared_bytes.keys() <= registers.keys():
        raise ValueError(f"the object has the kernels {sorted(registers)}; expected {sorted(shared_bytes)}")
    return tuple(
        KernelResources(name, registers[name], frames.get(name, 0), shared_bytes.get(name, 0))
        for name in sorted(registers)
    )


def cubin(kernel: bytes) -> bytes:
    """Returns the cubin in an object file, with whatever follows it there.

    Raises:
        ValueError: there is none.
    """
    start = kernel.find(_ELF_MAGIC)
    while start >= 0:
        (machine,) = struct.unpack_from("<H", kernel, start + 18)
        if machine == _EM_CUDA:
            return kernel[start:]
        start = kernel.find(_ELF_MAGIC, start + 1)
    raise ValueError("there is no cubin in the object file")


def _sections(elf: bytes) -> dict[str, bytes]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    contents = [elf[offset : offset + size] for _, _, _, _, offset, size in headers]
    return {
        _string(contents[names_index], header[0]): content for header, content in zip(headers, contents, strict=True)
    }


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    position = 0
    while position < len(info):
        kind, number, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if kind != _FORMAT_WITH_PAYLOAD:
            continue
        if size == 8:
            yield (number, *struct.unpack_from("<II", info, position))
        position += size


def _symbol_name(sections: dict[str, bytes], symbol: int) -> str:
    (name,) = struct.unpack_from("<I", sections[".symtab"], symbol * _SYMBOL_SIZE)
    return _string(sections[".strtab"], name)


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()
