# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`jax.default_matmul_precision`, as it is where a call is traced, chooses how float32 is multiplied."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention, explain, ring_attention
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.arguments.precision import PRECISIONS, PRODUCTS_IN_WORDS, forbids_tf32, products_of
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.key import Products
from jax_fastattn.ops.cuda.split import side_by_side
from jax_fastattn.spec import Problem

X = jax.ShapeDtypeStruct((2, 129, 3, 40), jnp.float32)
# What JAX can be set to, and how kernels then multiply float32; None if they do not.
SETTINGS: dict[str | None, Products | None] = {
    None: "bf16x3",
    "default": "bf16x3",
    "high": "bf16x3",
    "tensorfloat32": "half",
    "bfloat16": "half",
    "TF32_TF32_F32": "half",
    "BF16_BF16_F32": "half",
    "BF16_BF16_BF16": "half",
    "BF16_BF16_F32_X3": "bf16x3",
    "F16_F16_F16": "half",
    "F16_F16_F32": "half",
    "highest": None,
    "float32": None,
    "F32_F32_F32": None,
    "TF32_TF32_F32_X3": None,
    "BF16_BF16_F32_X6": None,
    "BF16_BF16_F32_X9": None,
}


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process believes to have an H100."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    forbids_tf32.cache_clear()
    yield
    forbids_tf32.cache_clear()


def test_the_table_has_every_setting_once() -> None:
    assert {name or "default": products for name, products in SETTINGS.items() if products} == PRECISIONS


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_chooses(setting: str | None) -> None:
    with jax.default_matmul_precision(setting):
        found = explain(X, X, X)
    products = SETTINGS[setting]
    if products is not None:
        assert found.kernel == "sm90 forward, sm90 backward"
        rule = f'`jax.default_matmul_precision` is "{setting or "default"}"'
        assert found.variant is not None and found.variant.endswith(f"; {PRODUCTS_IN_WORDS[products]}, since {rule}")
    else:
        assert found.implementation == "xla"
        kinds = " or ".join(PRODUCTS_IN_WORDS.values())
        assert found.reasons[0] == (
            f'the precision of float32 products is "{setting}", since `jax.default_matmul_precision` is "{setting}"; '
            f"the kernels have {kinds}"
        )
        assert "set `jax.default_matmul_precision`" in found.advice


@pytest.mark.usefixtures("_gpu")
def test_wide_heads_take_the_portable_kernels() -> None:
    x = jax.ShapeDtypeStruct((2, 129, 3, 136), jnp.float32)
    found = explain(x, x, x)
    assert found.kernel == "sm80 forward, sm80 backward"
    assert "the call takes portable kernels" in found.note and "head dims over 128" in found.note


@pytest.mark.usefixtures("_gpu")
def test_16_bits_follow_no_setting() -> None:
    x = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        assert explain(x, x, x).kernel == "sm90 forward, sm90 backward"
    assert products_of("float16", "highest") == "native" and products_of("float64", "default") is None


def test_the_tanh_of_a_function_is_exact_in_three_products() -> None:
    """The rough one has the mantissa of bfloat16. Both passes have the same one."""
    for dtype, is_exact in ((jnp.float32, True), (jnp.bfloat16, False)):
        x = jnp.zeros(X.shape, dtype)
        problem = Problem.of(*canonicalize(x, x, x, score_mod=lambda s, b, h, q, k: 5.0 * jnp.tanh(s / 5.0)))
        for op in ("forward", "backward"):
            kernel = kernel_spec(problem, op, "sm_90a")
            (function,) = kernel.features
            assert kernel.family == "sm90" and function.constants[0].exact == is_exact, kernel


def test_the_gradient_of_a_bias_has_three_products() -> None:
    """It may add up heads, whose powers of two differ."""
    assert products_of("float32", "tensorfloat32", takes_terms=True) == "bf16x3"
    assert products_of("float32", "highest", takes_terms=True) is None


@pytest.mark.usefixtures("_gpu")
def test_dropout_keeps_one_product() -> None:
    x = jax.ShapeDtypeStruct(X.shape, jnp.float32)
    with jax.default_matmul_precision("tensorfloat32"):
        found = explain(x, x, x, dropout_rate=0.1, dropout_key=jax.random.key(0))
        assert found.kernel == "sm90 forward, sm90 backward"


@pytest.mark.usefixtures("_gpu")
def test_a_call_follows_the_setting_of_its_trace() -> None:
    """The gradient has the products of the call, whatever is set where it is taken."""

    def program(setting: str, **options: Any) -> str:
        def loss(x: jax.Array) -> jax.Array:
            with jax.default_matmul_precision(setting):
                return attention(x, x, x, **options).sum()

        with jax.default_matmul_precision("highest" if setting == "high" else "high"):
            return calls.cuda_text(jax.grad(loss), X)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calls.count_launches(program("high")) == 2
        assert calls.count_launches(program("highest")) == 0
    with pytest.raises(NotImplementedError, match='the precision of float32 products is "highest"'):
        program("highest", implementation="cuda")


@pytest.mark.usefixtures("_gpu", "no_tf32")
def test_an_environment_without_tf32_counts_as_highest() -> None:
    found = explain(X, X, X)
    rule = "since NVIDIA_TF32_OVERRIDE is 0 in the environment"
    assert found.reasons[0].startswith(f'the precision of float32 products is "highest", {rule}; ')
    assert "(unset NVIDIA_TF32_OVERRIDE, or cast query, key and value to bfloat16)" in str(found)


@pytest.mark.usefixtures("_gpu")
def test_operands_are_split_and_padded_once() -> None:
    """Head dim 40 becomes 64, in two terms; results are float32."""
    text = calls.cuda_text(lambda x: attention(x, x, x), X)
    (launch,) = [line for line in text.splitlines() if "stablehlo.custom_call @jax_fastattn_launch" in line]
    operands, _, results = launch.partition("->")
    assert operands.count("tensor<2x129x3x128xbf16>") == 3
    assert "tensor<2x129x3x64xf32>" in results and "bf16" not in results


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("name", ["heads", "ring"])
def test_devices_of_a_mesh_split_their_operands(name: str) -> None:
    """Both passes, with heads or rows on two devices each. A device that lacks a neighbor's keys receives float32."""
    x = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.float32)
    axes = P(None, None, "x") if name == "heads" else P(None, "x")

    def share(x: jax.Array) -> jax.Array:
        if name == "heads":
            return attention(x, x, x, is_causal=True)
        return ring_attention(x, x, x, axis_name="x", is_causal=True)

    def loss(x: jax.Array) -> jax.Array:
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        return jax.shard_map(share, mesh=mesh, in_specs=axes, out_specs=axes)(x).sum()

    text = calls.cuda_text(jax.grad(loss), x)
    launches = [line for line in text.splitlines() if "stablehlo.custom_call @jax_fastattn_launch" in line]
    kernels = [line for line in launches if "x128xbf16>" in line]
    assert len(kernels) >= 2
    assert all("x64xf32>" in line.partition("->")[2] for line in kernels)
    assert all("bf16" not in line for line in text.splitlines() if "collective_permute" in line)


@pytest.mark.usefixtures("_gpu")
def test_operands_become_float16_and_results_stay_float32() -> None:
    """Delta is an operand of the backward launch; no array of pairs is made."""
    with jax.default_matmul_precision("tensorfloat32"):
        text = calls.cuda_text(jax.grad(lambda x: attention(x, x, x, is_causal=True).sum()), X)
    launches = [line for line in text.splitlines() if "stablehlo.custom_call @jax_fastattn_launch" in line]
    operands, results = zip(*(line.split("->") for line in launches), strict=True)
    assert [x.count("tensor<2x129x3x64xf16>") for x in operands] == [3, 4]
    assert operands[1].count("tensor<2x129x3xf32>") == 2
    assert all("tensor<2x129x3x64xf32>" in x and "f16" not in x for x in results)
    assert "129x129" not in text


def test_terms_add_up() -> None:
    """To 16 bits, in a program that XLA has simplified; infinities stay."""
    x = jnp.array([1.0, -1 / 3, 1e-30, 3e38, 257.0, jnp.inf, -jnp.inf, 0.0])
    high, low = jnp.split(jax.jit(side_by_side)(x).astype(jnp.float32), 2)
    assert (jnp.abs(high[:5] + low[:5] - x[:5]) <= 2.0**-16 * jnp.abs(x[:5])).all()
    assert (high[5:] == x[5:]).all() and not low[5:].any()
    assert low[1] != 0 and low[4] == 1.0


def test_eager_calls_under_two_settings_are_two_programs() -> None:
    x = jnp.linspace(0, 1, 2 * 5 * 3 * 8).reshape(2, 5, 3, 8)
    texts = []
    for setting in ("default", "highest"):
        with jax.default_matmul_precision(setting):
            attention(x, x, x)
            texts.append(str(jax.make_jaxpr(attention)(x, x, x)))
    assert "precision='default'" in texts[0] and "precision='highest'" in texts[1]
