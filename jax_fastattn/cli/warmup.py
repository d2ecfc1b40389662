# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`warmup`: compiles the kernels of calls into the cache directory, on any machine.

The keys are the same as in a call: `choose.kernel_spec` makes them. Workers compile the kernels into the cache. A
compile key holds no size, but sizes choose among keys; without a size, every key that some size has is compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.cli import machine, shapes
from jax_fastattn.cli.errors import CommandError, UsageError
from jax_fastattn.cli.text import file_size
from jax_fastattn.compilation import cache, libraries, workers
from jax_fastattn.kernels.choose import SHORT_LENGTH, SHORT_LOADING_LENGTH, has_few_queries
from jax_fastattn.kernels.decode.config import BLOCK_ROWS, ROW_BLOCKS
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.support import unsupported_reasons

# These are long calls; calls with a config for short lengths, packed ones too; and calls with enough short heads that
# dq is added in semaphore order. Together with `few_queries`, `biased` and `compared` they have every key that any size
# has, which a test shows.
SIZES = [shapes.Size(batch, length, length) for batch, length in ((1, 8192), (1, SHORT_LENGTH), (264, 512))]


def few_queries(layer: Case) -> Iterator[shapes.Size]:
    """Yields sizes of the decoding kernels: for each number of blocks of rows, whole units and split ones."""
    for blocks in ROW_BLOCKS:
        if queries := BLOCK_ROWS * blocks // layer.group:
            # Units of few keys are whole, and of many keys split; with many heads, they are whole in a large batch.
            yield from (shapes.Size(*size) for size in ((1, queries, 128), (1, queries, 1 << 20), (133, queries, 128)))


def biased() -> Iterator[shapes.Size]:
    """Yields sizes of calls with a bias: short ones, and with one query or one key, where the bias is another kind.

    A batch that shares a bias computes its gradient in parts if it is short, and one of 264 does at any length.
    """
    for batch, length in ((1, SHORT_LOADING_LENGTH), (264, SHORT_LOADING_LENGTH + 128)):
        yield shapes.Size(batch, length, length)
    for size in SIZES:
        yield dataclasses.replace(size, query_length=1)
        yield dataclasses.replace(size, key_length=1)


def compared() -> Iterator[shapes.Size]:
    """Yields sizes of calls with ids, or with a mask of few rows or keys, whose bits take too much memory."""
    for query_length, key_length in ((1 << 17, 1 << 17), (1, 1 << 20), (1 << 20, 1)):
        yield shapes.Size(64, query_length, key_length)


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "warmup",
        help="compile kernels ahead of time, with or without a GPU",
        description="Compiles the forward and backward kernels of calls into the cache directory. Needs no GPU.",
    )
    shapes.add_shape(parser)
    shapes.add_size(parser, "default: any batch size", "default: kernels for every length")
    shapes.add_arch(parser, "GPU to compile for, such as sm_90a; may be repeated; default: the GPUs of this machine")
    parser.add_argument("--processes", type=shapes.positive, metavar="P", help="default: one for each CPU core")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Compiles what is not in the cache, and prints a line for each kernel."""
    if missing := machine.missing_parts():
        raise CommandError("; ".join(missing))
    cases = [case for layer in shapes.layers(options).values() for case in cases_of(layer, options)]
    specs = list(dict.fromkeys(spec for arch in _architectures(options) for spec in _specs(cases, arch)))
    absent = _absent(specs)
    print(f"{len(specs)} kernels, by {_compiler()}, into {cache.directory()}", flush=True)
    failed, compiled = 0, 0
    for number, (spec, outcome) in enumerate(_prepared(specs, absent, options.processes), 1):
        has_failed = outcome.startswith("failed")
        failed, compiled = failed + has_failed, compiled + outcome.startswith("compiled")
        line = f"[{number}/{len(specs)}] {describe(spec)}: {outcome}"
        print(line, file=sys.stderr if has_failed else sys.stdout, flush=True)
    _print_end(len(specs), compiled, failed)
    return 1 if failed else 0


def cases_of(layer: Case, options: argparse.Namespace) -> Iterator[Case]:
    """Yields the calls whose kernels are compiled."""
    sizes = [*SIZES, *few_queries(layer), *(biased() if options.bias else ())]
    sizes += compared() if {"mask", "segment_ids"} & {*options.operands} else ()
    if options.length:
        sizes = [shapes.Size(options.batch or 1, *options.length)]
    elif options.batch:
        raise UsageError("--batch alone chooses no kernel; pass --length too, or leave out --batch")
    for size in sizes:
        case = shapes.sized(layer, options, size)
        if not options.length and case.dtype == "float32" and has_few_queries(case.problem()):
            continue  # such calls take the XLA path
        yield case
        if case.mask is not None:
            # Under a mask of padding all queries see the same keys.
            yield dataclasses.replace(case, mask="bs")


def _architectures(options: argparse.Namespace) -> list[str]:
    """Returns the GPUs to compile for."""
    if options.arch:
        return options.arch
    devices, _ = machine.local_gpus()
    found = {architecture: None for device in devices if (architecture := machine.architecture(device))}
    if not found:
        where = "no kernel runs on the GPUs of this machine" if devices else "this machine has no GPU"
        raise UsageError(f"{where}; name the GPU to compile for, such as --arch sm_90a (H100) or --arch sm_80 (A100)")
    return list(found)


def _specs(cases: list[Case], arch: str) -> list[KernelSpec]:
    """Returns the kernels of calls on one GPU.

    Raises:
        UsageError: no kernel takes one of them.
        CommandError: the installed compiler cannot compile for the GPU.
    """
    reasons = {str(reason): None for case in cases for reason in unsupported_reasons(case.problem(), arch)}
    if reasons:
        raise UsageError(f"such calls run no kernel on {arch}: {'; '.join(reasons)}")
    if texts := ffi.compiler_reasons(arch):
        raise CommandError("; ".join(texts))
    return kernel_specs(cases, arch)


def _absent(specs: list[KernelSpec]) -> list[KernelSpec]:
    """Returns the kernels that the cache lacks; raises if there are any and they could not be kept.

    A user who can only read the cache may thus ask whether it has everything.
    """
    state = cache.state()
    unusable = bool(state.problem) and not state.is_writable
    absent = specs if unusable else [spec for spec in specs if cache.load(cache.kernel_key(spec)) is None]
    if absent and not state.is_writable:
        problem = state.problem or f"it lacks {len(absent)} of {len(specs)}, and this user cannot write to it"
        remedy = state.remedy or "Run this as its owner, or set `JAX_FASTATTN_CACHE_DIR` to a directory of your own."
        raise CommandError(f"cannot keep kernels in {state.path or 'a cache directory'}: {problem}. {remedy}")
    return absent


def _compiler() -> str:
    return f"nvidia-cutlass-dsl {libraries.compiler_version()} for CUDA {libraries.toolkit()}"


def _prepared(
    specs: list[KernelSpec], absent: list[KernelSpec], processes: int | None
) -> Iterator[tuple[KernelSpec, str]]:
    """Yields each kernel with what became of it, as soon as that is known."""
    for spec in specs:
        if spec not in absent:
            yield spec, "in the cache already"
    if not absent:
        return
    count = min(processes or len(os.sched_getaffinity(0)), len(absent))
    crew = _Crew()
    with ThreadPoolExecutor(count) as pool:
        running = {pool.submit(crew.compile, spec): spec for spec in absent}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except (KeyboardInterrupt, GeneratorExit):
            pool.shutdown(wait=False, cancel_futures=True)
            crew.kill()
            raise
    crew.close()


class _Crew:
    """Workers, one for each thread that compiles. A worker that has ended makes place for another one."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[workers.Worker] = queue.SimpleQueue()
        self._all: list[workers.Worker] = []

    def compile(self, spec: KernelSpec) -> str:
        """Returns what became of a kernel. An error of the compiler belongs to its kernel and does not stop others."""
        try:
            worker = self._free()
        except OSError as error:
            return f"failed: no process could be started: {error}"
        found = worker.compile(cache.kernel_key(spec), spec)
        if not worker.has_ended:
            self._idle.put(worker)
            return outcome(found)
        return f"{outcome(found)}; if memory is short, pass a smaller --processes"

    def _free(self) -> workers.Worker:
        """Returns a worker that has nothing to do."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            worker = workers.Worker()
            self._all.append(worker)
            return worker

    def kill(self) -> None:
        """Ends the workers at once. The cache holds no half-written kernel then."""
        for worker in self._all:
            worker.kill()

    def close(self) -> None:
        """Ends the workers, which have nothing to do."""
        for worker in self._all:
            worker.close()


def outcome(found: dict[str, Any]) -> str:
    """Returns in words what a worker says of a kernel."""
    return f"failed: {found['problem']}" if "problem" in found else f"compiled in {found['seconds']:.1f} s"


def describe(spec: KernelSpec) -> str:
    """Returns a kernel in words."""
    head_dims = f"d{spec.head_dim}" + (f"/{spec.v_head_dim}" if spec.v_head_dim != spec.head_dim else "")
    flags = {
        "window_left": "left bound",
        "window_right": "right bound",
        "query_seq_lengths": "query lengths",
        "key_value_seq_lengths": "key lengths",
        "query_offset": "offsets",
        "packed": "packed",
        "mask": "mask",
        "segment_ids": "segment ids",
        "listed": "lists of tiles",
        "row_bits": "bits of rows",
        "matrix_bias": "bias of pairs",
        "key_bias": "bias of keys",
        "key_bias_parts": "bias of keys",
        "row_bias": "bias of queries",
        "dbias": "gradient of the bias",
        "dsinks": "gradient of sinks",
        "dlse": "gradient of the log-sum-exp",
        "ordered": "dq in semaphore order",
    }
    words = [spec.arch, spec.op, head_dims, f"group {spec.group}", spec.result_dtype]
    if spec.op == "prepass":
        side = "keys" if spec.config.transposed else "queries"
        words = [spec.arch, spec.op, f"tiles of {spec.config.rows}x{spec.config.keys}", f"lists of {side}"]
    if spec.op == "decode":
        cut = f" split at every {spec.config.portion * spec.config.keys} keys" if spec.config.portion else ""
        cut = cut if spec.config.splits else " of whole heads"
        words.append(f"{BLOCK_ROWS * spec.config.row_blocks} rows{cut}")
    words += [text for name, text in flags.items() if getattr(spec, name)]
    words += [code.name for code in spec.features]
    return ", ".join(words) + f" ({cache.kernel_key(spec)[:8]})"


def _print_end(count: int, compiled: int, failed: int) -> None:
    """Prints the sum, and what other processes need to find the kernels."""
    state = cache.state()
    print(f"{compiled} compiled, {count - compiled - failed} in the cache before, {failed} failed")
    print(f"cache: {state.path}, {state.entries} kernels, {file_size(state.size)}")
    print(
        f"Processes find these kernels if they have {_compiler()}, the same jax_fastattn, and a driver for that CUDA "
        "version or a newer one."
    )
    if os.geteuid() == 0:
        print(f"To let other users of this machine or image read them: chmod -R a+rX {state.path}")
    elif compiled:
        print("No other user can use what this user compiled. To fill a cache for several users, run this as root.")
