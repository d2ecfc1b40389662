# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a 48-layer unrolled model costs before its first step, and what `import jax_fastattn` costs.

Every measurement is a process of its own: a cold start compiles the kernels, a warm one finds them on disk, and the XLA
path is what remains without kernels. Lowering is for CUDA and needs no GPU; where there is one, the program is compiled
and called too. Writes one JSON record per line:

    python benchmarks/lowering.py --output benchmarks/results/lowering.json
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = 48
SHAPE = {"batch": 2, "length": 1024, "heads": 16, "kv_heads": 4, "head_dim": 128}


def measure_import() -> dict[str, Any]:
    """Seconds of `import jax`, and of `import jax_fastattn` after it: elapsed, and of this process's CPU time."""
    times = [(time.perf_counter(), time.process_time())]
    for module in ("jax", "jax_fastattn"):
        importlib.import_module(module)
        times.append((time.perf_counter(), time.process_time()))
    (jax_s, jax_cpu_s), (own_s, own_cpu_s) = (
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(times)
    )
    return {"import_jax_s": jax_s, "import_jax_cpu_s": jax_cpu_s, "import_s": own_s, "import_cpu_s": own_cpu_s}


def measure_lowering(implementation: str, arch: str) -> dict[str, Any]:
    """Seconds and bytes of the gradient of a model that calls attention in each of its layers."""
    import jax
    import jax.numpy as jnp

    import jax_fastattn
    from jax_fastattn import ffi

    heads, kv_heads, head_dim = SHAPE["heads"], SHAPE["kv_heads"], SHAPE["head_dim"]
    has_gpu = jax.default_backend() == "gpu"
    x = jnp.ones((SHAPE["batch"], SHAPE["length"], heads, head_dim), jnp.bfloat16)

    def loss(x: Any) -> Any:
        for _ in range(LAYERS):
            key = x[:, :, :kv_heads]
            x = x + jax_fastattn.attention(x, key, key, is_causal=True, implementation=implementation)
        return x.astype(jnp.float32).mean()

    with jax_fastattn.target_arch(None if has_gpu else arch):
        start = time.perf_counter()
        traced = jax.jit(jax.grad(loss)).trace(x)
        traced_at = time.perf_counter()
        lowered = traced.lower(lowering_platforms=("cuda",))
        lowered_at = time.perf_counter()
    text = lowered.as_text()
    record = {
        "trace_s": traced_at - start,
        "lower_s": lowered_at - traced_at,
        "kernels_compiled": ffi.compile_count(),
        "compiler_imported": "cutlass" in sys.modules,
        "stablehlo_bytes": len(text),
        "hlo_bytes": len(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()),
        "custom_calls_in_stablehlo": text.count("custom_call @jax_fastattn_launch"),
        "gpu": jax.devices()[0].device_kind if has_gpu else None,
    }
    if has_gpu:
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
        compiled_at = time.perf_counter()
        jax.block_until_ready(compiled(x))
        called_at = time.perf_counter()
        jax.block_until_ready(compiled(x))
        (module,) = compiled.runtime_executable().hlo_modules()
        record |= {
            "compile_s": compiled_at - lowered_at,
            "first_call_s": called_at - compiled_at,
            "second_call_s": time.perf_counter() - called_at,
            "optimised_hlo_bytes": len(module.as_serialized_hlo_module_proto()),
        }
    return record


def _child(cache: str, *arguments: str) -> dict[str, Any]:
    environment = os.environ | {"JAX_FASTATTN_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _context() -> dict[str, Any]:
    from importlib import metadata

    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "nvidia-cutlass-dsl")},
    }


def measure(arch: str, repeats: int) -> list[dict[str, Any]]:
    """Every record of this benchmark."""
    with tempfile.TemporaryDirectory() as cache:
        imports = [_child(cache, "import") for _ in range(repeats)]
        medians = {name: statistics.median(record[name] for record in imports) for name in imports[0]}
        records = [{"case": "import", "repeats": repeats, **medians}]
        for case, implementation in (("cold", "cuda"), ("warm", "cuda"), ("xla", "xla")):
            measured = _child(cache, "lower", implementation, arch)
            records.append({"case": case, "arch": arch, "layers": LAYERS, **SHAPE, **measured})
    context = _context()
    return [record | context for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="file to append records to; default: print only")
    parser.add_argument("--arch", default="sm_90a", help="architecture to lower for where there is no GPU")
    parser.add_argument("--repeats", type=int, default=7, help="imports to take the median of")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        print(json.dumps(measure_import() if kind == "import" else measure_lowering(*rest)))
        return
    lines = [json.dumps(record) for record in measure(arguments.arch, arguments.repeats)]
    print("\n".join(lines))
    if arguments.output:
        with arguments.output.open("a") as file:
            file.write("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
