# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What lowering for CUDA gives, in a process without a GPU: one custom call forward, one backward, nothing around."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import inspect
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import calls
import flax.linen
import jax
import jax.numpy as jnp
import pytest

with warnings.catch_warnings():
    # flax 0.12.0 looks up two names while it is imported that jax 0.8.0 deprecates.
    warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
    from flax import nnx

from jax_fastattn import attention, attention_varlen, explain, ffi, target_arch
from jax_fastattn.cases.case import Case
from jax_fastattn.compilation import libraries
from jax_fastattn.ffi import call
from jax_fastattn.integrations import jax_nn
from jax_fastattn.integrations.flax import attention_fn
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.ops import dispatch

BASE = Case(dtype="bfloat16", query_length=129, key_length=193, num_kv_heads=3, group=2, head_dim=32, v_head_dim=40)

# Operations that move data.
MOVES = (
    "transpose",
    "pad",
    "concatenate",
    "gather",
    "slice",
    "dynamic_slice",
    "copy",
    "scatter",
    "dynamic_update_slice",
)


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)


def moves(text: str) -> list[str]:
    """The operations of a program that move data."""
    return [name for name in re.findall(r"stablehlo\.(\w+)", text) if name in MOVES]


def both_passes(case: Case) -> tuple[str, str]:
    """StableHLO of the forward pass, and of both passes."""
    spec = case.spec()
    abstract = jax.eval_shape(
        lambda: (calls.arrays_of(case.operands(jax.random.key(0))), case.cotangents(jax.random.key(0)))
    )
    names = [name for name in calls.DIFFERENTIABLE if name in abstract[0]]

    def forward(arrays: calls.Arrays, with_lse: bool = False) -> Any:
        return attention(**arrays, **calls.options_of(spec), implementation="cuda", return_residual=with_lse)

    def backward(arrays: calls.Arrays, cotangents: Any) -> Any:
        def of_wanted(wanted: calls.Arrays) -> Any:
            return forward(arrays | wanted, case.dlse)

        _, vjp = jax.vjp(of_wanted, {name: arrays[name] for name in names})
        return vjp(cotangents if case.dlse else cotangents[0])

    return calls.cuda_text(forward, abstract[0]), calls.cuda_text(backward, *abstract)


SUPPORTED = {
    "plain": {},
    "causal": {"is_causal": True},
    "float16": {"dtype": "float16"},
    "window-cap": {"window": (64, 3), "logits_soft_cap": 30.0},
    "lengths": {"query_seq_lengths": (100, 129), "key_value_seq_lengths": (193, 7)},
    "offset": {"query_offset": (64, 3), "is_causal": True},
    "mha": {"group": 1},
    "one-kv-head": {"num_kv_heads": 1, "group": 7},
    "dlse": {"dlse": True},
}


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("name", SUPPORTED)
def test_one_custom_call_in_each_pass_and_nothing_around(name: str) -> None:
    forward, both = both_passes(dataclasses.replace(BASE, **SUPPORTED[name]))
    assert (forward.count("stablehlo.custom_call"), calls.count_launches(forward), moves(forward)) == (1, 1, [])
    assert (both.count("stablehlo.custom_call"), calls.count_launches(both), moves(both)) == (2, 2, [])


@pytest.mark.usefixtures("_cuda")
def test_gradient_of_sinks_moves_statistics_only() -> None:
    forward, both = both_passes(dataclasses.replace(BASE, sinks="n"))
    assert (calls.count_launches(forward), moves(forward), calls.count_launches(both)) == (1, [], 2)
    assert "x32x" not in "".join(line for line in both.splitlines() if moves(line))


@pytest.mark.usefixtures("_cuda")
def test_head_dims_that_no_kernel_takes_are_padded() -> None:
    """Also shows that the tests above can fail."""
    forward, both = both_passes(dataclasses.replace(BASE, head_dim=20, v_head_dim=20))
    assert (forward.count("stablehlo.custom_call"), both.count("stablehlo.custom_call")) == (1, 2)
    assert set(moves(forward)) == {"pad", "slice"}
    assert set(moves(both)) == {"pad", "slice"}


@pytest.mark.usefixtures("_cuda")
def test_unbatched_and_vmapped_are_one_custom_call() -> None:
    query, key, value = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in BASE.operands(jax.random.key(0))[:3])
    text = calls.cuda_text(jax.vmap(attention), query, key, value)
    assert (calls.count_launches(text), moves(text)) == (1, [])
    several = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in (query, key, value)]
    text = calls.cuda_text(jax.vmap(attention), *several)
    assert (calls.count_launches(text), moves(text)) == (1, [])
    assert "tensor<10x129x6x32xbf16>" in text


@pytest.mark.usefixtures("_cuda")
def test_layers_share_one_kernel() -> None:
    def model(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = attention(x, x, x)
        return x.astype(jnp.float32).sum()

    text = calls.cuda_text(jax.grad(model), jax.ShapeDtypeStruct((2, 129, 6, 32), jnp.bfloat16))
    assert calls.count_launches(text) == 6
    assert text.count("stablehlo.custom_call") == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("length", [512, 4096])
def test_layers_share_one_xla_path(dtype: Any, length: int) -> None:
    """24 layers had 282 to 1315 kB of StableHLO, where `jax.nn` has about 200."""

    def model(x: jax.Array) -> jax.Array:
        for _ in range(24):
            x = attention(x, x, x, is_causal=True, implementation="xla")
        return x.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(model)).trace(jax.ShapeDtypeStruct((4, length, 16, 64), dtype))
    for platform in ("cpu", "cuda"):
        assert len(traced.lower(lowering_platforms=(platform,)).as_text()) < 300e3


@pytest.mark.usefixtures("_cuda")
def test_nothing_to_compute_launches_nothing() -> None:
    query, key = jnp.zeros((2, 0, 6, 32), jnp.bfloat16), jnp.zeros((2, 193, 3, 32), jnp.bfloat16)
    assert "custom_call" not in calls.cuda_text(attention, query, key, key)
    assert "custom_call" not in calls.cuda_text(attention, key, query[:, :, :3], query[:, :, :3])


@pytest.mark.usefixtures("_cuda")
def test_the_xla_path_on_request() -> None:
    arrays = BASE.operands(jax.random.key(0))[:3]
    assert "custom_call" not in calls.cuda_text(lambda *x: attention(*x, implementation="xla"), *arrays)


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_the_xla_path_of_a_gpu_multiplies_16_bits_without_workarounds(dtype: str, name: str) -> None:
    """By the GPU's own products with a float32 result. The workarounds for XLA:CPU stay there."""
    x = jax.ShapeDtypeStruct((2, 129, 3, 32), dtype)
    loss = lambda *qkv: attention(*qkv, implementation="xla").astype(jnp.float32).sum()
    text = calls.cuda_text(jax.value_and_grad(loss, argnums=(0, 1, 2)), x, x, x)
    types = re.findall(r"stablehlo\.dot_general.* : \((.*)\) -> (.*)", text)
    found = [tuple(re.findall(r"x([a-z]+\d+)>", operands + result)) for operands, result in types]
    assert found == [(name, name, "f32")] * 7
    # One barrier keeps the rounded dS from being computed once more for each of its uses.
    assert re.findall(r"optimization_barrier .* : tensor<(\S+)>", text) == [f"2x3x1x129x129x{name}"]


def line_of(function: Any, text: str) -> int:
    """The line of this file with `text` in a function."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.usefixtures("_cuda")
def test_a_fallback_warns_once_with_its_reasons() -> None:
    query = key = value = jnp.zeros((2, 5, 3, 264), jnp.bfloat16)

    def model(*arrays: jax.Array) -> jax.Array:
        return jax.vmap(jax.checkpoint(attention))(*(x[:, None] for x in arrays))

    site = f"{__file__}:{line_of(test_a_fallback_warns_once_with_its_reasons, 'jax.vmap')}"
    text = (
        rf"takes the XLA path for the call at {re.escape(site)}: `query` has head dim 264; the kernels take at most "
        r"256; `value` has head dim 264; the kernels take at most 256\. Pass implementation"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        assert "custom_call" not in calls.cuda_text(model, query, key, value)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls.cuda_text(attention, query[:1], key[:1], value[:1])
        calls.cuda_text(lambda *x: attention(*x, implementation="xla"), query, key, value)
    with pytest.warns(UserWarning, match="head dim 272"):
        wide = jnp.zeros((2, 5, 3, 272), jnp.bfloat16)
        calls.cuda_text(attention, wide, wide, wide)


@pytest.mark.usefixtures("_cuda")
def test_a_fallback_says_what_to_do_instead() -> None:
    """And `explain` says the same."""
    query, key = jnp.zeros((2, 1, 3, 8)), jnp.zeros((2, 256, 3, 8))
    with pytest.warns(UserWarning, match="there are few queries in float32") as caught, target_arch("sm_80"):
        calls.cuda_text(attention, query, key, key)
        explained = str(explain(query, key, key))
    assert "cast query, key and value to bfloat16" in str(caught[0].message)
    assert explained.removeprefix("XLA path, because ") in str(caught[0].message)


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("shape", [(7,), (5, 1), (6, 5, 7), (2, 3, 1, 7)], ids=str)
def test_a_bias_runs_kernels(shape: tuple[int, ...], arch: str) -> None:
    """Of any rank, and in a dtype of its own."""
    query, key = jnp.zeros((2, 5, 6, 8), jnp.bfloat16), jnp.zeros((2, 7, 3, 8), jnp.bfloat16)
    for dtype in ("bfloat16", "float16", "float32"):
        attend = functools.partial(attention, implementation="cuda", bias=jnp.ones(shape, dtype))
        with target_arch(arch):
            text = calls.cuda_text(jax.grad(lambda *x, attend=attend: attend(*x).sum(), (0, 1, 2)), query, key, key)
        assert calls.count_launches(text) == 2


@pytest.mark.usefixtures("_cuda")
def test_the_gradient_of_a_bias_of_queries_runs_kernels_under_a_soft_cap() -> None:
    x, bias = jnp.zeros((2, 5, 3, 8), jnp.bfloat16), jnp.zeros((5, 1))
    capped = functools.partial(attention, logits_soft_cap=2.0, implementation="cuda")
    assert calls.count_launches(calls.cuda_text(jax.grad(lambda bias: capped(x, x, x, bias).sum()), bias)) == 2
    assert explain(x, x, x, bias, logits_soft_cap=2.0, arch="sm_90a").note == ""


def call_varlen(x: jax.Array) -> jax.Array:
    return attention_varlen(x, x, x, jnp.array([0, 2, 5]), jnp.array([0, 2, 5]))


def call_linen(x: jax.Array) -> jax.Array:
    layer = flax.linen.MultiHeadDotProductAttention(num_heads=3, attention_fn=attention_fn)
    return layer.init_with_output(jax.random.key(0), x)[0]


def call_nnx(x: jax.Array) -> jax.Array:
    layer = nnx.MultiHeadAttention(3, 792, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn)
    return nnx.jit(lambda layer, x: layer(x))(layer, x)


def call_jax_nn(x: jax.Array) -> jax.Array:
    with jax_nn.installed():
        return jax.nn.dot_product_attention(x, x, x)


CALLERS = {
    "attention_varlen": (call_varlen, "attention_varlen(", (5, 3, 264)),
    "linen": (call_linen, "init_with_output(", (2, 5, 792)),
    "nnx": (call_nnx, "lambda layer", (2, 5, 792)),
    "jax.nn": (call_jax_nn, "jax.nn.", (2, 5, 3, 264)),
}


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("name", CALLERS)
def test_a_fallback_names_the_line_of_the_user_not_of_a_library(name: str) -> None:
    caller, line, shape = CALLERS[name]
    site = f"{__file__}:{line_of(caller, line)}"
    with pytest.warns(UserWarning, match=f"for the call at {re.escape(site)}: `query` has head dim 264"):
        calls.cuda_text(caller, jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "option",
    [{"mask": jnp.ones((2, 1, 5, 7), bool)}, {"segment_ids": (jnp.zeros((2, 5), int), jnp.zeros((2, 7), int))}],
    ids=["mask", "segment-ids"],
)
def test_a_prepass_comes_before_the_kernel(option: dict[str, Any], arch: str) -> None:
    """It is a custom call of its own without side effects, so that XLA merges the equal ones of layers."""
    query, key = jnp.zeros((2, 5, 3, 64), jnp.bfloat16), jnp.zeros((2, 7, 3, 64), jnp.bfloat16)

    def layers(query: jax.Array, key: jax.Array) -> jax.Array:
        for _ in range(2):
            query = attention(query, key, key, implementation="cuda", **option)
        return query

    with target_arch(arch):
        text = calls.cuda_text(layers, query, key)
    # Two layers share the function of one, with the prepass and the kernel.
    assert text.count("stablehlo.custom_call @jax_fastattn_launch") == 2
    assert "has_side_effect" not in text


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("library", ["keras", "equinox", "equimo", "ejkernel"])
def test_a_fallback_passes_over_the_frames_of(library: str) -> None:
    """Some of these need not be installed: a function of a module of that name stands in."""
    module: dict[str, Any] = {"__name__": f"{library}.layers", "attention": attention}
    exec("def layer(x): return attention(x, x, x)", module)
    caller = lambda x: module["layer"](x)
    site = f"{__file__}:{line_of(test_a_fallback_passes_over_the_frames_of, 'caller = ')}"
    with pytest.warns(UserWarning, match=f"for the call at {re.escape(site)}: `query` has head dim 264"):
        calls.cuda_text(caller, jax.ShapeDtypeStruct((2, 5, 3, 264), jnp.float32))


@pytest.mark.usefixtures("_cuda")
def test_insisting_names_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (jnp.zeros(shape) for shape in ((2, 5, 6, 264), (2, 7, 3, 264), (2, 7, 3, 272)))

    def run(*arrays: jax.Array) -> jax.Array:
        return attention(*arrays, implementation="cuda")

    def reasons() -> list[str]:
        with pytest.raises(NotImplementedError) as caught, jax.default_matmul_precision("highest"):
            calls.cuda_text(run, query, key, value)
        first, *listed, last = str(caught.value).splitlines()
        assert first == 'implementation="cuda" cannot run this call:'
        assert last == "implementation=None falls back to the XLA path."
        return [line.removeprefix("  - ") for line in listed]

    problem = Case(query_length=5, key_length=7, group=2, head_dim=264, v_head_dim=272).problem()
    problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, precision="highest"))
    expected = unsupported_reasons(problem, "sm_90a")
    assert reasons() == [str(reason) for reason in expected]
    assert [reason.kind for reason in expected] == ["precision", "head_dim", "head_dim"]
    assert [bool(reason.remedy) for reason in expected] == [True, False, False]
    monkeypatch.setattr(ffi.registry, "named_arch", lambda: "sm_75")
    assert reasons() == [str(reason) for reason in unsupported_reasons(problem, "sm_75")]
    monkeypatch.setattr(libraries, "is_installed", lambda module: False)
    assert reasons() == ffi.missing_parts() + [str(reason) for reason in expected]


@pytest.mark.usefixtures("_cuda")
def test_the_backward_pass_falls_back_with_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.refuse_float32(monkeypatch)
    query, key, value = (x.astype(jnp.float32) for x in BASE.operands(jax.random.key(0))[:3])
    with pytest.warns(UserWarning, match="float32"):
        text = calls.cuda_text(jax.grad(lambda *x: attention(*x).sum()), query, key, value)
    assert "custom_call" not in text


@pytest.mark.usefixtures("_cuda")
def test_sinks_in_float64_reach_the_kernels_in_float32() -> None:
    """The kernels read their bytes as float32; and the gradient of sinks did not lower."""
    with jax.enable_x64(True):
        arrays = [jnp.ones((1, 5, 4, 8), jnp.bfloat16)] * 3 + [jnp.zeros(4)]

        def loss(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array) -> jax.Array:
            return attention(query, key, value, sinks=sinks).astype(jnp.float32).sum()

        text = calls.cuda_text(jax.grad(loss, (0, 3)), *arrays)
        assert jax.eval_shape(jax.grad(loss, 3), *arrays).dtype == jnp.float64
    launches = re.findall(r"custom_call @jax_fastattn_launch.*", text)
    # The bytes of a kernel, which a launch carries as text, may hold these letters too.
    assert len(launches) == 2 and not any(re.search(r"tensor<[^>]*f64", launch) for launch in launches)


@pytest.fixture
def export_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Exports one and the same function for an architecture, and returns those of the kernels in it."""
    calls.lower_for_cuda(monkeypatch, tmp_path, arch=None)
    query = jnp.ones((2, 129, 6, 64), jnp.bfloat16)
    checks = [jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET_NAME)]
    loss = jax.jit(jax.grad(lambda q: attention(q, q, q, implementation="cuda").astype(jnp.float32).sum()))

    def export(arch: str) -> list[str]:
        with target_arch(arch):
            exported = jax.export.export(loss, platforms=("cuda",), disabled_checks=checks)(query)
        return re.findall(r'arch = "(\w+)"', exported.mlir_module())

    return export


def test_exports_for_several_gpus_in_turn(export_for: Any) -> None:
    """Each holds the kernels of its own GPU, forward and backward, not those of the first one from a cache of JAX."""
    for arch in ("sm_80", "sm_90a", "sm_120a", "sm_80", "sm_90a", "sm_120a"):
        assert export_for(arch) == [arch] * 2


def test_exports_in_two_threads_at_the_same_time(export_for: Any) -> None:
    barrier = threading.Barrier(2)

    def exports(arch: str) -> list[list[str]]:
        with target_arch(arch):
            barrier.wait()  # both threads are inside now
            return [export_for(arch) for _ in range(2)]

    archs = ["sm_80", "sm_90a"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exports, archs)) == [[[arch] * 2] * 2 for arch in archs]


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is None, reason="nvidia-cutlass-dsl is not installed"
)
def test_new_sizes_windows_and_caps_compile_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(call, "_kernels", {})
    first = Case(dtype="bfloat16", num_kv_heads=2, group=3, head_dim=8, window=(5, 2), logits_soft_cap=3.0)
    changes = {
        "batch size": {"batch": 5},
        "query length": {"query_length": 70},
        "key length": {"key_length": 1000},
        "heads": {"num_kv_heads": 4},
        "window": {"window": (100, 0)},
        "cap": {"logits_soft_cap": 50.0},
        "scale": {"scale": 0.3},
    }
    with target_arch("sm_80"):
        before, texts = ffi.compile_count(), set()
        for change in [{}, *changes.values()]:
            texts.add(both_passes(dataclasses.replace(first, **change)))
            assert ffi.compile_count() == before + 2, change
        assert len(texts) == 1 + len(changes)
        monkeypatch.setattr(call, "_kernels", {})  # as in a new process: from disk
        both_passes(first)
        assert ffi.compile_count() == before + 2
        calls.cuda_text(attention, *(jnp.zeros((2, 5, 3, 16), jnp.bfloat16) for _ in range(3)))
        assert ffi.compile_count() == before + 3
    dispatch._warned.cache_clear()


@pytest.mark.usefixtures("_cuda")
def test_profiles_name_kernels_in_the_words_of_explain() -> None:
    """Both passes had one name, that of the custom call."""
    q, k, v = (jax.ShapeDtypeStruct((2, 192, heads, 64), jnp.bfloat16) for heads in (4, 2, 2))
    one, mask = jax.ShapeDtypeStruct((2, 1, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 1, 192, 192), bool)

    def names(function: Any, *arrays: Any) -> set[str]:
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
        return {*re.findall(r'loc\("jax_fastattn_(\w+)["/]', text)} - {"launch"}

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return attention(q, k, v, mask=mask).astype(jnp.float32).sum()

    assert names(jax.grad(loss), q, k, v, mask) == {"prepass", "sm90_forward", "sm90_backward"}
    assert names(attention, one, k, v) == {"sm90_decode"}
    assert str(explain(q, k, v, arch="sm_90a")).startswith("CUDA kernels sm90 forward, sm90 backward (")
