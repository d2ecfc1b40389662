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
`check` compares outputs and gradients of small calls with float32 on one GPU.
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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from run import describe_run

import jax_fastattn
from jax_fastattn import all_to_all_attention, attention, attention_varlen, canonical, ring_attention
from jax_fastattn.ops import vjp
from jax_fastattn.spec import Ring

DEVICES = 2
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
        return self.attend in (attention, _packed)


def _packed(query: Any, key: Any, value: Any, boundaries: Any, **options: Any) -> jax.Array:
    """Packed documents of one device."""
    return attention_varlen(query[0], key[0], value[0], boundaries[0], boundaries[0], **options)[None]


def _as_partitioned(query: Any, key: Any, value: Any, boundaries: Any = None, **options: Any) -> jax.Array:
    """A device's share of `attention` or `attention_varlen` under `jit`, to be lowered and not to be run.

    Its kernels are those of the share. Of packed rows the ring is not told that queries and keys have one boundary.
    """
    if boundaries is None:
        spec, operands = canonical.canonicalize(query, key, value, **options)
    else:
        qkv = query[0], key[0], value[0]
        spec, operands = canonical.canonicalize_packed(*qkv, boundaries[0], boundaries[0], **options)
    ring = Ring(("seq",), DEVICES, balance=True)
    operands = canonical.unify_varying(operands, frozenset(ring.axes))
    return vjp.attend(dataclasses.replace(spec, ring=ring), operands, return_residual=False)[0]


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
        "alone": Row("packed", _packed, 2.0, CAUSAL),
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
            return functools.partial(_packed, **row.options)
        return functools.partial(attention, **row.options)
    attend = functools.partial(row.attend, **row.options)
    has_ends = row.work == "packed"

    def local(query: Any, key: Any, value: Any, *boundaries: Any) -> Any:
        if not has_ends or row.attend is _packed:
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

    @functools.partial(jax.jit, out_shardings=[x.sharding for x in given[:4]])
    def make() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), 4)
        return [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, given, strict=False)]

    ends = [jax.device_put(documents(tokens)[None], x.sharding) for x in given[4:]]
    return [*make(), *ends]


def make_mesh(count: int = DEVICES) -> Mesh:
    return jax.make_mesh((count,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


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


def time_row(name: str, least_ms: float) -> dict[str, Any]:
    """Returns the record of a row."""
    (row, tokens), mesh = parse(name), make_mesh()
    arguments, record = draw(row, tokens, mesh), {"row": name}
    flops = 4 * HEADS * HEAD_DIM * pairs(row, tokens) / DEVICES
    for mode, function in programs(row, mesh).items():
        compiled = jax.jit(function).lower(*arguments).compile()
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
    for name in names:
        if time.monotonic() - begun > options.budget_seconds:
            print(f"out of time before {name}")
            return
        try:
            found = time_row(name, options.measurement_ms)
        except Exception as error:
            found = {"row": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(name, found["error"], flush=True)
            record["rows"].append(found)
            continue
        group = "-".join(name.split("-")[:2])
        if name.endswith("-alone"):
            alone[group] = found
        for mode in ("forward", "both"):
            if group in alone:
                found[mode]["share"] = round(found[mode]["tflops"] / alone[group][mode]["tflops"], 3)
        record["rows"].append(found)
        write()
        print(f"{name:28}", " | ".join(summary(found[mode]) for mode in ("forward", "both")), flush=True)


def summary(x: dict[str, Any]) -> str:
    sent = " ".join(f"{kind}:{count}" for kind, count in x["collectives"].items())
    return f"{x['ms']:8.2f} ms {x['tflops']:5.0f} TF {x.get('share', 0):.3f} {x['temporaries_gib']:.2f} GiB {sent}"


# Small calls: 8 query heads and 2 key/value heads.
LENGTH = 4352
ENDS = np.array([[0, 100, 100, 1500, 3000, 3010, 4200]], np.int32)
CHECKS: dict[str, dict[str, Any]] = {
    "causal": CAUSAL,
    "full": {},
    "window": CAUSAL | {"local_window_size": (1000, 0)},
    "two-sided": {"local_window_size": (300, 500)},
    "cap": CAUSAL | {"logits_soft_cap": 5.0},
    "sinks": CAUSAL | {"sinks": True},
    "lengths": CAUSAL | {"key_value_seq_lengths": np.array([3000]), "query_seq_lengths": np.array([3500])},
    "packed": CAUSAL | {"boundaries": ENDS},
    "packed-window": CAUSAL | {"boundaries": ENDS, "local_window_size": (1000, 0)},
    "packed-full": {"boundaries": ENDS},
    "deterministic": CAUSAL | {"deterministic": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {"balance": False},
    "balanced": {},
    "zigzag": {"layout": "zigzag"},
    "all-to-all": {},
    "automatic": {},
}


def check(names: list[str], record: dict[str, Any], write: Any) -> bool:
    """Compares relative errors of gradients on two GPUs with those on one; returns whether all are near."""
    good = True
    for name in names:
        arrays, options = check_arrays(name)
        wide = {x: y.astype(jnp.float32) if y.dtype == jnp.bfloat16 else y for x, y in arrays.items()}
        with jax.default_matmul_precision("highest"):
            exact = jax.device_get(jax.jit(check_function("one", options))(wide))
        one = relative_errors(jax.device_get(jax.jit(check_function("one", options))(arrays)), exact)
        found = {"check": name, "one": one}
        for way in WAYS:
            try:
                given = jax.device_put(arrays, check_shardings(arrays))
                found[way] = relative_errors(jax.device_get(jax.jit(check_function(way, options))(given)), exact)
                good &= all(x < 1.6 * y + 1e-4 for x, y in zip(found[way], one, strict=True))
            except Exception as error:
                found[way], good = f"{type(error).__name__}: {str(error)[:300]}", False
        record["checks"].append(found)
        write()
        print(name, {way: found[way] for way in ("one", *WAYS)}, flush=True)
    print("all near" if good else "SOME ARE NOT NEAR")
    return good


def check_arrays(name: str) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    options, keys = dict(CHECKS[name]), jax.random.split(jax.random.key(0), 4)
    heads = {"query": 8, "key": 2, "value": 2, "dout": 8}
    arrays = {
        x: jax.random.normal(key, (1, LENGTH, count, HEAD_DIM), jnp.bfloat16)
        for key, (x, count) in zip(keys, heads.items(), strict=True)
    }
    if options.pop("sinks", False):
        arrays["sinks"] = jnp.linspace(-1.0, 3.0, 8)
    for x in ("boundaries", "key_value_seq_lengths", "query_seq_lengths"):
        if x in options:
            arrays[x] = jnp.asarray(options.pop(x))
    return arrays, options


def check_shardings(arrays: dict[str, jax.Array]) -> dict[str, NamedSharding]:
    mesh = make_mesh()
    return {name: NamedSharding(mesh, ROWS if x.ndim == 4 else P()) for name, x in arrays.items()}


def check_function(way: str, options: dict[str, Any]) -> Callable[..., Any]:
    """Returns a function of arrays in order, which returns output and gradients."""

    def one(arrays: dict[str, jax.Array]) -> jax.Array:
        if "boundaries" not in arrays:
            return attention(**arrays, **options)
        given = {name: x for name, x in arrays.items() if name != "boundaries"}
        q, k, v = (given.pop(name) for name in ("query", "key", "value"))
        return _packed(q, k, v, arrays["boundaries"], **given, **options)

    def split(arrays: dict[str, jax.Array]) -> jax.Array:
        size, is_zigzag = DEVICES, way == "zigzag"
        if way == "as partitioned":
            local = functools.partial(_as_partitioned, **options)
        else:
            local = all_to_all_attention if way == "all-to-all" else functools.partial(ring_attention, **WAYS[way])
            local = functools.partial(local, axis_name="seq", **options)
        ordered = {name: jax_fastattn.zigzag(x, size) if is_zigzag and x.ndim == 4 else x for name, x in arrays.items()}
        specs = {name: ROWS if x.ndim == 4 else P() for name, x in arrays.items()}
        out = jax.shard_map(lambda x: local(**x), mesh=make_mesh(), in_specs=(specs,), out_specs=ROWS)(ordered)
        return jax_fastattn.unzigzag(out, size) if is_zigzag else out

    def run(arrays: dict[str, jax.Array]) -> Any:
        given = {name: x for name, x in arrays.items() if name != "dout"}
        moved = {name: x for name, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        attend = one if way in ("one", "automatic") else split
        out, pullback = jax.vjp(lambda moved: attend(given | moved), moved)
        return out, *pullback(arrays["dout"])[0].values()

    return run


def relative_errors(found: Any, exact: Any) -> list[float]:
    def error(x: Any, y: Any) -> float:
        return float(f"{np.linalg.norm(np.asarray(x, np.float32) - y) / np.linalg.norm(y):.2e}")

    return [error(x, y) for x, y in zip(found, exact, strict=True)]


def prepare(names: list[str], processes: int) -> None:
    """Compiles the kernels of all programs into the cache. It lowers them for an H100, on devices of the host."""
    from jax_fastattn import ffi
    from jax_fastattn.ffi import call

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    keys: dict[Any, None] = {}

    def note(spec: Any) -> Any:
        keys.setdefault(spec)
        return call._Kernel("", "", "", 0)

    kept, call._kernel = call._kernel, note
    try:
        with jax_fastattn.target_arch("sm_90a"):
            for name in names:
                (row, tokens), mesh = parse(name), make_mesh()
                if row.attend is None:  # XLA asks for the kernels of a device only when it compiles
                    row = dataclasses.replace(row, attend=functools.partial(_as_partitioned, **row.options), options={})
                for function in programs(row, mesh).values():
                    jax.jit(function).trace(*shapes(row, tokens, mesh)).lower(lowering_platforms=("cuda",))
            for name in CHECKS:
                arrays, options = check_arrays(name)
                for way in ("one", *WAYS, "as partitioned"):
                    if way != "automatic":
                        jax.jit(check_function(way, options)).trace(arrays).lower(lowering_platforms=("cuda",))
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
    elif not check(options.checks, record, write):
        sys.exit(1)


if __name__ == "__main__":
    main()
