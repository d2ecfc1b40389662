# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Times the conversion of float32 operands to float16 as a part of forward passes, by turns in one process.

    python benchmarks/conversion.py --output conversion.json        # half a minute on a GPU

Under "tensorfloat32" kernels multiply float16 numbers times powers of two. XLA finds the largest elements, converts the
operands ahead of the launch, and multiplies the output. A record has milliseconds of such a call, of a call on float16
operands, and of the conversion alone; the share is the difference of both calls over the first. The prediction counts
the bytes of XLA's program at 90 % of 4.8 TB/s, and 2.5 us for each of its 12 kernels; see `notebook/float32.md`.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import turns
from accuracy import prepare
from turns import by_turns, elapsed_ms

from jax_fastattn import attention
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.cases.case import Case
from jax_fastattn.ops.cuda.half import forward_half, times_power

PRECISION = "tensorfloat32"


@dataclass(frozen=True)
class Converted:
    """A call.

    Attributes:
        predicted: the share of the conversion in the forward pass on an H200.
    """

    head_dim: int
    is_causal: bool
    predicted: float
    batch: int = 4
    length: int = 4096
    heads: int = 16

    def cases(self) -> list[Case]:
        """Returns both calls."""
        sizes = self.batch, self.length, self.length, self.heads, 1, self.head_dim
        single = Case("float32", *sizes, is_causal=self.is_causal, precision=PRECISION)
        return [single, Case("float16", *sizes, is_causal=self.is_causal)]


CASES = {
    "d64": Converted(64, False, 0.24),
    "d64-causal": Converted(64, True, 0.34),
    "d128": Converted(128, False, 0.26),
    "d128-causal": Converted(128, True, 0.39),
}


def converted(query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool) -> Any:
    """Returns the operands of the launch, and what stands for the output times its factor."""
    spec, operands = canonicalize(query, key, value, is_causal=is_causal)
    found = forward_half(spec, operands)
    return found.operands[:3], times_power(value, found.out[..., None])


def measure(case: Converted, rounds: int, measurement_ms: float) -> dict[str, Any]:
    """Returns the record of a case."""
    shape = case.batch, case.length, case.heads, case.head_dim
    arrays = [jax.random.normal(key, shape, jnp.float32) for key in jax.random.split(jax.random.key(0), 3)]
    halves = [x.astype(jnp.float16) for x in arrays]
    attend = jax.jit(functools.partial(attention, is_causal=case.is_causal))
    convert = jax.jit(functools.partial(converted, is_causal=case.is_causal))

    def in_half(call: Any) -> Any:
        with jax.default_matmul_precision(PRECISION):
            return call(*arrays)

    programs = {
        "float32": functools.partial(in_half, attend),
        "float16": functools.partial(attend, *halves),
        "conversion": functools.partial(in_half, convert),
    }
    for program in programs.values():
        program()
    times = by_turns(lambda name, count: elapsed_ms(programs[name], count), programs, rounds, measurement_ms)
    ms = {name: statistics.median(x) for name, x in times.items()}
    share = (ms["float32"] - ms["float16"]) / ms["float32"]
    return {"ms": ms, "share": share, "predicted share": case.predicted}


def main(argv: list[str] | None = None) -> None:
    options = turns.parser(__doc__, CASES, rounds=5).parse_args(argv)
    if jax.default_backend() == "gpu":
        prepare(case for name in options.cases for case in CASES[name].cases())

    def words(found: dict[str, Any]) -> str:
        times = ", ".join(f"{name} {x:.3f} ms" for name, x in found["ms"].items())
        return f"{times}: share {found['share']:.2f}, predicted {found['predicted share']:.2f}"

    def measured(name: str) -> dict[str, Any]:
        return measure(CASES[name], options.rounds, options.measurement_ms)

    turns.record_cases(options, {"benchmark": "conversion"}, measured, words)


if __name__ == "__main__":
    main()
