# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the XLA path beside `jax.nn.dot_product_attention`, by turns, and appends one JSON record per line.

    python benchmarks/jax_nn.py --set gpu          # what the kernels do not take, and the XLA path where they do
    python benchmarks/jax_nn.py --set gpu-long     # the XLA path where logits take 4 GiB
    python benchmarks/jax_nn.py --set float32      # three products or one, next to jax.nn in the same precision
    python benchmarks/jax_nn.py --set float32 --arch sm_90-a100 --rows b4-n16-d128-4k-full-default
    python benchmarks/jax_nn.py --set one-query    # one query over many keys: our kernel, our XLA path, jax.nn
    python benchmarks/jax_nn.py --set cpu
    python benchmarks/jax_nn.py --set cpu-d128     # the default scale is no power of two, see `Blocks.rounded`
    python benchmarks/jax_nn.py --set cpu-bound    # calls around the most logits that a CPU computes at once

All programs are compiled before the first is measured; without JAX_COMPILATION_CACHE_DIR, once more when they run. In
each round every implementation of a row runs for at least `--measurement-ms`. A record holds all times of a row, their
medians, and the ratios of the medians to that of jax.nn.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from report import RESULTS, slug
from run import describe_run

from jax_fastattn import attention
from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.xla import passes as xla
from jax_fastattn.xla.chunks import CPU


def on_a_cpu(whole: int) -> Callable[..., Any]:
    """Our XLA path for CPUs, where a call of no more logits than `whole` is computed at once."""
    tuning = replace(CPU, whole=whole)

    def call(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool) -> jax.Array:
        operands = Operands(query, key, value)
        spec = AttentionSpec(query.shape[3] ** -0.5, is_causal)

        def forward(operands: Operands) -> tuple[jax.Array, tuple[Any, ...]]:
            out, lse = xla.forward(spec, operands, tuning)
            return out, (operands, out, lse)

        def backward(saved: tuple[Any, ...], dout: jax.Array) -> tuple[Operands]:
            found = xla.backward(spec, *saved, dout, None, tuning=tuning)
            return (Operands(found.query, found.key, found.value),)

        attend = jax.custom_vjp(lambda operands: forward(operands)[0])
        attend.defvjp(forward, backward)
        return attend(operands)

    return call


PRESETS = ("BF16_BF16_F32_X3", "highest")
KERNELS, OUR_XLA, CHOSEN, THEIRS = "jax_fastattn-cuda", "jax_fastattn-xla", "jax_fastattn", "jax.nn-xla"
WHOLE, CHUNKS = "at-once", "in-chunks"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    KERNELS: functools.partial(attention, implementation="cuda"),
    OUR_XLA: functools.partial(attention, implementation="xla"),
    CHOSEN: attention,
    WHOLE: on_a_cpu(1 << 62),
    CHUNKS: on_a_cpu(0),
    THEIRS: functools.partial(jax.nn.dot_product_attention, implementation="xla"),
}


@dataclass(frozen=True)
class Row:
    """One call.

    `mask` and `bias` are the axes of theirs that are not broadcast; so many keys count as `seen` says, by lengths.
    """

    batch: int
    heads: int
    length: int
    head_dim: int = 64
    dtype: str = "bfloat16"
    queries: int | None = None
    kv_heads: int | None = None
    is_causal: bool = False
    mask: str | None = None
    bias: str | None = None
    seen: int | None = None
    precision: str | None = None
    modes: tuple[str, ...] = ("forward", "both")
    implementations: tuple[str, ...] = (OUR_XLA, THEIRS)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of the call by name, and the cotangent of its output as `dout`."""
        queries, kv_heads = self.queries or self.length, self.kv_heads or self.heads
        sizes = {"b": self.batch, "n": self.heads, "t": queries, "s": self.length}

        def plane(axes: str, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(tuple(size if axis in axes else 1 for axis, size in sizes.items()), dtype)

        query = jax.ShapeDtypeStruct((self.batch, queries, self.heads, self.head_dim), self.dtype)
        key = jax.ShapeDtypeStruct((self.batch, self.length, kv_heads, self.head_dim), self.dtype)
        found = {"query": query, "key": key, "value": key, "dout": query}
        if self.mask is not None:
            found["mask"] = plane(self.mask, jnp.bool_)
        if self.bias is not None:
            found["bias"] = plane(self.bias, self.dtype)
        if self.seen is not None:
            found["key_value_seq_lengths"] = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return found

    def draw(self) -> dict[str, jax.Array]:
        shapes = self.shapes()
        keys = jax.random.split(jax.random.key(2026), len(shapes))
        return {name: _drawn(name, x, self.seen, k) for k, (name, x) in zip(keys, shapes.items(), strict=True)}

    def program(self, implementation: str, mode: str) -> Any:
        """The function of the arrays, which is timed, since JAX calls it in C++; and its compiled program."""

        def call(arrays: dict[str, jax.Array]) -> Any:
            arrays = dict(arrays)
            dout = arrays.pop("dout")
            function = functools.partial(FUNCTIONS[implementation], is_causal=self.is_causal)
            if mode == "forward":
                return function(**arrays)
            wanted = {name: arrays.pop(name) for name in ("query", "key", "value", "bias") if name in arrays}
            out, vjp = jax.vjp(lambda wanted: function(**wanted, **arrays), wanted)
            return out, vjp(dout)

        def with_precision(arrays: dict[str, jax.Array]) -> Any:
            with jax.default_matmul_precision(self.precision):
                return call(arrays)

        function = jax.jit(with_precision)
        return function, function.lower(self.shapes()).compile()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn(name: str, x: jax.ShapeDtypeStruct, seen: int | None, key: jax.Array) -> jax.Array:
    if name == "key_value_seq_lengths":
        return jnp.full(x.shape, seen, x.dtype)
    if name == "mask":
        return jax.random.bernoulli(key, 0.9, x.shape)
    return jax.random.normal(key, x.shape, x.dtype)


def _cpu_rows(*lengths: int, head_dim: int = 64, **more: Any) -> dict[str, Row]:
    return {
        f"b1-n8-d{head_dim}-{length}-{'causal' if is_causal else 'full'}-{dtype}": Row(
            1, 8, length, head_dim, dtype, is_causal=is_causal, **more
        )
        for length in lengths
        for is_causal in (False, True)
        for dtype in ("bfloat16", "float32")
    }


_GPU_IMPLEMENTATIONS = (KERNELS, OUR_XLA, THEIRS)
_ONE = Row(
    1, 32, 131072, 128, queries=1, kv_heads=8, modes=("forward",), implementations=(CHOSEN, *_GPU_IMPLEMENTATIONS)
)
_SQUARE = {
    f"b4-n16-d128-{length // 1024}k-{'causal' if is_causal else 'full'}-{dtype}": Row(
        4, 16, length, 128, dtype, is_causal=is_causal, implementations=implementations
    )
    for length in (1024, 4096)
    for is_causal in (False, True)
    for dtype, implementations in (("bfloat16", _GPU_IMPLEMENTATIONS), ("float32", (OUR_XLA, THEIRS)))
}


def _float32(precision: str | None, length: int, head_dim: int, *, is_causal: bool, **more: Any) -> dict[str, Row]:
    """One row of 16 query heads, by its name. With "highest" there is no kernel."""
    found = Row(4, 16, length, head_dim, "float32", is_causal=is_causal, precision=precision)
    found = replace(found, implementations=(OUR_XLA if precision == "highest" else KERNELS, THEIRS), **more)
    size = f"{length // 1024}k" if length >= 1024 else f"{length}"
    groups = f"-k{found.kv_heads}" if found.kv_heads else ""
    mask = "causal" if is_causal else "full"
    return {f"b{found.batch}-n16{groups}-d{head_dim}-{size}-{mask}-{precision or 'default'}": found}


def _float32_rows() -> dict[str, Row]:
    """The settings that differ on a GPU, with lengths, head dims and groups."""
    found: dict[str, Row] = {}
    for is_causal in (False, True):
        for precision in (None, "tensorfloat32", *PRESETS):
            for head_dim in (64, 128):
                found |= _float32(precision, 4096, head_dim, is_causal=is_causal)
        for precision in (None, "tensorfloat32"):
            for length, head_dim in ((1024, 64), (1024, 128), (512, 128), (1024, 256), (4096, 256)):
                found |= _float32(precision, length, head_dim, is_causal=is_causal)
            found |= _float32(precision, 8192, 128, is_causal=is_causal, batch=1)
            found |= _float32(precision, 4096, 128, is_causal=is_causal, kv_heads=4)
    return found


_BATCHES_OF_ONE_QUERY = [(1, 1024), (1, 4096), (1, 16384), (1, 131072), (2, 32768), (4, 4096), (4, 32768)]
_BATCHES_OF_ONE_QUERY += [(8, 2048), (8, 16384), (16, 2048), (16, 16384), (32, 2048), (32, 8192), (64, 8192)]
SETS = {
    "gpu": {
        "mask-ts-2k": Row(8, 16, 2048, mask="ts"),
        "mask-bs-2k": Row(8, 16, 2048, mask="bs"),
        "bias-nts-512": Row(64, 12, 512, bias="nts"),
        "float32-1k": Row(4, 16, 1024, dtype="float32"),
        "float32-1k-highest": Row(4, 16, 1024, dtype="float32", precision="highest"),
        "one-query-1x128k": _ONE,
        **_SQUARE,
    },
    "gpu-long": {
        "float32-4k": Row(4, 16, 4096, dtype="float32"),
        "float32-4k-highest": Row(4, 16, 4096, dtype="float32", precision="highest"),
        "float32-4k-causal": Row(4, 16, 4096, dtype="float32", is_causal=True),
        "bfloat16-d128-2k-causal": Row(16, 16, 2048, 128, is_causal=True),
    },
    "float32": _float32_rows(),
    "one-query": {
        f"one-query-{batch}x{length // 1024}k{'-lengths' * has_lengths}": replace(
            _ONE, batch=batch, length=length, seen=length if has_lengths else None
        )
        for batch, length in _BATCHES_OF_ONE_QUERY
        for has_lengths in (False, True)
    }
    | {f"one-query-1x128k-lengths-{seen // 1024}k": replace(_ONE, seen=seen) for seen in (1024, 16384, 32768, 65536)},
    "cpu": _cpu_rows(512, 1024, 2048, 4096),
    "cpu-d128": _cpu_rows(512, 1024, 2048, 4096, head_dim=128),
    "cpu-bound": _cpu_rows(256, 512, 1024, implementations=(WHOLE, CHUNKS, THEIRS)),
    "tiny": {"tiny": Row(2, 4, 16, 8, "float32", kv_heads=2, mask="ts", bias="nts", seen=9)},
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, required=True)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="of the set (default: all)")
    parser.add_argument(
        "--budget-seconds", type=float, default=140.0, help="after which no row is begun (default: 140)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each time (default: 7)")
    parser.add_argument("--measurement-ms", type=float, default=10.0, help="the least length of one (default: 10)")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/jax-nn-<date>-<device>.jsonl")
    parser.add_argument("--arch", help="what a Hopper GPU counts as: sm_90-a100, sm_90-rtx or sm_90 (portable kernels)")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    if options.arch:
        from testing.borrow import borrow  # tests are importable since `run` is imported

        borrow(options.arch)
    context = describe_run(options.commit) | {"arch": options.arch}
    output = options.output or RESULTS / f"jax-nn-{context['date'][:10]}-{slug(context['gpu'])}.jsonl"
    rows, begun = {name: SETS[options.set][name] for name in options.rows or SETS[options.set]}, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 2, 1)) as pool:
        programs = {
            (name, mode): {i: pool.submit(row.program, i, mode) for i in row.implementations}
            for name, row in rows.items()
            for mode in row.modes
        }
        for (name, mode), futures in programs.items():
            if time.monotonic() - begun > options.budget_seconds:
                print(f"out of time before {name} {mode}")
                pool.shutdown(cancel_futures=True)
                break
            concurrent.futures.wait([future for found in programs.values() for future in found.values()])
            record = {"row": name, "mode": mode, **measure(rows[name], futures, options)}
            with output.open("a") as file:
                file.write(json.dumps(record | context) + "\n")
            print(f"{name:32} {mode:8} {record['ms']} {record['ratio']}", flush=True)


def measure(row: Row, programs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Times of the programs of a row, in milliseconds a call, which run by turns."""
    arrays, calls = row.draw(), dict[str, int]()
    found = {name: future.result() for name, future in programs.items()}
    functions, compiled = ({name: pair[i] for name, pair in found.items()} for i in range(2))
    outputs: dict[str, Any] = {}
    for name, program in functions.items():
        outputs[name] = jax.tree.leaves(jax.block_until_ready(program(arrays)))[0].astype(jnp.float32)
        once = elapsed_ms(program, (arrays,), 1)
        calls[name] = max(round(options.measurement_ms / max(once, 1e-3)), 1)
    differences = {name: float(jnp.abs(x - outputs[THEIRS]).max()) for name, x in outputs.items()}
    del outputs
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(options.rounds):
        for name, program in functions.items():
            times[name].append(elapsed_ms(program, (arrays,), calls[name]))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "ms": {name: round(ms, 4) for name, ms in medians.items()},
        "ratio": {name: round(ms / medians[THEIRS], 3) for name, ms in medians.items() if name != THEIRS},
        "largest_difference": differences,
        "temporaries_mib": {name: memory(program) for name, program in compiled.items()},
        "times_ms": times,
        "calls": calls,
    }


def elapsed_ms(program: Any, arguments: tuple[Any, ...], calls: int) -> float:
    """Milliseconds of one of `calls` calls that follow each other."""
    begun = time.perf_counter()
    for _ in range(calls):
        results = program(*arguments)
    jax.block_until_ready(results)
    return (time.perf_counter() - begun) * 1e3 / calls


def memory(program: Any) -> float | None:
    """MiB of temporaries that XLA plans."""
    analysis = program.memory_analysis()
    return None if analysis is None else round(analysis.temp_size_in_bytes / 2**20, 1)


if __name__ == "__main__":
    main()
