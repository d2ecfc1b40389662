# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a 48-layer unrolled model costs before its first step, and what `import jax_fastattn` costs.

Every measurement is a process of its own: a cold start compiles the kernels, a warm one finds them on disk, and the XLA
path is what remains without kernels. Lowering is for CUDA and needs no GPU; where there is one, the program is compiled
and called too. Writes one JSON record per line:

    python benchmarks/lowering.py --output benchmarks/results/lowering.json

With `--texts` it writes the StableHLO of plain programs instead, for a CPU and for CUDA, and compares it with that of
another commit, here of a worktree of `main` with the extension in it. A kernel's object and what identifies it are left
out of the texts. Texts with 0 lines less and 0 more differ only in the order of lines and the numbers of values.

    PYTHONPATH=../main python benchmarks/lowering.py --texts build/texts/before
    PYTHONPATH=. python benchmarks/lowering.py --texts build/texts/after --against build/texts/before
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

LAYERS = 48
DERIVATIVES = ("grad", "jvp", "hvp")
PLATFORMS = ("cpu", "cuda")
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


def measure_lowering(implementation: Any, derivative: str, arch: str) -> dict[str, Any]:
    """Seconds and bytes of a derivative of a model that calls attention in each of its layers."""
    import jax
    import jax.numpy as jnp

    import jax_fastattn
    from jax_fastattn import ffi

    heads, kv_heads, head_dim = SHAPE["heads"], SHAPE["kv_heads"], SHAPE["head_dim"]
    has_gpu = jax.default_backend() == "gpu"
    x = jnp.ones((SHAPE["batch"], SHAPE["length"], heads, head_dim), jnp.bfloat16)

    chosen = None if implementation == "any" else implementation

    def loss(x: Any) -> Any:
        for _ in range(LAYERS):
            key = x[:, :, :kv_heads]
            x = x + jax_fastattn.attention(x, key, key, is_causal=True, implementation=chosen)
        return x.astype(jnp.float32).mean()

    functions = {
        "grad": jax.grad(loss),
        "jvp": lambda x: jax.jvp(loss, (x,), (x,)),
        "hvp": lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1],
    }
    with jax_fastattn.target_arch(None if has_gpu else arch):
        start = time.perf_counter()
        traced = jax.jit(functions[derivative]).trace(x)
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


def plain_programs() -> dict[str, tuple[Any, Any]]:
    """Forward passes and gradients, of each kind of operand and transformation: functions and their arguments."""
    import jax
    import jax.numpy as jnp

    from jax_fastattn import attention, attention_varlen

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def add_up(results: Any) -> Any:
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(results))

    def gradient(args: Any = (0, 1, 2), function: Any = attention, **options: Any) -> Any:
        return jax.grad(lambda *x: add_up(function(*x, **options)), args)

    def bound(*names: str, **options: Any) -> Any:
        """Attention of query, key, value and of the named operands."""
        return lambda q, k, v, *x: attention(q, k, v, **dict(zip(names, x, strict=True)), **options)

    def layers(policy: Any = None) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + attention(*(jnp.einsum("btnh,hk->btnk", x, w[i]) for i in range(3)), is_causal=True)

        one = layer if policy is None else jax.checkpoint(layer, policy=policy)
        return jax.grad(lambda x, w: add_up(functools.reduce(one, w, x)), (0, 1))

    def scanned(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x + attention(x * w, x, x), None), x, w)[0]

    policies = jax.checkpoint_policies
    query, kv = array(2, 256, 8, 64), array(2, 256, 2, 64)
    qkv, long = (query, kv, kv), (array(1, 4096, 4, 64),) * 3
    sinks, scale = array(8, dtype=jnp.float32), array(dtype=jnp.float32)
    bias, mask = array(1, 8, 256, 256), array(1, 1, 256, 256, dtype=jnp.bool_)
    ids, lengths = array(2, 256, dtype=jnp.int32), array(2, dtype=jnp.int32)
    mapped = tuple(array(3, *x.shape) for x in qkv)
    packed, starts = (array(512, 8, 64),) * 3, (array(5, dtype=jnp.int32),) * 2
    of_layers = query, tuple(array(3, 64, 64) for _ in range(4))
    of_scan = query, array(4)
    names = policies.save_only_these_names("jax_fastattn_out", "jax_fastattn_lse")
    return {
        "forward": (attention, qkv),
        "forward-causal-long": (lambda *x: attention(*x, is_causal=True), long),
        "grad": (gradient(), qkv),
        "grad-float32": (gradient(), tuple(array(*x.shape, dtype=jnp.float32) for x in qkv)),
        "grad-causal": (gradient(is_causal=True), qkv),
        "grad-causal-long": (gradient(is_causal=True), long),
        "grad-window-softcap": (gradient(local_window_size=(64, 0), logits_soft_cap=20.0), qkv),
        "grad-of-query": (gradient(0), qkv),
        "grad-lse": (gradient(return_residual=True), qkv),
        "grad-lengths": (gradient(function=bound("key_value_seq_lengths")), (*qkv, lengths)),
        "grad-mask": (gradient(function=bound("mask")), (*qkv, mask)),
        "grad-segment-ids": (gradient(function=lambda q, k, v, x: attention(q, k, v, segment_ids=(x, x))), (*qkv, ids)),
        "grad-sinks-scale": (gradient((0, 1, 2, 3, 4), bound("sinks", "scale")), (*qkv, sinks, scale)),
        "grad-not-of-sinks": (gradient(function=bound("sinks")), (*qkv, sinks)),
        "grad-bias": (gradient((0, 1, 2, 3), bound("bias")), (*qkv, bias)),
        "grad-not-of-bias": (gradient(function=bound("bias")), (*qkv, bias)),
        "grad-packed": (gradient(function=functools.partial(attention_varlen, is_causal=True)), (*packed, *starts)),
        "vmap-of-grad": (jax.vmap(gradient()), mapped),
        "grad-of-vmap-of-query": (
            gradient(function=lambda q, k, v: jax.vmap(lambda q: attention(q, k, v))(q)),
            (mapped[0], kv, kv),
        ),
        "grad-of-scan": (gradient((0, 1), scanned), of_scan),
        "layers": (layers(), of_layers),
        "layers-saved-names": (layers(names), of_layers),
        "layers-nothing-saved": (layers(policies.nothing_saveable), of_layers),
    }


def write_texts(folder: Path, arch: str) -> None:
    """Writes a file for each plain program and platform."""
    import jax

    import jax_fastattn

    folder.mkdir(parents=True, exist_ok=True)
    with jax_fastattn.target_arch(arch):
        for name, (function, arguments) in plain_programs().items():
            traced = jax.jit(function).trace(*arguments)
            for target in PLATFORMS:
                text = traced.lower(lowering_platforms=(target,)).as_text()
                text = re.sub(r'\b(object|digest|key) = "[^"]*",? ?|\bobject_size = \d+ : i32,? ?', "", text)
                (folder / f"{name}.{target}.mlir").write_text(text)


def compare_texts(before: Path, after: Path) -> list[str]:
    """Rows of a table: whether the texts of a program are equal, and how often it launches kernels."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from testing.launches import count_launches

    rows = [f"| program | {' | '.join(PLATFORMS)} | launches |", "|---|---|---|---|"]
    for name in plain_programs():
        pairs = [[(folder / f"{name}.{x}.mlir").read_text() for folder in (before, after)] for x in PLATFORMS]
        cells = ["equal" if x == y else f"differs, {_lines_apart(x, y)}" for x, y in pairs]
        launches = " -> ".join(str(n) for n in dict.fromkeys(map(count_launches, pairs[-1])))
        rows.append(f"| {name} | {' | '.join(cells)} | {launches} |")
    return rows


def _lines_apart(before: str, after: str) -> str:
    """What is left if values lose their numbers: equal lines in another order are the same program."""
    old, new = (Counter(re.sub(r"%\w+(:\d+|#\d+)?", "%", text).splitlines()) for text in (before, after))
    return f"{(old - new).total()} lines less, {(new - old).total()} more"


def _child(cache: str, *arguments: str) -> dict[str, Any]:
    environment = os.environ | {"JAX_FASTATTN_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _context() -> dict[str, Any]:
    from importlib import metadata

    import jax_fastattn

    git = ["git", "-C", str(Path(jax_fastattn.__file__).parent), "rev-parse", "HEAD"]
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
        cases = [("cold", "cuda", "grad"), ("warm", "cuda", "grad"), ("xla", "xla", "grad")]
        # Kernels and XLA run the other derivatives together, which `implementation="cuda"` refuses.
        cases += [("warm", "any", derivative) for derivative in DERIVATIVES[1:]]
        for case, implementation, derivative in cases:
            measured = _child(cache, "lower", implementation, derivative, arch)
            static = {"case": case, "derivative": derivative, "arch": arch, "layers": LAYERS}
            records.append(static | SHAPE | measured)
    context = _context()
    return [record | context for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="file to append records to; default: print only")
    parser.add_argument("--arch", default="sm_90a", help="architecture to lower for where there is no GPU")
    parser.add_argument("--repeats", type=int, default=7, help="imports to take the median of")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="write the texts of plain programs, and stop")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="of other texts, to compare these with")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        print(json.dumps(measure_import() if kind == "import" else measure_lowering(*rest)))
        return
    if arguments.texts:
        write_texts(arguments.texts, arguments.arch)
        if arguments.against:
            print("\n".join(compare_texts(arguments.against, arguments.texts)))
        return
    lines = [json.dumps(record) for record in measure(arguments.arch, arguments.repeats)]
    print("\n".join(lines))
    if arguments.output:
        with arguments.output.open("a") as file:
            file.write("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
