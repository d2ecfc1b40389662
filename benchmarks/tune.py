# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times variants of a kernel beside each other and beside peers: what the tables in kernels/sm90 and sm80 rest on.

    python benchmarks/tune.py --cases d64-causal-4k d64-full-16k --peers dew-flash-attn \\
        --configs "3, 128, 10, ping_pong=True" "3, 112, 10, ping_pong=True, persistent=True"
    python benchmarks/tune.py --mode backward --cases d64-full-4k --configs table "128, 2, dq_registers=72"
    python benchmarks/tune.py --arch sm_90-rtx --mode backward --cases d256-full-4k \\
        --configs table "3, 1, 16, keys_per_warp=16, dq_row_warps=1"

Each argument of `--configs` holds the arguments of a `ForwardConfig`, or for the backward pass of a `BackwardConfig`
(Hopper) or a `DkdvDqConfig` (portable); "table" names the row that is the default. A variant is a compile key with
another config. The variants take turns in short measurements, forwards and then backwards, so that a clock that drops
under load drops for all. If the results of a variant differ from those of the first, or if it does not end, its record
has an error.

Variants are compiled first, in processes of their own. One record per line goes to the output: config, case, median and
best TFLOP/s, ratio to the best peer, clocks.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from cases import CASES, FLOP_FORMULA, flops
from peers import IMPLEMENTATIONS
from run import MODES, clocks, compiled, describe_run
from testing.borrow import borrow

from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.architectures import BORROWED
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import BackwardConfigs
from jax_fastattn.kernels.sm90.backward.dq_config import dq_config
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.spec import AttentionSpec, Operands

# A variant that hangs holds the GPU until its process ends.
LONGEST_STEP_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", required=True)
    parser.add_argument("--mode", choices=MODES, default="forward")
    parser.add_argument("--arch", choices=BORROWED, help="the portable kernels, with tiles of which card")
    parser.add_argument("--configs", nargs="+", required=True)
    parser.add_argument("--peers", nargs="*", choices=IMPLEMENTATIONS, default=[])
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default: 7)")
    parser.add_argument("--measurement-ms", type=float, default=20.0, help="the length of one (default: 20)")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args()
    if options.arch:
        borrow(options.arch)
    keys = {name: compile_key(CASES[name], options.mode) for name in options.cases}
    variants = {name: [variant(key, text) for text in options.configs] for name, key in keys.items()}
    compile_all({key: None for found in variants.values() for key in found})
    context = {"flop_formula": FLOP_FORMULA, "arch": options.arch} | describe_run(options.commit)
    for name in options.cases:
        for record in tune(name, variants[name], options):
            line = f"{name:24} {record['variant']:70} {record.get('tflops', 0):6.0f} {record.get('ratio', 0):6.3f}"
            print(line, record["error"] or "", flush=True)
            with options.output.open("a") as file:
                file.write(json.dumps(record | context) + "\n")


def compile_key(case: Case, mode: Any) -> KernelSpec:
    """Returns the compile key of a case; the backward pass computes the gradient of all operands."""
    return kernel_spec(case.problem(), mode, ffi.arch(), dsinks=mode == "backward" and case.sinks is not None)


def variant(key: KernelSpec, text: str) -> KernelSpec:
    """Returns the compile key of a variant.

    Args:
        key: the one whose config is that of the table.
        text: the arguments of the config, or "table".
    """
    if text == "table":
        return key
    if not isinstance(key.config, BackwardConfigs):
        return dataclasses.replace(key, config=parse_config(type(key.config), text))
    main = parse_config(type(key.config.main), text)
    config = BackwardConfigs(main, None if main.adds_dq else key.config.dq or dq_config(key))
    return dataclasses.replace(key, config=config, ordered=key.ordered and config.adds_dq)


def parse_config(kind: Any, text: str) -> Any:
    """Returns a config of that class.

    Args:
        kind: the class.
        text: arguments of its constructor, by position or by name, such as "3, 128, 10, ping_pong=True".

    Raises:
        ValueError: the text is no list of literals.
    """
    call = ast.parse(f"config({text})", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"`{text}` is no list of arguments")
    positional = [ast.literal_eval(argument) for argument in call.args]
    return kind(*positional, **{str(argument.arg): ast.literal_eval(argument.value) for argument in call.keywords})


def compile_all(keys: Iterable[KernelSpec]) -> None:
    """Fills the kernel cache, on all cores."""
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, keys))


def compile_one(key: KernelSpec) -> None:
    """Compiles one variant; its error, if any, comes again where it is measured."""
    try:
        ffi.prepare(key)
    except Exception as error:
        print(f"{key.config}: {error}")


def launch(key: KernelSpec, spec: AttentionSpec) -> Callable[..., Any]:
    """Returns a function that launches the kernel of a compile key.

    It takes operands and returns the output, or for the backward pass takes the output, the log-sum-exp and the
    output's cotangent too, and returns the gradients by name.
    """

    def backward(operands: Operands, out: jax.Array, lse: jax.Array, dout: jax.Array) -> dict[str, jax.Array]:
        found = cuda.backward(spec, operands, out, lse, dout, None, kernel=key)
        return {name: x for name, x in found._asdict().items() if x is not None}

    return backward if key.op == "backward" else lambda operands: cuda.forward(spec, operands, kernel=key)[0]


def launched(
    key: KernelSpec, case: Case, operands: Operands, dout: jax.Array
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what is timed and its arguments, as `run.compiled` does, with the kernel of a compile key."""
    spec, arrays = case.spec(), (operands,)
    if key.op == "backward":
        arrays = operands, *jax.jit(lambda operands: cuda.forward(spec, operands))(operands), dout
    return jax.jit(launch(key, spec)), arrays


@dataclasses.dataclass
class Run:
    """A compiled call with its measurements."""

    variant: str
    call: Callable[..., Any]
    arrays: Any
    error: str | None
    seconds: list[float] = dataclasses.field(default_factory=list)


def tune(name: str, keys: list[KernelSpec], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Records of one case."""
    case = CASES[name]
    operands = jax.jit(case.operands)(jax.random.key(2026))
    dout, _ = case.cotangents(jax.random.key(1))
    labels = [text if text == "table" else str(key.config) for text, key in zip(options.configs, keys, strict=True)]
    attempts = [(label, functools.partial(launched, key)) for label, key in zip(labels, keys, strict=True)]
    attempts += [
        (peer, functools.partial(compiled, IMPLEMENTATIONS[peer].attend, mode=options.mode)) for peer in options.peers
    ]
    runs, first = [], None
    for label, prepare in attempts:
        try:
            with deadline(f"{name}: {label}"):
                call, arrays = prepare(case=case, operands=operands, dout=dout)
                call = call.lower(*arrays).compile()
                result = [x.astype(jnp.float32) for x in jax.tree.leaves(call(*arrays))]
                first = result if first is None else first
                pairs = zip(result, first, strict=True)
                difference = max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)
            error = None if difference < 8e-3 else f"differs from the first by {difference:.1e}"
            runs.append(Run(label, call, arrays, error))
        except Exception as error:
            yield {"case": name, "variant": label, "error": f"{type(error).__name__}: {error}"[:300]}
    for turn in range(-1, options.rounds):
        for run in runs if turn % 2 else runs[::-1]:
            with deadline(f"{name}: {run.variant}"):
                seconds = measure(run, options.measurement_ms)
            if turn >= 0:  # the one before is to warm up
                run.seconds.append(seconds)
    work = flops(case, options.mode) / 1e12
    rates = {run.variant: work / statistics.median(run.seconds) for run in runs}
    best_peer = max((rates[peer] for peer in options.peers if peer in rates), default=None)
    for run in runs:
        rate = rates[run.variant]
        record = {"case": name, "mode": options.mode, "variant": run.variant, "error": run.error, "tflops": rate}
        record |= {"best_tflops": work / min(run.seconds), "rounds": options.rounds, "clocks": clocks()}
        yield record | ({} if best_peer is None else {"ratio": rate / best_peer})


def measure(run: Run, milliseconds: float) -> float:
    """Seconds per call, over as many asynchronous calls as fill the time."""
    started = time.perf_counter()
    jax.block_until_ready(run.call(*run.arrays))
    calls = max(1, int(milliseconds / 1e3 / (time.perf_counter() - started)))
    started = time.perf_counter()
    for _ in range(calls):
        result = run.call(*run.arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / calls


class deadline:
    """Ends the process when the block takes too long: nothing else frees a GPU from a kernel that hangs."""

    def __init__(self, what: str):
        def give_up() -> None:
            print(f"does not end: {what}", flush=True)
            os._exit(3)

        self._timer = threading.Timer(LONGEST_STEP_SECONDS, give_up)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: Any) -> None:
        self._timer.cancel()


if __name__ == "__main__":
    main()
