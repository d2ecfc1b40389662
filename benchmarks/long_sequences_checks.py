# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Small calls whose rows are split over two devices, with every option, against one device: `long_sequences.py check`.

The root mean square of each result's error against float32 may be twice that of one device, plus float32 rounding, as
in `testing.compare`. Its largest error may be four times that of one device: a step rounds its share of a
gradient, and shares may cancel.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fastattn
from jax_fastattn import all_to_all_attention, attention, attention_varlen, ring_attention
from jax_fastattn.canonical import packed as canonical_packed
from jax_fastattn.canonical import ring as canonical_ring
from jax_fastattn.canonical.arguments import unify_varying
from jax_fastattn.ops import vjp
from jax_fastattn.ring import Ring

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from testing.compare import ROUNDING

DEVICES = 2
HEADS, HEAD_DIM = 8, 128
ROWS = P(None, "seq")
LENGTH = 4352
FACTORS = 2.0, 4.0  # of the root mean square and of the largest error of one device
COMPILERS = 8  # threads; XLA compiles a program in one of them
CAUSAL: dict[str, Any] = {"is_causal": True}
# The gradients of single numbers are sums over all rows. One device may be right by chance, so these may differ by so
# much of their largest element.
SUMS = {"sinks": 0.005, "scale": 0.005}
# Axes that have rows, so that they are split and in zigzag order.
ROW_AXES = {"bias": 2, "mask": 2, "segment_ids": 1, "query": 1, "key": 1, "value": 1, "dout": 1, "dlse": 1, "lse": 1}
WAYS: dict[str, dict[str, Any]] = {
    "contiguous": {"balance": False},
    "balanced": {},
    "zigzag": {"layout": "zigzag"},
    "all-to-all": {},
    "automatic": {},
}


@dataclasses.dataclass(frozen=True)
class Check:
    """A call and the ways to compute it.

    Attributes:
        ways: keys of `WAYS`.
        options: static arguments.
        extras: names of arrays apart from query, key and value.
        kv_heads, v_head_dim: sizes.
        shorter: by how many rows the call is shorter than `LENGTH`.
        cut: how many of its rows are cut off within the program, where devices then do not divide them evenly.
        with_lse: whether the log-sum-exp is a result, with a cotangent.
    """

    ways: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    extras: tuple[str, ...] = ()
    kv_heads: int = 2
    v_head_dim: int = HEAD_DIM
    shorter: int = 0
    cut: int = 0
    with_lse: bool = False


INSIDE = ("balanced", "zigzag", "all-to-all")
CHECKS = {
    "causal-odd-chunks": Check(tuple(WAYS), CAUSAL, shorter=4),
    "scale-sinks-cap-lse": Check(
        (*INSIDE, "automatic"), CAUSAL | {"logits_soft_cap": 5.0}, ("sinks", "scale"), kv_heads=4, with_lse=True
    ),
    "one-key-head": Check(("balanced", "zigzag"), CAUSAL, kv_heads=1),
    "lengths-value-dim": Check(INSIDE, {}, ("query_seq_lengths", "key_value_seq_lengths"), v_head_dim=64),
    "window": Check(
        ("balanced", "zigzag", "automatic"), CAUSAL | {"local_window_size": (1000, 0), "deterministic": True}
    ),
    "two-sided": Check(("balanced", "zigzag"), {"local_window_size": (300, 500)}),
    "segments": Check(INSIDE, CAUSAL, ("segment_ids",)),
    "bias": Check((*INSIDE, "automatic"), {}, ("bias",)),
    "mask": Check(("balanced", "zigzag"), CAUSAL, ("mask", "key_value_seq_lengths")),
    "packed": Check(tuple(WAYS), CAUSAL, ("boundaries",)),
    "packed-window": Check(("balanced", "zigzag"), CAUSAL | {"local_window_size": (1000, 0)}, ("boundaries",)),
    "uneven": Check(("automatic",), CAUSAL, cut=1),
    "uneven-full": Check(("automatic",), {}, ("sinks",), cut=1),
}


def make_mesh(count: int = DEVICES) -> Mesh:
    return jax.make_mesh((count,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def packed_rows(query: Any, key: Any, value: Any, boundaries: Any, **options: Any) -> jax.Array:
    """Packed documents of one device."""
    return attention_varlen(query[0], key[0], value[0], boundaries[0], boundaries[0], **options)[None]


def as_partitioned(query: Any, key: Any, value: Any, boundaries: Any = None, **options: Any) -> Any:
    """A device's share of `attention` or `attention_varlen` under `jit`, to be lowered and not to be run.

    Its kernels are those of the share. Of packed rows the ring is not told that queries and keys have one boundary.
    """
    return_residual, ring = (
        options.pop("return_residual", False),
        Ring(("seq",), DEVICES, balance=True, mesh=(("seq", DEVICES),)),
    )
    if boundaries is None:
        spec, operands = canonical_ring.canonicalize(query, key, value, ring=ring, **options)
    else:
        qkv = query[0], key[0], value[0]
        spec, operands = canonical_packed.canonicalize(*qkv, boundaries[0], boundaries[0], **options)
        operands = unify_varying(operands, frozenset(ring.axes))
    out, lse = vjp.attend(dataclasses.replace(spec, ring=ring), operands, return_residual)
    return out if lse is None else (out, lse)


def draw(check: Check) -> dict[str, jax.Array]:
    """Returns the arrays of a call by name, with cotangents."""
    length, key = LENGTH - check.shorter, jax.random.key(0)
    kv_heads, v_dim, keys = check.kv_heads, check.v_head_dim, jax.random.split(key, 6)
    shapes = {
        "query": (1, length, HEADS, HEAD_DIM),
        "key": (1, length, kv_heads, HEAD_DIM),
        "value": (1, length, kv_heads, v_dim),
        "dout": (1, length, HEADS, v_dim),
    }
    arrays = {
        name: jax.random.normal(key, shape, jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    if check.with_lse:
        arrays["dlse"] = jax.random.normal(keys[4], (1, length, HEADS))
    ends = np.array([0, 100, 100, 1500, 3000, 3010, 4200]) * length // LENGTH
    extras: dict[str, Callable[[], Any]] = {
        "sinks": lambda: jnp.linspace(-1.0, 3.0, HEADS),
        "scale": lambda: jnp.float32(0.07),
        "bias": lambda: jax.random.normal(keys[5], (1, HEADS, length, length), jnp.bfloat16),
        "mask": lambda: jax.random.bernoulli(keys[5], 0.7, (1, 1, length, length)),
        "segment_ids": lambda: jnp.arange(length)[None] * 9 // length,
        "query_seq_lengths": lambda: jnp.array([length * 4 // 5]),
        "key_value_seq_lengths": lambda: jnp.array([length * 2 // 3]),
        "boundaries": lambda: jnp.asarray(ends, jnp.int32)[None],
    }
    return arrays | {name: extras[name]() for name in check.extras}


def prepared(check: Check) -> Check:
    """Returns a call of whole rows with the kernels of `check`: lengths hide the padding of those that are cut."""
    hides = check.cut and not check.options.get("is_causal")
    lengths = ("query_seq_lengths", "key_value_seq_lengths") if hides else ()
    return dataclasses.replace(check, cut=0, extras=check.extras + lengths)


def spec_of(name: str) -> P:
    return P(*(None,) * ROW_AXES[name], "seq") if name in ROW_AXES else P()


def place(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    mesh = make_mesh()
    return {name: jax.device_put(x, NamedSharding(mesh, spec_of(name))) for name, x in arrays.items()}


def function(way: str, check: Check) -> Callable[[dict[str, jax.Array]], dict[str, Any]]:
    """Returns a function of arrays in order, which returns results and gradients by name.

    `way` is a key of `WAYS`, or "one" for one device, or "as partitioned" for a program that is lowered alone.
    """
    options = check.options | ({"return_residual": True} if check.with_lse else {})

    def whole(arrays: dict[str, jax.Array]) -> Any:
        return (packed_rows if "boundaries" in arrays else attention)(**arrays, **options)

    def split(arrays: dict[str, jax.Array]) -> Any:
        attend = {"all-to-all": all_to_all_attention, "as partitioned": as_partitioned}.get(way, ring_attention)
        given = {} if way == "as partitioned" else WAYS[way] | {"axis_name": "seq"}
        local = functools.partial(attend, **given, **options)

        def order(name: str, x: jax.Array, reorder: Any) -> jax.Array:
            return reorder(x, DEVICES, ROW_AXES[name]) if way == "zigzag" and name in ROW_AXES else x

        ordered = {name: order(name, x, jax_fastattn.zigzag) for name, x in arrays.items()}
        specs = {name: spec_of(name) for name in arrays}
        out = jax.shard_map(lambda x: local(**x), mesh=make_mesh(), in_specs=(specs,), out_specs=ROWS)(ordered)
        return jax.tree.map(lambda x: order("query", x, jax_fastattn.unzigzag), out)

    def run(arrays: dict[str, jax.Array]) -> dict[str, Any]:
        cut = {name: x[:, : x.shape[1] - check.cut] if name in ROW_AXES else x for name, x in arrays.items()}
        given = {name: x for name, x in cut.items() if name not in ("dout", "dlse")}
        moved = {name: x for name, x in given.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        attend = whole if way in ("one", "automatic") else split
        results, pullback = jax.vjp(lambda moved: attend(given | moved), moved)
        gradients = pullback((cut["dout"], cut["dlse"]) if check.with_lse else cut["dout"])[0]
        return dict(zip(("out", "lse"), results if check.with_lse else (results,), strict=False)) | gradients

    return run


def programs(name: str) -> dict[str, tuple[Any, dict[str, jax.Array]]]:
    """Returns the lowered programs of a check, and their arguments."""
    check = CHECKS[name]
    arrays = draw(check)
    wide = {x: y.astype(jnp.float32) if y.dtype == jnp.bfloat16 else y for x, y in arrays.items()}
    with jax.default_matmul_precision("highest"):
        found = {"exact": (jax.jit(function("one", check)).lower(wide), wide)}
    found["one"] = jax.jit(function("one", check)).lower(arrays), arrays
    placed = place(arrays)
    for way in check.ways:
        found[way] = jax.jit(function(way, check)).lower(placed), placed
    return found


def compile_all(lowered: dict[Any, Any]) -> dict[Any, Any]:
    """Compiles programs in threads; a program that fails becomes its error."""

    def compiled(x: Any) -> Any:
        try:
            return x.compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor(COMPILERS) as pool:
        return dict(zip(lowered, pool.map(compiled, lowered.values()), strict=True))


def run_program(compiled: Any, arguments: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    if isinstance(compiled, Exception):
        raise compiled
    found = jax.device_get(compiled(arguments))
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def errors(found: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """Returns the root mean square and the largest error of each result; -inf of both counts as equal."""
    differences = {name: np.where(found[name] == x, 0.0, found[name] - x) for name, x in exact.items()}
    return {name: (float(np.sqrt(np.mean(x**2))), float(np.abs(x).max())) for name, x in differences.items()}


def ratios(way: Any, one: Any, exact: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns each result's error as a share of what is allowed; NaN counts as infinite."""
    found = {}
    for result, pair in way.items():
        largest = float(np.abs(exact[result], where=np.isfinite(exact[result]), out=np.zeros_like(exact[result])).max())
        floor = SUMS[result] * largest if result in SUMS else ROUNDING * (1.0 + largest)
        shares = [x / (factor * y + floor) for factor, x, y in zip(FACTORS, pair, one[result], strict=True)]
        found[result] = max(float("inf") if np.isnan(x) else round(x, 2) for x in shares)
    return found


def check_all(names: list[str], record: list[dict[str, Any]]) -> bool:
    """Runs checks, prints the share of the allowed error that each result has, and returns whether all are below 1."""
    found = {name: programs(name) for name in names}
    compiled = compile_all({(name, way): x[0] for name, ways in found.items() for way, x in ways.items()})
    good = True
    for name, ways in found.items():
        try:
            exact, one = (run_program(compiled[name, way], ways[way][1]) for way in ("exact", "one"))
        except Exception as error:
            print(name, f"{type(error).__name__}: {str(error)[:300]}", flush=True)
            record.append({"check": name, "error": str(error)[:300]})
            good = False
            continue
        alone = errors(one, exact)
        for way in CHECKS[name].ways:
            try:
                shares: Any = ratios(errors(run_program(compiled[name, way], ways[way][1]), exact), alone, exact)
                good &= max(shares.values()) < 1.0
                words = " ".join(f"{result} {x:.2f}" for result, x in shares.items())
            except Exception as error:
                good, words = False, f"{type(error).__name__}: {str(error)[:300]}"
                shares = words
            record.append({"check": name, "way": way, "share_of_allowed": shares})
            print(f"{name:20} {way:11} {words}", flush=True)
    print("all are right" if good else "SOME ARE WRONG")
    return good
