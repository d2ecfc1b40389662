# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The C++ extension: what a launch passes to the runtime, what is loaded when, and every error a user can meet."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import itertools
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import stand_in
from stand_in import FLOATS, INTS, SPEC

from jax_fastattn import ffi
from jax_fastattn.ffi import call

NUM_BUFFERS = 6


class Library:
    """The stand-in's variables as attributes."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self.__dict__["handle"] = handle

    def __getattr__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.handle, name).value

    def __setattr__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.handle, name).value = value

    def array(self, name: str, kind: Any, length: int) -> list[Any]:
        return list((kind * length).in_dll(self.handle, name))


# Of the session, not of the module: pytest-xdist may come back to this module, and a process opens its libraries once.
@pytest.fixture(scope="session")
def handle(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return stand_in.install(stand_in.build(tmp_path_factory.mktemp("stand_in")))


# The extension keeps what it knows of a device: each test has one of its own.
_devices = itertools.count(10)


@pytest.fixture
def library(handle: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Library]:
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    stand_in.stand_in_compiler(monkeypatch)
    library = Library(handle)
    library.set_num_buffers, library.set_device = NUM_BUFFERS, next(_devices)
    library.seen_loads = library.seen_runs = library.seen_overlapping_loads = library.seen_attribute_reads = 0
    library.seen_captured_runs = library.seen_runs_elsewhere = library.set_load_milliseconds = 0
    library.seen_capture_mode, library.seen_stream_flags, library.seen_unloads = -1, 0, 0
    yield library
    for name in (
        "device_error",
        "attribute_error",
        "create_status",
        "get_status",
        "get_throws",
        "run_status",
        "run_throws",
        "run_cuda_error",
        "stream_error",
        "uncompress_error",
    ):
        setattr(library, f"set_{name}", 0)
    library.set_major, library.set_minor = 9, 0


def program(**static: Any) -> Any:
    """A compiled program with one launch. Not jit(launch), whose traces are shared between tests."""
    return jax.jit(lambda *arrays: stand_in.launch(*arrays, **static)).lower(*stand_in.operands()).compile()


def run(**static: Any) -> list[Any]:
    return jax.block_until_ready(program(**static)(*stand_in.operands()))


def test_arguments_reach_the_runtime_in_the_order_of_the_host_function(library: Library) -> None:
    arrays = stand_in.operands()
    out, lse = jax.block_until_ready(program()(*arrays))
    buffers = library.array("seen_buffers", ctypes.c_void_p, NUM_BUFFERS)
    assert buffers == [x.unsafe_buffer_pointer() for x in (*arrays, out, lse)]
    scalars = library.array("seen_ints", ctypes.c_int, 9)
    assert tuple(scalars[:7]) == INTS
    assert struct.unpack("2f", struct.pack("2i", *scalars[7:])) == FLOATS
    assert library.seen_num_arguments == NUM_BUFFERS + 7 + 2 + 2, "buffers, scalars, stream, error code"
    assert float(lse[0, 0, 0]) == INTS[0]


def test_equal_scalars_keep_their_number(library: Library) -> None:
    run(ints=(5,) * 7, floats=(1.0, 1.0))
    assert library.array("seen_ints", ctypes.c_int, 7) == [5] * 7


def test_a_kernel_is_loaded_once_by_many_threads(library: Library) -> None:
    """For a second device, on which all threads meet: a first run is slow to begin, and one thread is ahead."""
    launch = program()
    arrays = stand_in.operands()
    jax.block_until_ready(launch(*arrays))
    library.set_device, library.set_load_milliseconds = next(_devices), 200
    barrier = threading.Barrier(8)

    def run_with_others(_: int) -> None:
        barrier.wait()
        jax.block_until_ready(launch(*arrays))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(run_with_others, range(32)))
    assert (library.seen_loads, library.seen_runs, library.seen_overlapping_loads) == (2, 33, 0)


def test_a_launch_of_a_loaded_kernel_does_not_wait_for_another_load(library: Library) -> None:
    """CUDA may load only once a GPU is idle, which may wait for a collective, and so for the launches of other GPUs.

    The launch is one that no thread has made before: its kernel is looked up.
    """
    library.set_num_buffers = 2
    loaded, other = _attributes(b"loaded" * 100), _attributes(b"other" * 100)
    _call(loaded)
    library.set_load_milliseconds = 5000
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        load = pool.submit(_call, other)
        while not library.seen_open_loads and not load.done():
            time.sleep(0.01)
        _call(loaded)
        assert library.seen_runs == 2 and not load.done()
        load.result()
    assert (library.seen_loads, library.seen_runs) == (2, 3)


def test_a_kernel_is_compiled_once_by_many_threads(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads lower one call; the compiler takes longer than all of them need to begin."""
    compiled: list[Any] = []
    barrier = threading.Barrier(8)

    def compile_slowly(spec: Any) -> bytes:
        compiled.append(spec)
        time.sleep(0.5)
        return stand_in.elf_object()

    def lower_with_others(_: int) -> str:
        barrier.wait()
        return jax.jit(lambda *arrays: stand_in.launch(*arrays)).lower(*stand_in.operands()).as_text()

    monkeypatch.setattr(call, "_compile", compile_slowly)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lower_with_others, range(8)))
    assert all("@jax_fastattn_launch" in text for text in texts)
    assert compiled == [SPEC]


def test_a_kernel_is_loaded_once_per_device(library: Library) -> None:
    launch = program()
    for device in (0, 3, 0, 3):
        library.set_device = device
        jax.block_until_ready(launch(*stand_in.operands()))
        assert library.seen_device_at_run == device
    assert library.seen_loads == 2


def test_loading_is_allowed_during_stream_capture(library: Library) -> None:
    run()
    assert library.seen_mode_at_load == 2, "relaxed"
    assert library.seen_mode == 0, "as before"


def test_a_first_launch_is_captured_and_thrown_away(library: Library) -> None:
    """CUDA loads code at a first launch; two H100s waited for each other for ever where a collective ran then."""
    launch = program()
    for _ in range(2):
        jax.block_until_ready(launch(*stand_in.operands()))
    assert (library.seen_captured_runs, library.seen_runs) == (1, 2)
    library.set_device = next(_devices)
    jax.block_until_ready(launch(*stand_in.operands()))
    assert (library.seen_captured_runs, library.seen_runs) == (2, 3)
    assert library.seen_open_captures == 0


def test_a_first_launch_is_captured_without_regard_to_other_threads_and_streams(library: Library) -> None:
    """A global capture makes allocations of other threads fail; a blocking stream waits for the default stream."""
    run()
    assert library.seen_capture_mode == 2, "relaxed"
    assert library.seen_stream_flags == 1, "non-blocking"


def test_a_launch_that_cannot_be_captured_runs(library: Library) -> None:
    library.set_stream_error = 2
    run()
    assert (library.seen_captured_runs, library.seen_runs, library.seen_open_captures) == (0, 1, 0)


def test_the_object_arrives_whole(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = stand_in.elf_object(content=np.random.default_rng(0).bytes(100_001))
    stand_in.stand_in_compiler(monkeypatch, kernel)
    run()
    assert library.seen_object_size == len(kernel)


@pytest.mark.parametrize(
    ("arch", "major", "minor"),
    [
        *(("sm_80", 8, 0), ("sm_80", 8, 7), ("sm_86", 8, 9), ("sm_87", 8, 7), ("sm_90a", 9, 0), ("sm_100a", 10, 0)),
        *(("sm_103a", 10, 3), ("sm_110a", 11, 0), ("sm_120a", 12, 0), ("sm_120f", 12, 1), ("sm_121a", 12, 1)),
    ],
)
def test_architecture_that_runs(library: Library, arch: str, major: int, minor: int) -> None:
    library.set_major, library.set_minor = major, minor
    run(spec=dataclasses.replace(SPEC, arch=arch))
    assert library.seen_runs == 1


@pytest.mark.parametrize(
    ("arch", "major", "minor"),
    [("sm_80", 9, 0), ("sm_86", 8, 0), ("sm_90a", 10, 0), ("sm_90a", 8, 0), ("sm_120a", 12, 1), ("", 9, 0)]
    + [("sm_87", 8, 6), ("sm_100a", 10, 3), ("sm_103a", 10, 0), ("sm_110a", 10, 1), ("sm_121a", 12, 0)]
    + [(name, 9, 0) for name in ("sm_", "sm_a", "90a", "SM_90a", "sm_90ab", "sm_9x0", "sm_+90", "sm_090", "sm_90a ")]
    + [(f"sm_{2**32 + 90}a", 9, 0), (f"sm_{10**30}", 9, 0)],
)
def test_architecture_that_does_not_run(library: Library, arch: str, major: int, minor: int) -> None:
    library.set_major, library.set_minor = major, minor
    message = (
        rf"compiled for {re.escape(arch)}, but CUDA device \d+ has compute capability {major}.{minor}.*target_arch"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(spec=dataclasses.replace(SPEC, arch=arch))
    assert library.seen_loads == 0


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("device_error", 201, r"no CUDA device is current: CUDA error 201, unknown error"),
        ("create_status", 2, r"could not load kernel [0-9a-f]{12} on CUDA device \d+: CudaError\. Check that"),
        ("get_status", 1, r"could not load kernel [0-9a-f]{12} on CUDA device \d+: CudaError\. Check that"),
        ("get_throws", 1, r"has no function jax_fastattn"),
        ("get_throws", 2, r"too little host memory to load kernel [0-9a-f]{12}\."),
        ("run_cuda_error", 700, r"launch of kernel [0-9a-f]{12} failed: CUDA error 700, an illegal memory access"),
        ("run_throws", 1, r"runtime threw an exception in the launch of kernel [0-9a-f]{12}\."),
        ("run_status", 7, r"could not launch kernel [0-9a-f]{12} with 17 arguments: InvalidArguments"),
    ],
)
def test_error_of_the_runtime(library: Library, setting: str, value: int, message: str) -> None:
    setattr(library, f"set_{setting}", value)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run()
    assert library.seen_open_captures == 0
    unloads = library.seen_loads if setting.startswith("get_") else 0
    assert library.seen_unloads == unloads, "a module without our function is unloaded"
    setattr(library, f"set_{setting}", 0)
    run()  # nothing of the failure is kept


@pytest.mark.parametrize("change", ["machine", "not an object", "empty"])
def test_object_for_another_cpu_or_no_object(library: Library, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    kernel = {"machine": stand_in.elf_object(machine=8), "not an object": b"x" * 200, "empty": b"x"}[change]
    stand_in.stand_in_compiler(monkeypatch, kernel)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"has no launcher for this CPU\. Lower"):
        run()
    assert library.seen_loads == 0


KEY = "0" * 64


def _attributes(content: bytes = b"kernel" * 100, **changes: Any) -> dict[str, Any]:
    kernel = call._Kernel.of(KEY, stand_in.elf_object(content=content))
    attributes = {
        "key": kernel.key,
        "arch": "sm_90a",
        "digest": kernel.digest,
        "object": kernel.text,
        "object_size": np.int32(kernel.size),
        "num_buffers": np.int32(2),
        "ints": np.array(INTS, np.int32),
        "floats": np.array(FLOATS, np.float32),
    }
    return attributes | changes


def _program(attributes: dict[str, Any], num_operands: int = 1) -> Callable[[], Any]:
    """Returns a compiled call. Its object stays at one place for as long as the call is referred to."""
    x = np.ones((3,), np.float32)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    operands = [x] * num_operands
    compiled = (
        jax.jit(lambda *xs: jax.ffi.ffi_call(ffi.TARGET_NAME, result)(*xs, **attributes)).lower(*operands).compile()
    )
    return lambda: jax.block_until_ready(compiled(*operands))


def _call(attributes: dict[str, Any], num_operands: int = 1) -> Any:
    return _program(attributes, num_operands)()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text, size: {"object": text[: len(text) // 2]},
        lambda text, size: {"object": text[:40] + ("A" if text[40] != "A" else "B") + text[41:]},
        lambda text, size: {"object": "*" + text[1:]},
        lambda text, size: {"object": ""},
        lambda text, size: {"object_size": np.int32(size - 1)},
        lambda text, size: {"object_size": np.int32(size + 1)},
        lambda text, size: {"object_size": np.int32(-1)},
        lambda text, size: {"object_size": np.int32(2**31 - 1)},
    ],
    ids=["truncated", "flipped", "alphabet", "empty", "size-1", "size+1", "negative", "huge"],
)
def test_damaged_object_in_a_program(library: Library, request: pytest.FixtureRequest, damage: Any) -> None:
    whole = _attributes(request.node.name.encode() * 10)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"is damaged\. Lower the computation again, and discard"):
        _call(whole | damage(whole["object"], int(whole["object_size"])))
    assert library.seen_loads == 0
    library.set_num_buffers = 2
    _call(whole)
    assert library.seen_runs == 1, "the whole object runs in the same process"


def test_a_kernel_that_one_device_cannot_load_stays_that_of_another(library: Library) -> None:
    """It runs there; if it were deleted, a launch would read freed memory or load it again."""
    library.set_num_buffers = 2
    first = library.set_device
    whole = _attributes(b"loaded on the first device" * 10)
    _call(whole)
    library.set_device, library.set_uncompress_error = next(_devices), -3
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"is damaged\. Lower the computation again, and discard"):
        _call(whole)
    library.set_device = first
    _call(whole)
    assert (library.seen_loads, library.seen_runs) == (1, 2)


def test_another_object_under_a_loaded_key_runs_its_own_kernel(library: Library) -> None:
    library.set_num_buffers = 2
    for content in (b"one", b"another one", b"one"):
        _call(_attributes(content * 100))
        assert library.seen_object_at_run == len(stand_in.elf_object(content=content * 100))
    assert (library.seen_loads, library.seen_runs) == (2, 3)


def test_another_object_under_a_loaded_digest_is_refused(library: Library) -> None:
    library.set_num_buffers = 2
    loaded = _attributes(b"loaded" * 100)
    first = _program(loaded)  # An object at the place of a deleted one is not compared.
    first()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"kernel 0{12} has the digest of another object.*Lower both"):
        _call(_attributes(b"changed" * 100, digest=loaded["digest"]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="has the digest of another object"):
        _call(loaded | {"object_size": np.int32(loaded["object_size"] + 1)})
    first()
    assert (library.seen_loads, library.seen_runs) == (1, 2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
def test_another_architecture_under_a_loaded_key_is_refused(library: Library, arch: str) -> None:
    library.set_num_buffers = 2
    _call(_attributes())
    message = rf"compiled for {re.escape(arch)}, but CUDA device \d+ has compute capability 9\.0"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        _call(_attributes(arch=arch))
    assert library.seen_runs == 1


def test_an_error_of_get_attribute_is_not_remembered(library: Library) -> None:
    library.set_num_buffers, library.set_attribute_error = 2, 700
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"cannot read the compute capability .* illegal memory access"
    ):
        _call(_attributes())
    library.set_attribute_error = 0
    _call(_attributes())
    assert library.seen_runs == 1


def test_a_launch_reads_neither_the_object_nor_the_device_again(library: Library) -> None:
    """A launch is as quick with an object of 20 MB, and asks the driver for the compute capability once."""
    library.set_num_buffers = 2
    x = np.ones((3,), np.float32)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def seconds(content: bytes) -> float:
        launch = jax.jit(lambda x: jax.ffi.ffi_call(ffi.TARGET_NAME, result)(x, **_attributes(content)))
        launch(x).block_until_ready()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            launch(x).block_until_ready()
            times.append(time.perf_counter() - start)
        return min(times)

    small, large = seconds(b"small"), seconds(np.random.default_rng(0).bytes(20_000_000))
    assert large < small + 1e-3, "hashing or comparing 20 MB takes longer"
    assert library.seen_attribute_reads == 2, "major and minor"


def test_program_of_an_older_version(library: Library) -> None:
    """Such as one from a jax.export file: it names no digest, and is refused before it runs."""
    attributes = _attributes()
    del attributes["digest"]
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"another version of jax_fastattn lowered it\. .* export it again"
    ):
        _call(attributes)
    assert library.seen_runs == 0


@pytest.mark.parametrize(("num_buffers", "num_operands"), [(3, 1), (1, 1), (-1, 1), (41, 40)])
def test_wrong_number_of_buffers(library: Library, num_buffers: int, num_operands: int) -> None:
    message = rf"takes {num_buffers} buffers, but its custom call has {num_operands} operands and 1 results"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        _call(_attributes(num_buffers=np.int32(num_buffers)), num_operands)
    assert library.seen_runs == 0


@pytest.mark.parametrize("count", [59, 100])
def test_too_many_scalars(library: Library, count: int) -> None:
    message = rf"call of kernel 0{{12}} has {count + 2} scalars, more than any kernel takes\. .*changed after lowering"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        _call(_attributes(ints=np.zeros(count, np.int32)))
    assert library.seen_runs == 0


def test_as_many_scalars_as_a_launch_can_have(library: Library) -> None:
    library.set_num_buffers = 2
    _call(_attributes(ints=np.arange(58, dtype=np.int32), floats=np.zeros(2, np.float32)))
    assert library.array("seen_ints", ctypes.c_int, 60) == [*range(58), 0, 0]
    assert library.seen_num_arguments == 64


@pytest.mark.parametrize("name", ["key", "digest", "object", "ints", "num_buffers"])
def test_missing_attribute(library: Library, name: str) -> None:
    attributes = _attributes()
    del attributes[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match="attribute"):
        _call(attributes)
    assert library.seen_runs == 0


@pytest.mark.parametrize("name", ["key", "digest", "ints", "num_buffers"])
def test_attribute_of_another_type(library: Library, name: str) -> None:
    value: Any = np.int32(0) if isinstance(_attributes()[name], str) else "text"
    with pytest.raises(jax.errors.JaxRuntimeError, match="another version of jax_fastattn lowered it"):
        _call(_attributes() | {name: value})
    assert library.seen_runs == 0


@pytest.mark.parametrize("value", [np.int32(0), np.array([1.0], np.float32), "text"], ids=["int", "floats", "text"])
def test_attribute_that_this_version_does_not_know(library: Library, value: Any) -> None:
    """Such as an option of a later version's kernels, without which the call means something else."""
    library.set_num_buffers = 2
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=r"one that it does not know: another version of jax_fastattn lowered it\. .* export it again",
    ):
        _call(_attributes(option=value))
    assert library.seen_loads == library.seen_runs == 0


def _address(handler: Any) -> int:
    """The C function of a handler."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return address(handler, b"xla._CUSTOM_CALL_TARGET")


def _call_again(library: Library, handler: str, **set_values: Any) -> None:
    """Calls a handler of csrc/call_again.cc."""
    from jax_fastattn.ffi import _ffi

    kinds: dict[str, Any] = {
        "name": ctypes.c_char_p,
        "text": ctypes.c_char_p,
        "handler": ctypes.c_void_p,
    }
    for name, value in {"handler": _address(_ffi.launch_on_host), **set_values}.items():
        kinds.get(name, ctypes.c_int).in_dll(library.handle, f"set_{name}").value = value
    jax.ffi.register_ffi_target(handler, jax.ffi.pycapsule(getattr(library.handle, handler)), platform="cpu")
    library.set_num_buffers = 2
    x = np.ones((3,), np.float32)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    attributes = _attributes(content=f"{handler} {set_values}".encode())
    jax.block_until_ready(jax.jit(lambda x: jax.ffi.ffi_call(handler, result)(x, **attributes))(x))


def test_the_architecture_of_a_call_at_the_place_of_another_one_is_checked(library: Library) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"compiled for sm_80, but CUDA device \d+ has"):
        _call_again(library, "launch_changed", name=b"arch", text=b"sm_80")
    assert library.seen_runs == 1


def test_a_call_at_the_place_of_another_one_runs_its_own_kernel(library: Library) -> None:
    _call_again(library, "launch_changed", name=b"digest", text=b"1" * 64)
    assert (library.seen_loads, library.seen_runs) == (2, 3)


@pytest.mark.parametrize("place", [{"moved_bytes": 4}, {"moved_bytes": 8}, {"is_null": 1}], ids=str)
def test_a_buffer_that_kernels_cannot_read_is_refused(library: Library, place: dict[str, int]) -> None:
    """Before a kernel fails on it, after which the process could use its GPU no more."""
    whole = {"moved_bytes": 0, "is_null": 0, "is_empty": 0}
    message = r"buffer 0 of kernel 0{12} is at address \d+, but kernels take multiples of 16 other than 0\. .*: copy"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        _call_again(library, "launch_moved", **whole | place)
    assert library.seen_runs == 0


@pytest.mark.parametrize("place", [{"moved_bytes": 16}, {"is_null": 1, "is_empty": 1}], ids=str)
def test_a_buffer_that_kernels_can_read_is_passed_on(library: Library, place: dict[str, int]) -> None:
    whole = {"moved_bytes": 0, "is_null": 0, "is_empty": 0}
    _call_again(library, "launch_moved", **whole | place)
    assert library.seen_runs == 1


def test_threads_launch_the_kernel_of_their_device(library: Library) -> None:
    first, _ = next(_devices), next(_devices)
    _call_again(library, "launch_by_threads", first_device=first)
    assert (library.seen_loads, library.seen_runs_elsewhere, library.seen_open_captures) == (2, 0, 0)
    assert library.seen_runs == 8000


class _Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, after XLA_FFI_Metadata_Extension and XLA_FFI_Extension_Base, as jaxlib 0.8.0 has them."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
        ("state_type_id", ctypes.c_int64),
    )


class _MetadataExtension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


def test_launches_may_be_captured_into_command_buffers() -> None:
    """Asks the handler what XLA asks when it is registered."""
    from jax_fastattn.ffi import _ffi

    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_address(_ffi.launch))
    metadata = _Metadata(struct_size=ctypes.sizeof(_Metadata), version_struct_size=24)
    extension = _MetadataExtension(ctypes.sizeof(_MetadataExtension), 1, None, ctypes.pointer(metadata))
    frame = (ctypes.c_void_p * 64)(168, ctypes.addressof(extension))  # XLA_FFI_CallFrame, of which this much is read
    assert handler(ctypes.addressof(frame)) is None
    assert metadata.traits == 1, "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE alone"
    assert metadata.major == 0
