# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures errors of every gradient in float16, where it may be small or large, beside attention by hand in float16.

    python benchmarks/float16_gradients.py --output benchmarks/results/float16-gradients.json
    python benchmarks/float16_gradients.py --prepare     # compiles the kernels of an H100 alone, without a GPU

Queries, keys, values and cotangents are normal numbers. Sinks take most of the weight; cotangents are multiplied by a
power of two; one row of them may be 1000 times the others. An error is the root mean square of the difference to
float64 over the root mean square of the exact gradient, and for `other rows` without the large row. Attention by hand
is what `jax.nn`'s XLA path does: it rounds weights and gradients of weights. The output is one record; it has the
ratios of errors, predictions of a model of the roundings, and the rows that miss `LIMIT`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from run import describe_run

from jax_fastattn import attention, ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs

LIMIT = 1.2
LARGE_ROW = 3
HEADS = 2
SINK = 12.0


@dataclass(frozen=True)
class Draw:
    """Sizes of one call in float16, and what makes its gradients small or large.

    Attributes:
        log2_cotangents: of their factor.
        bias: whether there is a bias of pairs in float32, whose gradient is asked for.
    """

    keys: int
    head_dim: int = 64
    queries: int = 256
    has_sinks: bool = False
    log2_cotangents: int = 0
    has_large_row: bool = False
    bias: bool = False

    def __str__(self) -> str:
        words = [f"d{self.head_dim}", f"{self.keys} keys", f"sinks {SINK:g}" if self.has_sinks else ""]
        words += ["bias" if self.bias else "", f"2^{self.log2_cotangents}", "large row" if self.has_large_row else ""]
        return ", ".join(filter(None, words))

    @property
    def case(self) -> Case:
        """The call, as kernels are chosen for it."""
        more: dict[str, Any] = {"sinks": "n"} if self.has_sinks else {}
        more |= {"bias": "nts"} if self.bias else {}
        return Case("float16", 1, self.queries, self.keys, HEADS, 1, self.head_dim, **more)

    def arrays(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """Returns the operands by name, and the cotangent."""
        random = np.random.default_rng(7)
        rows, columns = ((1, n, HEADS, self.head_dim) for n in (self.queries, self.keys))
        shapes = {"query": rows, "key": columns, "value": columns, "dout": rows}
        found = {name: jnp.asarray(random.normal(size=shape), jnp.float16) for name, shape in shapes.items()}
        dout = found.pop("dout") * jnp.float16(2.0**self.log2_cotangents)
        if self.has_large_row:
            dout = dout.at[:, LARGE_ROW].multiply(1000)
        if self.has_sinks:
            found["sinks"] = jnp.full(HEADS, SINK, jnp.float32)
        if self.bias:
            found["bias"] = jnp.asarray(random.normal(size=(1, HEADS, self.queries, self.keys)), jnp.float32)
        return found, dout

    def predicted(self) -> str:
        """Returns what the model of notebook/float16.md predicts of ours over by hand, if that rounds dS as well."""
        if self.log2_cotangents < 0:
            return "about 1: the gradients themselves are subnormal"
        if self.has_large_row and self.keys > 16384:
            return "dq of other rows 2 to 2.5, others 0.9 to 1.2"
        return "dq, dk 0.9 to 1.2; dv at most 1.05, and less with sinks"


KEYS = (128, 1024, 4096, 16384, 65536)
DRAWS = [
    Draw(keys, has_sinks=has_sinks, log2_cotangents=log2, has_large_row=has_large_row)
    for keys, has_sinks, log2, has_large_row in itertools.product(KEYS, (False, True), (0, -10, 9), (False, True))
    # 1000 times cotangents of 2^9 are infinite.
    if not (has_large_row and log2 > 0)
]
DRAWS += [Draw(keys, 128, has_sinks=has_sinks) for keys in (1024, 16384) for has_sinks in (False, True)]
DRAWS += [Draw(keys, bias=True, log2_cotangents=log2) for keys in (1024, 4096) for log2 in (0, 9)]
TINY = [Draw(40, 16, 24, has_sinks, 0, has_large_row, bias) for has_sinks, has_large_row, bias in
        ((False, True, False), (True, False, True))]  # fmt: skip


def by_hand(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None, sinks: jax.Array | None = None
) -> jax.Array:
    """Attention as `jax.nn` computes it, with sinks."""
    dtype = np.promote_types(query.dtype, np.float32)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=dtype) * query.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias.astype(dtype)
    if sinks is not None:
        columns = jnp.broadcast_to(sinks[None, :, None, None].astype(dtype), (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, columns], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : key.shape[1]].astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


def ours(**operands: jax.Array) -> jax.Array:
    """A call of this package; on a GPU it must run the kernels."""
    implementation = "cuda" if jax.default_backend() == "gpu" else None
    return attention(**operands, implementation=implementation)


@functools.partial(jax.jit, static_argnums=0)
def gradients(function: Any, operands: dict[str, jax.Array], dout: jax.Array) -> dict[str, jax.Array]:
    """Returns the gradients of all operands by name."""
    return jax.vjp(lambda operands: function(**operands), operands)[1](dout)[0]


def measure(draw: Draw) -> dict[str, Any]:
    """Returns the errors of ours and by hand by gradient, their ratios, and how many of our numbers are not finite."""
    operands, dout = draw.arrays()
    with jax.enable_x64(True):
        wide = {name: x.astype(jnp.float64) for name, x in operands.items()}
        exact = {name: np.asarray(x) for name, x in gradients(by_hand, wide, dout.astype(jnp.float64)).items()}
    results = {name: gradients(function, operands, dout) for name, function in (("ours", ours), ("by_hand", by_hand))}
    found: dict[str, Any] = {"draw": str(draw), "predicted": draw.predicted(), "errors": {}, "ratios": {}}
    for name, x in results.items():
        numbers = {f"d{operand}": np.asarray(gradient, np.float64) for operand, gradient in x.items()}
        pairs = {operand: (y, exact[operand[1:]]) for operand, y in numbers.items()}
        if draw.has_large_row:
            pairs["dquery of other rows"] = tuple(np.delete(y, LARGE_ROW, axis=1) for y in pairs["dquery"])
        found["errors"][name] = {kind: _error(*pair) for kind, pair in pairs.items()}
        found[f"{name}_not_finite"] = int(sum((~np.isfinite(y)).sum() for y in numbers.values()))
    first, second = found["errors"].values()
    found["ratios"] = {kind: round(first[kind] / second[kind], 3) for kind in first if second[kind]}
    found["misses"] = [kind for kind, ratio in found["ratios"].items() if not ratio <= LIMIT]
    return found


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(f"{np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean()):.3g}")


def prepare(draws: Iterable[Draw], arch: str) -> None:
    """Compiles our kernels in several processes."""
    specs = kernel_specs([draw.case for draw in draws], arch)
    with multiprocessing.get_context("spawn").Pool(min(len(specs), os.cpu_count() or 1)) as pool:
        pool.map(ffi.prepare, specs, chunksize=1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--prepare", action="store_true", help="compile the kernels alone")
    parser.add_argument("--tiny", action="store_true", help="two small draws, for a test")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    options = parser.parse_args(argv)
    draws = TINY if options.tiny else DRAWS
    if options.prepare:
        prepare(draws, "sm_90a")
        return
    if options.output is None:
        parser.error("--output is missing")
    if jax.default_backend() == "gpu":
        prepare(draws, ffi.arch() or "sm_90a")
    record: dict[str, Any] = {"benchmark": "float16 gradients", "limit": LIMIT, "rows": []}
    record |= describe_run(options.commit)
    for draw in draws:
        found = measure(draw)
        record["rows"].append(found)
        options.output.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{found['draw']:44} {found['ratios']} {found['errors']['ours']}", flush=True)
    missed = [row["draw"] for row in record["rows"] if row["misses"] or row["ours_not_finite"]]
    print(f"{len(missed)} of {len(draws)} rows miss {LIMIT} or have infinities: {missed}")


if __name__ == "__main__":
    main()
