# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Lowering for CUDA in a process without a GPU: one compact custom call, and no compilation for new sizes."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import sys
import zlib
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import stand_in
from stand_in import FLOATS, INTS, SPEC

import jax_fastattn
from jax_fastattn import ffi
from jax_fastattn.compilation import cache, libraries
from jax_fastattn.ffi import call, registry
from jax_fastattn.limits import UNBOUNDED


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    stand_in.stand_in_compiler(monkeypatch)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The specs that were compiled."""
    specs = []

    class Compiler:
        @staticmethod
        def compile_kernel(spec: Any) -> bytes:
            specs.append(spec)
            return stand_in.elf_object()

    monkeypatch.undo()
    monkeypatch.setattr(call, "_kernels", {})
    monkeypatch.setattr(libraries, "compiler_version", lambda: "4.8.1")
    monkeypatch.setattr(libraries, "is_installed", lambda module: True)
    monkeypatch.setitem(sys.modules, "jax_fastattn.compilation.compiler", Compiler)
    monkeypatch.setattr("jax_fastattn.compilation.compiler", Compiler, raising=False)
    return specs


def lower(function: Any, *arrays: Any) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_one_custom_call_with_everything_a_launch_needs() -> None:
    text = lower(lambda *arrays: stand_in.launch(*arrays), *stand_in.operands())
    assert text.count("stablehlo.custom_call @jax_fastattn_launch") == 1
    assert "has_side_effect" not in text
    assert f"ints = array<i32: {', '.join(map(str, INTS))}>" in text
    assert "floats = array<f32: 1.250000e-01, 3.000000e+01>" in text
    assert 'arch = "sm_90a"' in text
    assert "num_buffers = 6 : i32" in text
    assert "result_layouts = [dense<[3, 2, 1, 0]> : tensor<4xindex>, dense<[2, 1, 0]> : tensor<3xindex>]" in text
    kernel = zlib.decompress(base64.b64decode(text.split('object = "')[1].split('"')[0]))
    assert kernel == call._compile(SPEC)
    assert f'digest = "{hashlib.sha256(kernel).hexdigest()}"' in text
    assert f"object_size = {len(kernel)} : i32" in text


@pytest.mark.parametrize(("version", "count"), [("0.11.1", 0), ("0.11.2", 1), ("0.12.0", 0)])
def test_results_come_out_of_a_barrier(version: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both results of the launch out of one barrier, with the version of XLA that fuses updates wrongly."""
    monkeypatch.setattr("jaxlib.version.__version__", version)
    text = lower(lambda *arrays: stand_in.launch(*arrays), *stand_in.operands())
    assert text.count("stablehlo.optimization_barrier") == count
    assert text.count("stablehlo.optimization_barrier %0#0, %0#1 :") == count


def test_identical_launches_carry_their_kernel_once() -> None:
    def layers(query: Any, *others: Any) -> Any:
        key, _, lengths = others
        for _ in range(5):
            query, _ = stand_in.launch(query, key, key, lengths, spec=dataclasses.replace(SPEC, v_head_dim=64))
        return query

    text = lower(layers, *stand_in.operands())
    assert text.count("custom_call @jax_fastattn_launch") == 1
    assert text.count("call @launch(") == 5


def test_new_sizes_and_scalars_compile_nothing(compiled: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    before = ffi.compile_count()
    calls = {
        "first": (INTS, FLOATS),
        "batch size": ((3, *INTS[1:]), FLOATS),
        "query length": ((2, 64, *INTS[2:]), FLOATS),
        "key length": ((2, 193, 1000, *INTS[3:]), FLOATS),
        "heads": ((2, 193, 257, 8, *INTS[4:]), FLOATS),
        "window": ((2, 193, 257, 4, 17, UNBOUNDED, 0), FLOATS),
        "scale": (INTS, (0.5, 30.0)),
        "cap": (INTS, (0.125, 50.0)),
    }
    texts = set()
    for ints, floats in calls.values():
        arrays = stand_in.operands(ints[0], ints[1], ints[2])
        texts.add(lower(lambda *xs, i=ints, f=floats: stand_in.launch(*xs, ints=i, floats=f), *arrays))
    assert len(texts) == len(calls)
    assert ffi.compile_count() == before + 1
    assert compiled == [SPEC]
    lower(lambda *xs: stand_in.launch(*xs, spec=dataclasses.replace(SPEC, arch="sm_80")), *stand_in.operands())
    assert ffi.compile_count() == before + 2


def test_a_kernel_on_disk_is_not_compiled(compiled: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    texts = []
    for _ in range(2):
        monkeypatch.setattr(call, "_kernels", {})  # as in a new process
        texts.append(lower(lambda *xs: stand_in.launch(*xs), *stand_in.operands()))
    assert compiled == [SPEC]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_entry_is_rebuilt(compiled: list[Any], tmp_path: Path, monkeypatch: Any, damage: str) -> None:
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    good = lower(lambda *xs: stand_in.launch(*xs), *stand_in.operands())
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:100] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setattr(call, "_kernels", {})
    assert lower(lambda *xs: stand_in.launch(*xs), *stand_in.operands()) == good
    assert len(compiled) == 2
    assert path.read_bytes() == content


@pytest.mark.parametrize("has_home", [True, False], ids=["unwritable", "no-home"])
def test_an_unwritable_directory_still_works(
    compiled: list[Any], tmp_path: Path, monkeypatch: Any, has_home: bool
) -> None:
    """Nor is a home directory needed, as in a container with an arbitrary user id."""

    def no_entry(*_: object) -> None:
        raise KeyError

    (tmp_path / "file").write_text("in the way")
    if has_home:
        monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path / "file" / "lowering"))
    else:
        for name in ("JAX_FASTATTN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", no_entry)
    cache._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="Cannot write compiled kernels"):
        text = lower(lambda *xs: stand_in.launch(*xs), *stand_in.operands())
    assert "custom_call @jax_fastattn_launch" in text
    assert compiled == [SPEC]


def test_a_failed_compilation_is_not_remembered(compiled: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))

    def fail(spec: Any) -> bytes:
        raise RuntimeError("ptxas")

    with monkeypatch.context() as patch:
        patch.setattr("jax_fastattn.compilation.compiler.compile_kernel", fail)
        before = ffi.compile_count()
        with pytest.raises(RuntimeError, match="ptxas"):
            lower(lambda *xs: stand_in.launch(*xs), *stand_in.operands())
    assert ffi.compile_count() == before
    lower(lambda *xs: stand_in.launch(*xs), *stand_in.operands())
    assert ffi.compile_count() == before + 1


def test_wrong_number_of_operands() -> None:
    message = r"forward kernel takes 6 buffers \(query, key, value, key_value_seq_lengths, out, lse\); found 3 operands"
    with pytest.raises(ValueError, match=message):
        lower(lambda *xs: stand_in.launch(*xs[:3]), *stand_in.operands())


def test_wrong_dtype() -> None:
    """The kernel would read other numbers."""
    query, *others = stand_in.operands()
    with pytest.raises(ValueError, match="the forward kernel takes `query` in bfloat16; found float16"):
        lower(lambda *xs: stand_in.launch(*xs), query.astype(jnp.float16), *others)


def test_attention_compiles_once_for_all_sizes_windows_and_caps(
    compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the public function, with its gradient: two kernels, whatever is not in the compile key."""
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(registry, "named_arch", lambda: "sm_90a")
    base = {
        "batch": 2,
        "query_length": 193,
        "key_length": 257,
        "heads": 8,
        "window": (17, 5),
        "cap": 30.0,
        "scale": 0.1,
    }
    changes = [
        {},
        {"batch": 3},
        {"query_length": 100},
        {"key_length": 1000},
        {"heads": 4},
        {"window": (3, 0)},
        {"cap": 50.0},
        {"scale": 0.2},
    ]
    before = ffi.compile_count()
    for change in changes:
        sizes = base | change
        query = jnp.ones((sizes["batch"], sizes["query_length"], sizes["heads"], 64), jnp.bfloat16)
        key = jnp.ones((sizes["batch"], sizes["key_length"], sizes["heads"] // 2, 64), jnp.bfloat16)
        static = {
            "local_window_size": sizes["window"],
            "logits_soft_cap": sizes["cap"],
            "scale": sizes["scale"],
            "implementation": "cuda",
        }

        def loss(q: Any, k: Any, static: dict[str, Any] = static) -> Any:
            return jax_fastattn.attention(q, k, k, **static).astype(jnp.float32).sum()

        text = lower(jax.grad(loss, (0, 1)), query, key)
        assert text.count("custom_call @jax_fastattn_launch") == 2
    assert ffi.compile_count() == before + 2
    assert sorted(spec.op for spec in compiled) == ["backward", "forward"]


def test_layers_share_one_forward_and_one_backward(
    compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(registry, "named_arch", lambda: "sm_90a")

    def loss(x: Any) -> Any:
        for _ in range(48):
            x = x + jax_fastattn.attention(x, x, x, is_causal=True, implementation="cuda")
        return x.astype(jnp.float32).sum()

    text = lower(jax.grad(loss), jnp.ones((2, 193, 4, 64), jnp.bfloat16))
    assert text.count("custom_call @jax_fastattn_launch") == 2
    assert calls.count_launches(text) == 96
