# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures what the kernels of a model add to its first step: seconds to compile, and MiB on disk.

    python benchmarks/first_step.py             # needs the compiler and no GPU
    python benchmarks/first_step.py --step llama3-8b --parts    # a step without workers, and where its seconds go
    python benchmarks/first_step.py --report    # makes the table of docs/first_step.md from the newest record

A step is the gradient of a loss through one attention layer of each kind that a model has. It is traced and lowered for
an H100, in a process of its own: with an empty cache (cold), and with one that `warmup` has filled (warm). XLA compiles
nothing, so what XLA adds on a GPU is not measured. With `JAX_FASTATTN_WORKERS=0` in the environment, the cold step
compiles all kernels itself. Layers of a kind share their kernels, whatever their number.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from unittest import mock

import jax
import jax.numpy as jnp
from peers import IMPLEMENTATIONS
from report import RESULTS, ROOT
from run import describe_run

import jax_fastattn
from jax_fastattn import ffi
from jax_fastattn.cases.models import BIASED, CALLS
from jax_fastattn.compilation import settings, workers

ARCH = "sm_90a"
PAGE = ROOT / "docs" / "first_step.md"
BEGIN, END = "<!-- first step: begin -->", "<!-- first step: end -->"


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        title: its name in the table.
        calls: names of its kinds of layers in `CALLS` and `BIASED` of `cases.models`.
        warmup: options of the command `warmup` for the same layers.
        dtype: of query, key and value.
    """

    title: str
    calls: tuple[str, ...]
    warmup: tuple[str, ...]
    dtype: str = "bfloat16"


MODELS = {
    "llama3-8b": Model("Llama 3 8B", ("llama3-8b",), ("--model", "llama3-8b", "--length", "8192")),
    "gemma2-9b": Model(
        "Gemma 2 9B", ("gemma2-9b-full", "gemma2-9b-window"), ("--model", "gemma2-9b", "--length", "8192")
    ),
    "masked-encoder": Model(
        "masked Flax encoder (BERT large)",
        ("bert-large-mask-bs",),
        ("--heads", "16", "--head-dim", "64", "--with", "mask", "--batch", "8", "--length", "512"),
    ),
    "masked-encoder-float32": Model(
        "the same in float32",
        ("bert-large-mask-bs",),
        (
            *("--heads", "16", "--head-dim", "64", "--dtype", "float32", "--with", "mask"),
            *("--batch", "8", "--length", "512"),
        ),
        "float32",
    ),
    "t5-base": Model(
        "T5 base encoder",
        ("t5-base",),
        ("--heads", "12", "--head-dim", "64", "--bias", "nts/float32", "--batch", "64", "--length", "512"),
    ),
    "alphafold": Model(
        "AlphaFold triangle attention",
        ("alphafold-triangle",),
        (
            *("--heads", "8", "--head-dim", "32", "--bias", "nts/float32", "--with", "mask"),
            *("--batch", "512", "--length", "256"),
        ),
    ),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/first-step-<date>.json")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    parser.add_argument("--report", action="store_true", help="write the table, measure nothing")
    parser.add_argument("--step", choices=MODELS, help="lower the step of a model in this process, and print times")
    parser.add_argument("--parts", action="store_true", help="of --step: its parts, without workers, in an empty cache")
    options = parser.parse_args(argv)
    if options.parts and not options.step:
        parser.error("--parts needs --step")
    if options.report:
        PAGE.write_text(filled(PAGE, RESULTS))
        return
    if options.parts:
        print(json.dumps(parts(MODELS[options.step])))
        return
    if options.step:
        print(json.dumps(lowered(MODELS[options.step])))
        return
    found = {name: measured(name) for name in options.models}
    record = {"benchmark": "first step", "arch": ARCH, "cores": os.cpu_count(), "models": found}
    record["workers"] = workers.most() if settings.has_workers() else 0
    record |= describe_run(options.commit)
    output = options.output or RESULTS / f"first-step-{record['date'][:10]}.json"
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


def measured(name: str) -> dict[str, Any]:
    """Returns the times of a model with two caches that are empty at first."""
    script = [sys.executable, __file__, "--step", name]
    with tempfile.TemporaryDirectory() as cold, tempfile.TemporaryDirectory() as filled_by_warmup:
        found: dict[str, Any] = {"cold": json.loads(_printed(script, cold))}
        begin, begin_cpu = time.perf_counter(), _cpu_seconds(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-P", "-m", "jax_fastattn", "warmup", *MODELS[name].warmup, "--arch", ARCH]
        _printed(command, filled_by_warmup)
        seconds, cpu = time.perf_counter() - begin, _cpu_seconds(resource.RUSAGE_CHILDREN) - begin_cpu
        found["warmup"] = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}
        found["warm"] = json.loads(_printed(script, filled_by_warmup))
        entries = [path for path in Path(cold).iterdir() if len(path.name) == 64]
        found |= {"kernels": len(entries), "bytes": sum(path.stat().st_size for path in entries)}
    return found


def _printed(command: list[str], cache: str) -> str:
    """Returns what a command prints that keeps its kernels in a directory."""
    environment = os.environ | {"JAX_FASTATTN_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout


def lowered(model: Model) -> dict[str, Any]:
    """Returns the seconds to trace and lower a step, those of the process's cores, and how many kernels it compiled."""
    cases = [replace((CALLS | BIASED)[name], dtype=model.dtype) for name in model.calls]
    attend = IMPLEMENTATIONS["jax_fastattn"].attend
    shapes = [jax.eval_shape(case.operands, jax.random.key(0)) for case in cases]
    learnt = [("query", "key", "value", *(["bias"] if x.bias is not None else [])) for x in shapes]

    def loss(arrays: Any, others: Any) -> jax.Array:
        outs = [attend(case, rest._replace(**x)) for case, x, rest in zip(cases, arrays, others, strict=True)]
        return jnp.sum(jnp.stack([jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in outs]))

    arrays = [{name: getattr(x, name) for name in names} for x, names in zip(shapes, learnt, strict=True)]
    begin, begin_cpu = time.perf_counter(), _cpu_seconds()
    with jax_fastattn.target_arch(ARCH):
        jax.jit(jax.grad(loss)).trace(arrays, shapes).lower(lowering_platforms=("cuda",))
    seconds, cpu = time.perf_counter() - begin, _cpu_seconds() - begin_cpu
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "compiled": ffi.compile_count()}


def parts(model: Model) -> dict[str, Any]:
    """Returns the seconds of a cold step in this process, which has no workers, and those of its parts.

    The parts are `imports` from the start of the process, `compiler` to import the compiler, `kernels` to trace kernels
    by Python, `passes` of MLIR, `binary` for the pass that makes cubins, ptxas included, and `rest`: JAX's tracing and
    lowering, and entries of the cache.

    Raises:
        SystemExit: no kernel was compiled, as where the package has no C++ extension; the message says why.
    """
    imports, imports_cpu = _age(), _cpu_seconds()
    begin = time.perf_counter()
    from cutlass._mlir.passmanager import PassManager

    from jax_fastattn.compilation import compiler

    loaded = time.perf_counter() - begin
    spent: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "passes":
                arguments[0].enable_timing()
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[name] += time.perf_counter() - begin

        return call

    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as report:
        variables = {"JAX_FASTATTN_CACHE_DIR": cache, "JAX_FASTATTN_WORKERS": "0"}
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(compiler, "_compile", timed("compilation", compiler._compile)),
            mock.patch.object(PassManager, "run", timed("passes", PassManager.run)),
            _standard_error_in(report),
        ):
            found = lowered(model)
        report.seek(0)
        text = report.read()
    if not found["compiled"]:  # and a warning says why
        raise SystemExit(f"No kernel was compiled, so the step has no parts.\n{text.strip()}")
    # The DSL tells times of passes in text alone.
    binary = sum(map(float, re.findall(r"([\d.]+) \([ \d.%]+\)  CudaToBinaryPass", text)))
    spent["kernels"] = spent["compilation"] - spent["passes"]
    spent["passes"] -= binary
    rest = found["seconds"] - spent.pop("compilation")
    seconds = {"imports": imports, "imports_cpu": imports_cpu, "compiler": loaded, "binary": binary, "rest": rest}
    return found | {"parts": {name: round(x, 2) for name, x in (seconds | spent).items()}}


def _age() -> float:
    """Returns the seconds since this process started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _standard_error_in(file: IO[str]) -> Iterator[None]:
    """Lets libraries write to a file where they write to standard error."""
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _cpu_seconds(whose: int = resource.RUSAGE_SELF) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def table(record: dict[str, Any]) -> str:
    """Returns the table of a record."""
    lines = [
        "| model | kernels | MiB on disk | cold | `warmup` | warm | compiled when warm |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, x in record["models"].items():
        # Workers compile some of the kernels. A record from before them says how many the step compiled.
        cells = [MODELS[name].title, f"{x.get('kernels', x['cold']['compiled'])}", f"{x['bytes'] / 2**20:.2f}"]
        cells += [f"{x[how]['seconds']:.1f} s ({x[how]['cpu_seconds']:.1f})" for how in ("cold", "warmup", "warm")]
        lines.append(f"| {' | '.join([*cells, str(x['warm']['compiled'])])} |")
    return "\n".join(lines)


def filled(page: Path, folder: Path) -> str:
    """Returns the text of the page with the table of the newest record between its markers."""
    path = max(folder.glob("first-step-*.json"))
    record = json.loads(path.read_text())
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    source = (
        f"[Record](../benchmarks/results/{path.name}) of commit {record['commit'][:7]}, {record['cores']} CPU cores."
    )
    return "\n\n".join([before + BEGIN, source, table(record), END + after])


if __name__ == "__main__":
    main()
