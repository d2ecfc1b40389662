# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`bench`: times one call next to both implementations of `jax.nn.dot_product_attention`.

It measures and does not check results; `benchmarks/run.py` of the repository does both, for more peers.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn import attention, attention_varlen
from jax_fastattn.cases.case import Case
from jax_fastattn.cli import shapes
from jax_fastattn.cli.errors import CommandError
from jax_fastattn.cli.text import columns, file_size
from jax_fastattn.ops import dispatch
from jax_fastattn.spec import DIFFERENTIABLE, Operands

Attend = Callable[[Case, Operands], Any]

# One measurement takes at least this long, and holds as many calls as that takes.
_MEASUREMENT_SECONDS = 0.02


class _Unsupported(Exception):
    """Signals that an implementation has no argument for a call, or cannot run it here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Times:
    """The times that an implementation takes for a call.

    Attributes:
        forward, backward: milliseconds; None if it was not measured.
        note: what ran, or why nothing did.
        error: what stopped it.
    """

    forward: float | None
    backward: float | None
    note: str = ""
    error: str = ""


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "bench",
        help="time a call next to jax.nn.dot_product_attention",
        description="Times forward and backward passes of a call, of this package and of both implementations of "
        "jax.nn.dot_product_attention. Without a GPU it times the XLA paths on the CPU.",
    )
    shapes.add_shape(parser)
    shapes.add_size(parser, "default: 1", "queries, and keys if another number", required=True)
    parser.add_argument("--seconds", type=_seconds, default=1.0, help="of measurements for each time (default: 1)")
    parser.set_defaults(run=run, parser=parser)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 600:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of seconds above 0 and up to 600")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Prints a table for each call; the exit status is 1 if this package could not run one."""
    layers = shapes.layers(options)
    size = shapes.Size(options.batch or 1, *options.length)
    device = jax.devices()[0]
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")
    if device.platform != "gpu":
        print("No GPU: these are times of XLA paths on the CPU, and say nothing about the CUDA kernels.")
    status = 0
    for name, layer in layers.items():
        case = shapes.sized(layer, options, size)
        print(f"\n{name}: {shapes.describe(case)}", flush=True)
        times = _measured(case, options.seconds)
        print(_table(times))
        if error := times["jax_fastattn"].error:
            print(f"{options.parser.prog}: {name}: {error}", file=sys.stderr)
            status = 1
    return status


def _measured(case: Case, seconds: float) -> dict[str, Times]:
    """Returns the times of all implementations, on the same arrays."""
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(case.operands, jax.random.key(0))))
    if _is_too_large(3 * needed):
        raise CommandError(f"the arrays of this call take {file_size(needed)}, more than this machine has free")
    try:
        operands = jax.block_until_ready(jax.jit(case.operands)(jax.random.key(0)))
    except Exception as error:
        raise CommandError(f"cannot make the arrays of this call: {_first_line(error)}") from error
    return {name: _times(attend, case, operands, seconds) for name, attend in IMPLEMENTATIONS.items()}


def _times(attend: Attend, case: Case, operands: Operands, seconds: float) -> Times:
    """Returns the times of one implementation; what a peer raises becomes its note."""
    note = str(dispatch.explain(case.problem())) if attend is _ours else ""
    found: dict[str, float] = {}
    error_text = ""
    try:
        for mode in ("forward", "backward"):
            found[mode] = _milliseconds(*_compiled(attend, case, operands, mode), seconds)
    except Exception as error:
        text = str(error) if isinstance(error, _Unsupported) else f"{type(error).__name__}: {_first_line(error)}"
        note, error_text = ("", text) if attend is _ours else (text, "")
    return Times(found.get("forward"), found.get("backward"), note, error_text)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _compiled(attend: Attend, case: Case, operands: Operands, mode: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what is timed and its arguments. Backward is the pullback alone, with what forward left as arguments."""
    names = [name for name in DIFFERENTIABLE if getattr(operands, name) is not None]
    arrays = tuple(getattr(operands, name) for name in names)

    others = operands._replace(**dict.fromkeys(names))

    def forward(others: Operands, *arrays: jax.Array) -> Any:
        return attend(case, others._replace(**dict(zip(names, arrays, strict=True))))

    if mode == "forward":
        return jax.jit(forward), (others, *arrays)
    vjp = jax.jit(lambda others, *arrays: jax.vjp(lambda *x: forward(others, *x), *arrays))
    out, pullback = vjp(others, *arrays)
    cotangents = jax.tree.map(jnp.ones_like, out)
    return jax.jit(lambda pullback, cotangents: pullback(cotangents)), (pullback, cotangents)


def _milliseconds(call: Callable[..., Any], arrays: tuple[Any, ...], seconds: float) -> float:
    """Returns the median time of a call, from measurements of asynchronous calls that fill `seconds`."""

    def measure(count: int) -> float:
        started, result = time.perf_counter(), None
        for _ in range(count):
            result = call(*arrays)
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / count

    jax.block_until_ready(call(*arrays))  # the first call compiles
    calls = max(1, min(1000, int(_MEASUREMENT_SECONDS / measure(1))))
    started, times = time.monotonic(), [measure(calls)]
    while time.monotonic() - started < seconds:
        times.append(measure(calls))
    return statistics.median(times) * 1e3


def _ours(case: Case, operands: Operands) -> Any:
    """Calls `attention`, or `attention_varlen` for packed sequences."""
    options: dict[str, Any] = {
        "scale": case.scale,
        "is_causal": case.is_causal,
        "local_window_size": case.window,
        "logits_soft_cap": case.logits_soft_cap,
        "sinks": None if operands.sinks is None else operands.sinks[0],
        "deterministic": case.deterministic,
        "precise_gradients": case.precise_gradients,
        "return_residual": case.dlse,
    }
    query, key, value = operands.query, operands.key, operands.value
    if case.packed is not None:
        options["query_offset"] = case.query_offset or 0
        return attention_varlen(query[0], key[0], value[0], *case.boundaries(), **options)
    if operands.query_segment_ids is not None:
        options["segment_ids"] = operands.query_segment_ids, operands.key_value_segment_ids
    for name in ("query_seq_lengths", "key_value_seq_lengths", "query_offset"):
        if (x := getattr(operands, name)) is not None:
            options[name] = x
    return attention(query, key, value, operands.bias, operands.mask, **options)


def _jax_nn_xla(case: Case, operands: Operands) -> Any:
    """Calls `jax.nn` by XLA, which holds all logits in memory, and more than once in the backward pass."""
    logits = 4 * case.batch * case.num_heads * case.query_length * case.key_length
    if _is_too_large(3 * logits):
        raise _Unsupported(f"not run: it holds {file_size(logits)} of logits, several times over")
    return _jax_nn(case, operands, "xla")


def _jax_nn_cudnn(case: Case, operands: Operands) -> Any:
    """Calls `jax.nn` by cuDNN."""
    if jax.default_backend() != "gpu":
        raise _Unsupported("needs an NVIDIA GPU")
    return _jax_nn(case, operands, "cudnn")


def _jax_nn(case: Case, operands: Operands, implementation: Any) -> jax.Array:
    absent = {
        "v_head_dim": "another head dim of value",
        "logits_soft_cap": "soft caps",
        "sinks": "sinks",
        "segments": "segment ids",
        "packed": "packed sequences",
        "query_offset": "query offsets",
        "deterministic": "deterministic gradients",
        "precise_gradients": "precise gradients",
        "dlse": "the gradient of the log-sum-exp",
    }
    asked = [text for name, text in absent.items() if getattr(case, name)]
    if asked:
        raise _Unsupported(f"has no argument for {', '.join(asked)}")
    left, right = case.spec().bounds
    window = (case.key_length if left is None else left, case.key_length if right is None else right)
    return jax.nn.dot_product_attention(
        *operands[:5],
        scale=case.scale,
        is_causal=case.is_causal,
        query_seq_lengths=operands.query_seq_lengths,
        key_value_seq_lengths=operands.key_value_seq_lengths,
        local_window_size=None if case.window == (None, None) else window,
        implementation=implementation,
    )


IMPLEMENTATIONS: dict[str, Attend] = {
    "jax_fastattn": _ours,
    "jax.nn cudnn": _jax_nn_cudnn,
    "jax.nn xla": _jax_nn_xla,
}


def _is_too_large(size: int) -> bool:
    """Returns whether the host would run out of memory, which ends a process without a word. GPUs raise an error."""
    if jax.default_backend() == "gpu":
        return False
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return size > 1024 * int(line.split()[1])
    return False


def _table(times: dict[str, Times]) -> str:
    """Returns a table with a row for each implementation, and notes on those that have any."""
    ours = times["jax_fastattn"]
    rows = [["implementation", "forward", "backward", "forward/ours", "backward/ours"]]
    for name, found in times.items():
        cells = [_cell(found.forward, "ms"), _cell(found.backward, "ms")]
        rows.append([name, *cells, _ratio(found.forward, ours.forward), _ratio(found.backward, ours.backward)])
    notes = [f"{name}: {found.note}" for name, found in times.items() if found.note]
    return "\n".join([columns(rows), *notes])


def _cell(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3f} {unit}" if value < 100 else f"{value:.0f} {unit}"


def _ratio(value: float | None, ours: float | None) -> str:
    return "-" if value is None or ours is None else f"{value / ours:.2f}x"
