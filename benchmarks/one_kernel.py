# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of one case once: prints what each costs, runs it, and compares the results with the reference.

    python benchmarks/one_kernel.py "more keys than queries"
    python benchmarks/one_kernel.py pairs --arch sm_80 --mode backward --change "batch=1, key_length=70"
    python benchmarks/one_kernel.py pairs --gpu
    python benchmarks/one_kernel.py --list

By default the kernels run in the emulator, which needs no GPU, and times are those of the emulator. With `--gpu` they
run on the first GPU as in a public call, and the time is the median of a call. With `--mode backward` both passes run,
and that time is the sum of both. Operands are poisoned where nothing may be read.

A kernel's local memory holds the registers that it spills. Cases are those of `tests/testing/cases/` that
kernels run. The exit status is 1 if a result is wrong. `run.py` times cases of the size of models.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from machine_code import TEST_FOLDERS, kernel_name
from report import MODES
from run import timing
from testing import combinations, compare
from testing.borrow import borrow
from testing.cases.biases import BIASES
from testing.cases.few_queries import FEW_QUERIES
from testing.cases.gpu import GPU_CASES
from testing.cases.hidden_rows import HIDDEN_ROWS
from testing.compare import Results
from testing.poison import poison
from tune import parse_config

from jax_fastattn.cases.case import Case
from jax_fastattn.cases.coverage import COVERAGE
from jax_fastattn.kernels.architectures import BORROWED
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops import vjp
from jax_fastattn.ops.cuda.launch import launch_p
from jax_fastattn.spec import AttentionSpec, Operands

EMULATED = tuple(arch for arch, found in COVERAGE.items() if found.emulated)

NAMED: dict[str, Case] = {**{str(case): case for case in GPU_CASES}, **BIASES, **FEW_QUERIES, **HIDDEN_ROWS}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    if options.list:
        print("\n".join(NAMED))
        return 0
    case = parse_config(functools.partial(dataclasses.replace, NAMED[options.case]), options.change)
    print(case, flush=True)
    sys.path += [str(Path(__file__).parents[1] / folder) for folder in TEST_FOLDERS]
    run = run_on_gpu if options.gpu else emulate
    try:
        run(case, options.mode, options.arch)
    except AssertionError as error:
        print(f"wrong: {error}", flush=True)
        return 1
    print("right", flush=True)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", help="a name that `--list` prints")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument("--mode", choices=MODES, default="forward")
    parser.add_argument("--change", default="", metavar="FIELDS", help='fields of the case, such as "batch=1, group=2"')
    parser.add_argument("--gpu", action="store_true", help="run on the first GPU")
    parser.add_argument(
        "--arch",
        help=f"the emulated GPU: {', '.join(EMULATED)} (default: sm_90a); with --gpu what a Hopper GPU counts as: "
        f"{', '.join(BORROWED)}",
    )
    options = parser.parse_args(argv)
    if not options.list and options.case not in NAMED:
        parser.error(f"`case` is {options.case!r}, which is no case; `--list` prints all")
    allowed = (None, *BORROWED) if options.gpu else EMULATED
    if not options.gpu:
        options.arch = options.arch or "sm_90a"
    if options.arch not in allowed:
        parser.error(f"`--arch` is {options.arch!r}; expected one of {', '.join(filter(None, allowed))}")
    return options


def emulate(case: Case, mode: str, arch: str) -> None:
    """Runs a case in the emulator of an architecture.

    Raises:
        AssertionError: a result is wrong.
    """
    import emulated_draws
    import emulated_ops

    run = emulated_ops.bind

    def bind(*operands: jax.Array, kernel: KernelSpec, **more: Any) -> list[jax.Array]:
        show(kernel)
        started = time.perf_counter()
        results = run(*operands, kernel=kernel, **more)
        print(f"    emulated in {time.perf_counter() - started:.1f} s", flush=True)
        return results

    with mock.patch.object(emulated_ops, "bind", bind):
        emulated_draws.check(case, arch, has_gradients=mode == "backward")


def run_on_gpu(case: Case, mode: str, arch: str | None) -> None:
    """Runs a case on the first GPU, and times it.

    Raises:
        AssertionError: a result is wrong.
        NotImplementedError: no kernel takes the case.
    """
    if jax.default_backend() != "gpu":
        raise SystemExit(f"`--gpu` needs a GPU, and JAX runs on {jax.default_backend()}; leave it out for the emulator")
    if arch is not None:
        borrow(arch)
    with jax.default_device(jax.devices("cpu")[0]):
        spec, *arrays = combinations.inputs(case)
        expected = compare.expected(spec, *arrays)
        arrays = poison(spec, *arrays)
    arrays = jax.device_put(arrays, jax.devices()[0])
    spec = dataclasses.replace(spec, implementation="cuda")  # raises where there is no kernel
    if mode == "forward":
        expected, arrays = [Results(x.out, x.lse) for x in expected], arrays[:1]
        call = jax.jit(lambda operands: Results(*attend(spec, operands)))
    else:
        call = functools.partial(compare.evaluate, attend, spec)
    launch = launch_p.bind

    def bind(*operands: jax.Array, kernel: KernelSpec, **more: Any) -> list[jax.Array]:
        show(kernel)
        return launch(*operands, kernel=kernel, **more)

    with mock.patch.object(launch_p, "bind", bind):
        found = call(*arrays)
    compare.assert_within_budget(*(jax.tree.map(np.asarray, x) for x in (found, *expected)))
    settings = argparse.Namespace(repeats=9, measurement_ms=20.0, warm_up_seconds=1.0)
    print(f"{timing(call, arrays, settings)['ms']['p50']:.3f} ms a call")


def attend(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, Any]:
    """Returns output and log-sum-exp, as public functions compute them once they have checked their arguments."""
    return vjp.attend(spec, operands, True)


def show(spec: KernelSpec) -> None:
    """Prints which kernels a compile key has, and what they cost."""
    from resources import kept_resources

    print(f"{spec.family} {spec.op}, {spec.config}")
    for kernel in kept_resources(spec):
        memory = f"{kernel.local_bytes} bytes of local memory, {kernel.shared_bytes} bytes of shared memory"
        print(f"    {kernel_name(kernel.name)}: {kernel.registers} registers, {memory}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
