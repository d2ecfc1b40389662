# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compares two GPUs with one: gradients of a block, and the example's losses, speed and collectives.

    python benchmarks/parallel.py --output parallel.json -- --layers 12 --width 768 --heads 12 --length 2048 --batch 16

What follows `--` are options of `examples/train_gpt.py`. The block has query, key and value projections, attention and
an output projection, whose heads two devices share: one key head, and three, which two devices cannot split evenly. The
example runs data-parallel, with split parameters, and tensor-parallel with four key heads and with one. The record says
how far each is from the same on one device, and which collectives a step has.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from run import describe_run

import jax_fastattn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import train_gpt

DEVICES = 2
KEY_HEADS, HEAD_DIM = (1, 3), 128
KEPT = ("options", "implementation", "device", "collectives", "tokens_per_second", "losses", "held_out_losses")
# Options of the example beside those of the command line, and the run on one device that each is compared with.
RUNS = {
    "one": ([], None),
    "data": (["--data-parallel", "2"], "one"),
    "fsdp": (["--data-parallel", "2", "--fsdp"], "one"),
    "tensor": (["--tensor-parallel", "2"], "one"),
    "one-key-head": (["--kv-heads", "1"], None),
    "tensor-one-key-head": (["--kv-heads", "1", "--tensor-parallel", "2"], "one-key-head"),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    parser.add_argument("--steps", type=int, default=40, help="of each run of the example (default: 40)")
    parser.add_argument("options", nargs="*", help="of the example")
    options = parser.parse_args(argv)
    record: dict[str, Any] = describe_run(options.commit) | {"options": options.options, "blocks": {}, "runs": {}}

    def write() -> None:  # as it grows: a run that is stopped leaves what it has
        options.output.write_text(json.dumps(record, indent=1) + "\n")

    length = train_gpt.parse_arguments(options.options).length
    for kv_heads in KEY_HEADS:
        record["blocks"][f"{kv_heads} key heads"] = found = block(kv_heads, length)
        print(f"block, {kv_heads} key heads: {found}", flush=True)
        write()
    steps = ["--steps", str(options.steps), "--eval-every", str(options.steps), "--sample", "1", "--quiet"]
    for name, (more, baseline) in RUNS.items():
        run, _ = train_gpt.train(train_gpt.parse_arguments(["--kv-heads", "4", *options.options, *steps, *more]))
        record["runs"][name] = kept = {key: run[key] for key in KEPT}
        kept["gathered"] = gathered(run["collectives"], length)
        if baseline is not None:
            pairs = zip(run["losses"], record["runs"][baseline]["losses"], strict=True)
            kept["largest_difference_of_losses"] = max(abs(x - y) for x, y in pairs)
        shown = {key: x for key, x in kept.items() if key not in ("options", "losses", "held_out_losses")}
        print(f"{name}: {shown}", flush=True)
        write()


def block(kv_heads: int, length: int) -> dict[str, Any]:
    """Gradients of a block by all parameters and its input, its heads split over two devices and on one."""
    heads = 4 * kv_heads
    width = heads * HEAD_DIM
    columns = {"query": width, "key": kv_heads * HEAD_DIM, "value": kv_heads * HEAD_DIM}
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(jnp.bfloat16)

    params = {name: draw(width, size, scale=width**-0.5) for name, size in (columns | {"out": width}).items()}
    x, cotangent = draw(2, length, width), draw(2, length, width)

    def gradients(params: dict[str, jax.Array], x: jax.Array, cotangent: jax.Array) -> Any:
        def call(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            projected = {name: (x @ params[name]).reshape(*x.shape[:2], -1, HEAD_DIM) for name in columns}
            attended = jax_fastattn.attention(*projected.values(), is_causal=True)
            return attended.reshape(x.shape) @ params["out"]

        return jax.vjp(call, params, x)[1](cotangent)

    one, hlo = on_devices(gradients, 1, params, x, cotangent)
    assert not train_gpt.collectives(hlo)
    two, hlo = on_devices(gradients, DEVICES, params, x, cotangent)
    found = train_gpt.collectives(hlo)
    errors = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), two, one)
    named = errors[0] | {"input": errors[1]}
    return {"relative_difference": named, "collectives": found, "gathered": gathered(found, length)}


def on_devices(function: Any, count: int, params: dict[str, jax.Array], *arrays: jax.Array) -> tuple[Any, str]:
    """Results in float32 on the host's first device, and the compiled program; query heads are split over devices."""
    mesh = jax.make_mesh((count,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    layouts = {"query": P(None, "tensor"), "key": P(), "value": P(), "out": P("tensor", None)}
    placed = {name: jax.device_put(x, NamedSharding(mesh, layouts[name])) for name, x in params.items()}
    arrays = tuple(jax.device_put(x, NamedSharding(mesh, P())) for x in arrays)
    compiled = jax.jit(function).lower(placed, *arrays).compile()
    results = jax.tree.map(lambda x: jnp.asarray(jax.device_get(x), jnp.float32), compiled(placed, *arrays))
    return results, compiled.as_text() or ""


def gathered(collectives: dict[str, int], length: int) -> list[str]:
    """All-gathers of activations: those with an axis as long as the sequence, or as several."""

    def is_long(shape: str) -> bool:
        return any(int(size) % length == 0 for size in shape.split(","))

    names = [name for name in collectives if name.startswith("all-gather")]
    return [name for name in names if any(map(is_long, re.findall(r"\[([\d,]+)\]", name)))]


if __name__ == "__main__":
    main()
