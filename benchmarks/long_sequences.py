# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compares attention whose rows are split over two GPUs with the same work on each GPU alone.

    JAX_FASTATTN_CACHE_DIR=kernels python benchmarks/long_sequences.py prepare --processes 8    # needs no GPU
    JAX_FASTATTN_CACHE_DIR=kernels python benchmarks/long_sequences.py check --output check.json
    JAX_FASTATTN_CACHE_DIR=kernels python benchmarks/long_sequences.py time --output time.json

A row is a workload of so many tokens and a method. Its record has milliseconds of the forward pass and of forward and
backward pass together, TFLOP/s for each GPU, the share of the rate that the GPUs have alone, temporary memory, and the
collectives of the compiled programs. Alone means that both GPUs work at the same time and send nothing:

    causal    each on T / sqrt(2) tokens, which is the work of a device on T tokens
    window    each on T / 2 tokens
    packed    each on all T tokens, and half of its time counts

32 query heads and 8 key/value heads of 128 in bfloat16, one batch entry. Lengths of packed documents are log-uniform.
A target is printed next to a share that has one. `check` runs small calls with every option, see
`long_sequences_checks.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from long_sequences_checks import (
    CHECKS,
    DEVICES,
    as_partitioned,
    check_all,
    compile_all,
    make_mesh,
    packed_rows,
    prepared,
)
from long_sequences_checks import (
    draw as draw_check,
)
from long_sequences_checks import (
    function as check_function,
)
from run import describe_run

import jax_fastattn
from jax_fastattn import all_to_all_attention, attention, ring_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROWS, WINDOW = P(None, "seq"), 4096
SHORTEST, LONGEST = 128, 32768  # packed documents
BACKWARD = 3.5  # matrix products of forward and backward pass, in those of a forward pass
CAUSAL: dict[str, Any] = {"is_causal": True}
WINDOWED: dict[str, Any] = CAUSAL | {"local_window_size": (WINDOW, 0)}


@dataclasses.dataclass(frozen=True)
class Row:
    """A workload and a method.

    Attributes:
        work: "causal", "window" or "packed".
        attend: the function inside `shard_map`; None calls `attention` under `jit`, whose rows are split.
        tokens: of the arrays, as a share of the tokens of the row.
        options: of the function.
    """

    work: str
    attend: Callable[..., Any] | None
    tokens: float = 1.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_alone(self) -> bool:
        return self.attend in (attention, packed_rows)


def _ring(**options: Any) -> Callable[..., Any]:
    return functools.partial(ring_attention, axis_name="seq", **options)


METHODS = {
    "causal": {
        "alone": Row("causal", attention, 2**0.5, CAUSAL),
        "contiguous": Row("causal", _ring(**CAUSAL)),
        "zigzag": Row("causal", _ring(layout="zigzag", **CAUSAL)),
        "all-to-all": Row("causal", functools.partial(all_to_all_attention, axis_name="seq", **CAUSAL)),
        "automatic": Row("causal", None, options=CAUSAL),
    },
    "window": {
        "alone": Row("window", attention, 1.0, WINDOWED),
        "contiguous": Row("window", _ring(**WINDOWED)),
        "zigzag": Row("window", _ring(layout="zigzag", **WINDOWED)),
        "automatic": Row("window", None, options=WINDOWED),
    },
    "packed": {
        "alone": Row("packed", packed_rows, 2.0, CAUSAL),
        "contiguous": Row("packed", _ring(**CAUSAL)),
        "not-balanced": Row("packed", _ring(balance=False, **CAUSAL)),
        "zigzag": Row("packed", _ring(layout="zigzag", **CAUSAL)),
        "automatic": Row("packed", None, options=CAUSAL),
    },
}
# What is timed by default, in this order: the most important first.
TIMED = [
    *(f"causal-131072-{name}" for name in METHODS["causal"]),
    *(f"packed-131072-{name}" for name in METHODS["packed"]),
    *(f"window-131072-{name}" for name in METHODS["window"]),
    *(f"causal-{tokens}-{name}" for tokens in (16384, 65536) for name in METHODS["causal"]),
]
# Shares of the rate of both GPUs alone that are wanted: forward, and forward and backward.
TARGETS = {
    "causal-131072-automatic": (0.93, 0.95),
    "causal-131072-all-to-all": (None, 0.97),
    "window-131072-automatic": (0.85, 0.85),
    "packed-131072-automatic": (0.9, 0.9),
    "causal-16384-automatic": (0.85, 0.85),
}


def parse(name: str) -> tuple[Row, int]:
    """Returns the row of a name such as "causal-131072-zigzag", and its tokens."""
    work, tokens, method = name.split("-", 2)
    return METHODS[work][method], int(tokens)


def documents(tokens: int) -> np.ndarray:
    """Boundaries of documents that fill so many tokens, the same number for all lengths of a run."""
    rng, ends = np.random.default_rng(0), [0]
    while ends[-1] < tokens:
        length = int(math.exp(rng.uniform(math.log(SHORTEST), math.log(min(LONGEST, tokens // 2)))))
        ends.append(min(ends[-1] + length, tokens))
    return np.array(ends, np.int32)


def pairs(row: Row, tokens: int) -> float:
    """Pairs of a query and a key that see each other, of the whole row."""
    if row.work == "packed":
        lengths = np.diff(documents(tokens)).astype(float)
        return float((lengths * (lengths + 1) / 2).sum())
    return tokens * tokens / 2 if row.work == "causal" else tokens * (WINDOW + 1)


def function_of(row: Row, mesh: Mesh) -> Callable[..., Any]:
    """Returns the function of query, key, value and, of packed rows, boundaries."""
    if row.attend is None:
        if row.work == "packed":
            return functools.partial(packed_rows, **row.options)
        return functools.partial(attention, **row.options)
    attend = functools.partial(row.attend, **row.options)
    has_ends = row.work == "packed"

    def local(query: Any, key: Any, value: Any, *boundaries: Any) -> Any:
        if not has_ends or row.attend is packed_rows:
            return attend(query, key, value, *boundaries)
        return attend(query, key, value, boundaries=boundaries[0])

    specs = (ROWS,) * 3 + ((P(),) if has_ends else ())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=ROWS)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(query: Any, key: Any, value: Any, dout: Any, *others: Any) -> Any:
        out, pullback = jax.vjp(lambda *qkv: function(*qkv, *others), query, key, value)
        return out, *pullback(dout)

    return run


def programs(row: Row, mesh: Mesh) -> dict[str, Callable[..., Any]]:
    """Functions of query, key, value, cotangent and others."""
    function = function_of(row, mesh)
    return {"forward": lambda q, k, v, dout, *others: function(q, k, v, *others), "both": with_gradients(function)}


def shapes(row: Row, tokens: int, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Abstract arguments of `programs`."""
    length = round(tokens * row.tokens / 256) * 256
    rows = NamedSharding(mesh, ROWS)
    found = [
        jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.bfloat16, sharding=rows)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    if row.work == "packed":
        ends = documents(tokens)
        found.append(jax.ShapeDtypeStruct((1, ends.size), jnp.int32, sharding=NamedSharding(mesh, P())))
    return found


def draw(row: Row, tokens: int, mesh: Mesh) -> list[jax.Array]:
    """The arguments of `programs`."""
    given = shapes(row, tokens, mesh)
    ends = [jax.device_put(documents(tokens)[None], x.sharding) for x in given[4:]]
    return [*_draw_rows(mesh, given[0].shape[1]), *ends]


@functools.lru_cache(maxsize=1)
def _draw_rows(mesh: Mesh, length: int) -> list[jax.Array]:
    """Query, key, value and cotangent; the rows of a workload share them."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, ROWS))
    def make() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        return [
            jax.random.normal(key, (1, length, count, HEAD_DIM), jnp.bfloat16)
            for key, count in zip(keys, heads, strict=True)
        ]

    return make()


def elapsed_ms(compiled: Any, arguments: list[jax.Array], least_ms: float) -> float:
    """Median of five measurements, each of as many calls as take `least_ms`."""

    def measure(calls: int) -> float:
        begun = time.perf_counter()
        found = [compiled(*arguments) for _ in range(calls)][-1]
        jax.block_until_ready(found)
        return (time.perf_counter() - begun) * 1e3 / calls

    jax.block_until_ready(compiled(*arguments))
    calls = max(1, min(8, math.ceil(least_ms / measure(1))))
    return statistics.median(measure(calls) for _ in range(5))


def collectives(compiled: Any) -> dict[str, int]:
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return dict(Counter(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text())))


def compile_rows(names: list[str]) -> dict[tuple[str, str], Any]:
    """Returns the compiled programs of rows by row and mode; one that fails is its error."""
    mesh, lowered = make_mesh(), {}
    for name in names:
        row, tokens = parse(name)
        for mode, function in programs(row, mesh).items():
            lowered[name, mode] = jax.jit(function).lower(*shapes(row, tokens, mesh))
    return compile_all(lowered)


def time_row(name: str, compiled_rows: dict[tuple[str, str], Any], least_ms: float) -> dict[str, Any]:
    """Returns the record of a row."""
    (row, tokens), mesh = parse(name), make_mesh()
    arguments, record = draw(row, tokens, mesh), {"row": name}
    flops = 4 * HEADS * HEAD_DIM * pairs(row, tokens) / DEVICES
    for mode in ("forward", "both"):
        compiled = compiled_rows[name, mode]
        if isinstance(compiled, Exception):
            raise compiled
        ms = elapsed_ms(compiled, arguments, least_ms) / (2 if row.is_alone and row.work == "packed" else 1)
        rate = flops * (BACKWARD if mode == "both" else 1) / ms / 1e9
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**30
        record[mode] = {
            "ms": round(ms, 3),
            "tflops": round(rate, 4),
            "temporaries_gib": round(memory, 2),
            "collectives": collectives(compiled),
        }
    return record


def time_rows(names: list[str], options: argparse.Namespace, record: dict[str, Any], write: Any) -> None:
    begun, alone = time.monotonic(), {}
    compiled = compile_rows(names)
    print(f"{len(compiled)} programs were compiled in {time.monotonic() - begun:.0f} s", flush=True)
    for name in names:
        if time.monotonic() - begun > options.budget_seconds:
            print(f"out of time before {name}")
            return
        try:
            found = time_row(name, compiled, options.measurement_ms)
        except Exception as error:
            found = {"row": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(name, found["error"], flush=True)
            record["rows"].append(found)
            continue
        group = "-".join(name.split("-")[:2])
        if name.endswith("-alone"):
            alone[group] = found
        for mode, target in zip(("forward", "both"), TARGETS.get(name, (None, None)), strict=True):
            if group in alone:
                found[mode]["share"] = round(found[mode]["tflops"] / alone[group][mode]["tflops"], 3)
            if target is not None:
                found[mode]["target"] = target
        record["rows"].append(found)
        write()
        print(f"{name:28}", " | ".join(summary(found[mode]) for mode in ("forward", "both")), flush=True)


def summary(x: dict[str, Any]) -> str:
    sent = " ".join(f"{kind}:{count}" for kind, count in x["collectives"].items())
    share = f"{x.get('share', 0):.3f}" + (f" of {x['target']}" if "target" in x else "")
    return f"{x['ms']:8.2f} ms {x['tflops']:5.0f} TF {share} {x['temporaries_gib']:.2f} GiB {sent}"


def prepare(names: list[str], processes: int) -> None:
    """Compiles the kernels of all programs into the cache. It lowers them for an H100, on devices of the host."""
    from jax_fastattn import ffi
    from jax_fastattn.ffi import call

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    keys: dict[Any, None] = {}

    def note(spec: Any, _: Any) -> Any:
        keys.setdefault(spec)
        return call._Kernel("", "", "", 0)

    kept, call._kernel = call._kernel, note
    try:
        with jax_fastattn.target_arch("sm_90a"):
            for name in names:
                (row, tokens), mesh = parse(name), make_mesh()
                if row.attend is None:  # XLA asks for the kernels of a device only when it compiles
                    row = dataclasses.replace(row, attend=functools.partial(as_partitioned, **row.options), options={})
                for function in programs(row, mesh).values():
                    jax.jit(function).trace(*shapes(row, tokens, mesh)).lower(lowering_platforms=("cuda",))
            for check in map(prepared, CHECKS.values()):
                arrays = jax.eval_shape(functools.partial(draw_check, check))
                for way in ("one", *check.ways):
                    way = "as partitioned" if way == "automatic" else way
                    jax.jit(check_function(way, check)).trace(arrays).lower(lowering_platforms=("cuda",))
    finally:
        call._kernel = kept
    with multiprocessing.get_context("spawn").Pool(min(processes, len(keys))) as pool:
        pool.map(ffi.prepare, list(keys), chunksize=1)
    print(f"{len(keys)} kernels are compiled")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "check", "time"))
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="such as causal-131072-zigzag, packed-65536-alone")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="of prepare (default: one for each core)")
    parser.add_argument(
        "--budget-seconds", type=float, default=200.0, help="after which no row is begun (default: 200)"
    )
    parser.add_argument("--measurement-ms", type=float, default=40.0, help="the least length of one (default: 40)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    names = options.rows or TIMED
    if options.command == "prepare":
        prepare(names, options.processes)
        return
    record: dict[str, Any] = describe_run(options.commit) | {"devices": DEVICES, "rows": [], "checks": []}

    def write() -> None:  # as it grows: a run that is stopped leaves what it has
        if options.output is not None:
            options.output.write_text(json.dumps(record, indent=1) + "\n")

    if options.command == "time":
        time_rows(names, options, record, write)
        write()
    else:
        good = check_all(options.checks, record["checks"])
        write()
        sys.exit(not good)


if __name__ == "__main__":
    main()
