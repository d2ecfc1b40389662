# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Live memory of one forward and backward pass of the XLA path on a CPU, as JSON.

    python benchmarks/memory.py [--length 16384] [--num-heads 4] [--head-dim 64] [--causal] [--dry-run]

Records what XLA plans (temporaries, results, arguments) and the peak resident set of the process, which also holds JAX
itself. Measure on a machine of your own: the file is named after the date and the platform.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import time
from pathlib import Path

import jax

from jax_fastattn.cases.case import Case
from jax_fastattn.spec import Operands
from jax_fastattn.xla import passes as xla

MIB = 2**20


def measure(case: Case) -> dict[str, object]:
    """Compiles and runs the case once."""
    spec, operands = case.spec(), case.operands(jax.random.key(0))
    dout, _ = case.cotangents(jax.random.key(1))

    @jax.jit
    def step(operands: Operands, dout: jax.Array) -> tuple[jax.Array, xla.Gradients]:
        out, lse = xla.forward(spec, operands)
        return out, xla.backward(spec, operands, out, lse, dout, None)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    compiled = step.lower(operands, dout).compile()
    compile_s = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(compiled(operands, dout))
    run_s = time.perf_counter() - start
    plan = compiled.memory_analysis()
    assert plan is not None
    live = plan.temp_size_in_bytes + plan.output_size_in_bytes + plan.argument_size_in_bytes
    return {
        "benchmark": "memory",
        "case": str(case),
        "num_heads": case.num_heads,
        "implementation": "xla",
        "mode": "forward+backward",
        "temporaries_mib": round(plan.temp_size_in_bytes / MIB, 1),
        "results_mib": round(plan.output_size_in_bytes / MIB, 1),
        "arguments_mib": round(plan.argument_size_in_bytes / MIB, 1),
        "live_mib": round(live / MIB, 1),
        "logits_would_take_mib": case.batch * case.num_heads * case.query_length * case.key_length * 4 / MIB,
        "rss_before_mib": round(before, 1),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "compile_s": round(compile_s, 2),
        "run_s": round(run_s, 2),
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="print the record, write nothing")
    arguments = parser.parse_args()
    case = Case(
        batch=1,
        query_length=arguments.length,
        key_length=arguments.length,
        num_kv_heads=arguments.num_heads,
        head_dim=arguments.head_dim,
        is_causal=arguments.causal,
    )
    record = json.dumps(measure(case))
    print(record)
    if not arguments.dry_run:
        name = f"{datetime.datetime.now(datetime.UTC).date().isoformat()}-{jax.default_backend()}-memory.json"
        with (Path(__file__).parent / "results" / name).open("a") as file:
            file.write(record + "\n")


if __name__ == "__main__":
    main()
