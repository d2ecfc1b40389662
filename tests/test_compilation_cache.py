# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Programs under a mesh in JAX's compilation cache, from which the flag leaves out the names of partition callbacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention, ffi, target_arch

ROOT = Path(__file__).parents[1]
FLAGS = {
    "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
}
# Calls that differ from the first one in one field of `AttentionSpec` each. Operands have the same shapes in all of
# them: the lengths of queries and of keys are two names for an array of one shape.
BASE: dict[str, Any] = {"key_value_seq_lengths": [5, 8, 3, 7]}
VARIANTS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.25},
    "is_causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "logits_soft_cap": {"logits_soft_cap": 1.5},
    "deterministic": {"deterministic": True},
    "implementation": {"implementation": "xla"},
    "precision": {"precision": "highest"},
    "present": {"query_seq_lengths": [5, 8, 3, 7], "key_value_seq_lengths": None},
}


def function(options: dict[str, Any], *, differentiated: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns the sum of squares of an attention call with `BASE` and options, or its gradient."""
    options = BASE | options
    precision = options.pop("precision", "default")
    arrays = {name: jnp.array(x) for name, x in options.items() if isinstance(x, list)}

    def loss(x: jax.Array) -> jax.Array:
        with jax.default_matmul_precision(precision):
            return (attention(x, x, x, **options | arrays) ** 2).sum()

    return jax.grad(loss) if differentiated else loss


def split_input() -> tuple[jax.Array, np.ndarray]:
    """Returns an array whose batch is split over four devices, and the same as a host array."""
    x = np.random.default_rng(0).standard_normal((4, 8, 2, 8)).astype("float32")
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P("x"))), x


def child(names: list[str]) -> None:
    """Runs calls, and prints for each one whether JAX found its program, and its error against one device."""
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    split, whole = split_input()
    report = {}
    for name in names:
        for differentiated in (False, True):
            run = function(VARIANTS.get(name, {}), differentiated=differentiated)
            want = jax.jit(run)(whole)
            lowered = jax.jit(run).lower(split)
            hits.clear()
            got = lowered.compile()(split)
            found = hits.count("/jax/compilation_cache/cache_hits")
            report[f"{name}-{differentiated}"] = found, float(jnp.abs(got - want).max() / jnp.abs(want).max())
    print(json.dumps(report))


def run_child(cache: Path, names: list[str]) -> dict[str, tuple[int, float]]:
    command = [sys.executable, "-c", f"import test_compilation_cache as t; t.child({names})"]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | FLAGS | {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_process_does_not_get_the_program_of_another_call_under_a_mesh(tmp_path: Path) -> None:
    first = run_child(tmp_path, ["base"])
    assert [hits for hits, _ in first.values()] == [0, 0]
    second = run_child(tmp_path, ["base", *VARIANTS])
    for name, (hits, error) in second.items():
        assert hits == name.startswith("base"), f"{name}: found {hits} programs"
        assert error < 1e-5, name


def cuda_text(options: dict[str, Any], *, differentiated: bool = True) -> str:
    """Returns the program that is lowered for CUDA, in the form in which the flag makes a cache key of it."""
    split, _ = split_input()
    traced = jax.jit(function(options, differentiated=differentiated)).trace(split)
    return re.sub(r'backend_config = "\d+"', "", traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "backward"])
def test_programs_for_cuda_under_a_mesh_differ_in_each_field(differentiated: bool) -> None:
    with target_arch("sm_90a"):
        texts = {name: cuda_text(x, differentiated=differentiated) for name, x in ({"base": {}} | VARIANTS).items()}
        jax.clear_caches()
        again = cuda_text({}, differentiated=differentiated)
    assert again == texts["base"]
    assert len(set(texts.values())) == len(texts)


def test_second_derivatives_under_a_mesh_differ_in_each_field() -> None:
    split, _ = split_input()

    def text(options: dict[str, Any]) -> str:
        run = function(options, differentiated=True)
        traced = jax.jit(lambda x: jax.jvp(run, (x,), (x,))).trace(split)
        return re.sub(r'backend_config = "\d+"', "", traced.lower().as_text())

    texts = {name: text(x) for name, x in ({"base": {}} | VARIANTS).items()}
    assert len(set(texts.values())) == len(texts)
    # The marks of forward pass, tangent, gradient and second gradient.
    assert len(set(re.findall(r'jax_fastattn = "\w+"', texts["base"]))) == 4


@pytest.mark.parametrize(
    "fact",
    {
        "sources": ("ffi.fingerprint.sources_digest", lambda: "others"),
        "compiler": ("compilation.libraries.compiler_version", lambda: "0.0.0"),
        "cuda-libraries": ("compilation.libraries.toolkit", lambda: 99),
        "multiprocessors": ("ffi.registry.multiprocessors", lambda: 7),
        "missing": ("ffi.registry.missing_parts", lambda: ["the compiler is missing"]),
        "cpu": ("ffi.fingerprint.platform.machine", lambda: "another"),
    }.items(),
    ids=lambda fact: fact[0],
)
def test_programs_under_a_mesh_differ_in_what_the_process_lowers_with(
    fact: tuple[str, tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax_fastattn.ffi.registry.missing_parts", list)
    with target_arch("sm_90a"):
        before = cuda_text({})
        monkeypatch.setattr(f"jax_fastattn.{fact[1][0]}", fact[1][1])
        jax.clear_caches()
        assert cuda_text({}) != before


def test_marks_of_programs_under_a_mesh_differ_with_x64() -> None:
    """Some programs are the same with both settings, and their partition callbacks compute other ones."""

    def marks() -> set[str]:
        found = set(re.findall(r'jax_fastattn = "\w+"', cuda_text({})))
        assert found
        return found

    with target_arch("sm_90a"):
        before = marks()
        with jax.enable_x64(True):
            assert not before & marks()


def test_programs_under_a_mesh_differ_by_gpu() -> None:
    with target_arch("sm_80"):
        before = cuda_text({})
    with target_arch("sm_90a"):
        assert cuda_text({}) != before
    # A process without a GPU lowers for a CPU all the same.
    assert ffi.process_fingerprint()[3] is None or jax.devices("cuda")


def test_a_program_for_one_device_is_not_marked() -> None:
    _, whole = split_input()
    run = function({"is_causal": True}, differentiated=True)
    text = jax.jit(run).lower(whole).as_text()
    assert "frontend_attributes" not in text
