# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a bias of every shape, from canonical operands to results, with emulated custom calls of Hopper."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from emulated_launch import MULTIPROCESSORS

from jax_fastattn import ffi, portable
from jax_fastattn.canonical import canonicalize
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops import cuda
from jax_fastattn.ops.bias_gradient import lacks_kernel
from jax_fastattn.ops.launch import launch_p
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import QKV, Operands, Problem
from jax_fastattn.testing.poison import poison

pytestmark = pytest.mark.slow

B, T, S, N, K = 2, 70, 141, 4, 2
SIZES = {"b": B, "n": N, "t": T, "s": S}
SHAPES = ["".join(axes) for count in range(5) for axes in itertools.combinations("bnts", count)]

# The axes of a bias that are not broadcast, and other arguments.
CASES: dict[str, dict[str, Any]] = {
    "nts-mask": {"bias": "nts", "mask": (B, 1, 1, S)},
    "s-mask": {"bias": "s", "mask": (B, N, T, S)},
    "ts-lengths-sinks": {
        "bias": "ts",
        "sinks": True,
        "query_seq_lengths": (70, 40),
        "key_value_seq_lengths": (100, 141),
    },
    "t-sinks-dlse": {"bias": "t", "sinks": True, "dlse": True, "query_seq_lengths": (70, 40)},
    "bn-dlse": {"bias": "bn", "dlse": True},
    "nts-float32": {"bias": "nts", "bias_dtype": "float32", "is_causal": True},
    "bnts-d40v256": {"bias": "bnts", "head_dim": 40, "v_head_dim": 256},
}


def draw(case: dict[str, Any]) -> tuple[Any, Operands, jax.Array | None]:
    """Returns specification, canonical operands, and the cotangent of log-sum-exps if there is one."""
    random, case = np.random.default_rng(0), dict(case)
    head_dim = case.pop("head_dim", 64)
    v_head_dim = case.pop("v_head_dim", head_dim)
    shapes = ((B, T, N, head_dim), (B, S, K, head_dim), (B, S, K, v_head_dim))
    query, key, value = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    axes, dtype = case.pop("bias"), case.pop("bias_dtype", "bfloat16")
    bias = 2.0 * random.standard_normal(tuple(size if axis in axes else 1 for axis, size in SIZES.items()))
    if {"t", "s"} <= {*axes}:
        bias[random.random(bias.shape) < 0.1] = -np.inf
    case["bias"] = jnp.asarray(bias, dtype)
    if shape := case.pop("mask", None):
        case["mask"] = jnp.asarray(random.random(shape) < 0.6)
    if case.pop("sinks", False):
        case["sinks"] = jnp.asarray(random.standard_normal(N), jnp.float32)
    dlse = jnp.asarray(random.standard_normal((B, T, N)), jnp.float32) if case.pop("dlse", False) else None
    case = {name: jnp.asarray(x, jnp.int32) if name.endswith("lengths") else x for name, x in case.items()}
    return *canonicalize(query, key, value, **case), dlse


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffi, "arch", lambda: "sm_90a")
    monkeypatch.setattr(ffi, "multiprocessors", lambda: MULTIPROCESSORS)
    monkeypatch.setattr(launch_p, "bind", emulated_ops.bind)


def check(case: dict[str, Any]) -> None:
    """Compares all gradients of a call on poisoned operands with those of the float32 reference."""
    spec, operands, dlse = draw(case)
    random = np.random.default_rng(1)
    dout = jnp.asarray(random.standard_normal((B, T, N, operands.value.shape[3])), jnp.bfloat16)
    poisoned, poisoned_dout, *_ = poison(spec, operands, dout)
    names = ("query", "key", "value", "bias", *(["sinks"] if operands.sinks is not None else []))
    out, lse = cuda.forward(spec, poisoned)
    found = cuda.backward(spec, poisoned, out, lse, poisoned_dout, dlse, names)

    def loss(*given: jax.Array) -> jax.Array:
        results = attention_reference(spec, operands._replace(**dict(zip(names, given, strict=True))))
        total = (results[0] * dout.astype(jnp.float32)).sum()
        return total if dlse is None else total + jnp.where(jnp.isfinite(results[1]), results[1] * dlse, 0.0).sum()

    single = [getattr(operands, x).astype(jnp.float32) for x in names]
    wanted = jax.grad(loss, argnums=tuple(range(len(single))))(*single)
    for name, expected in zip(names, wanted, strict=True):
        got, expected = (np.asarray(x, np.float32) for x in (getattr(found, name), expected))
        assert got.shape == expected.shape, name
        np.testing.assert_allclose(got, expected, atol=2**-6 * np.abs(expected).max() + 1e-4, err_msg=name)


@pytest.mark.parametrize("axes", SHAPES)
def test_every_shape(axes: str) -> None:
    check({"bias": axes})


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize(("arch", "axes"), [("sm_90a", "nts"), ("sm_90a", "s"), ("sm_90a", "t"), ("sm_80", "nts")])
def test_rows_of_vague_log_sum_exps(arch: str, axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights cannot be told from log-sum-exps of 2^20, which float32 rounds to 1/8.

    A row of far negative logits gets no gradient, as if it saw no key. One of large logits gets NaN, not a wrong one.
    """
    monkeypatch.setattr(ffi, "arch", lambda: arch)
    spec, operands, _ = draw({"bias": axes})
    dout = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, N, 64)), jnp.bfloat16)
    out, lse = portable.forward(spec, operands)
    told = dout.at[:, 20:50].set(0.0)
    wanted = portable.backward(spec, operands, out, lse, told, None, QKV)
    lse = lse.at[0, 20:50].set(-(2.0**20)).at[1, 20:50].set(2.0**20)
    found = cuda.backward(spec, operands, out, lse, dout, None, QKV)
    for name in QKV:
        got, expected = (np.array(getattr(x, name), np.float32) for x in (found, wanted))
        expected[np.s_[1, 20:50] if name == "query" else 1] = np.nan
        np.testing.assert_allclose(got, expected, atol=2**-6 * np.nanmax(np.abs(expected)), err_msg=name)


def test_one_gradient_is_left_to_xla() -> None:
    """That of a bias of rows under a soft cap, if it is wanted."""

    def lacks(axes: str, names: tuple[str, ...], **case: Any) -> bool:
        spec, operands, _ = draw({"bias": axes, **case})
        return lacks_kernel(Problem.of(spec, operands), names)

    wanted = ("query", "key", "value", "bias")
    assert [lacks(axes, wanted, logits_soft_cap=2.0) for axes in ("bt", "n", "ts", "s")] == [True, True, False, False]
    assert not lacks("bt", wanted[:3], logits_soft_cap=2.0)
    assert not lacks("bt", wanted)


@pytest.mark.parametrize(
    ("axes", "written"), [("nts", {"dbias"}), ("bs", {"dkey_bias"}), ("bt", set())], ids=["matrix", "keys", "rows"]
)
def test_a_launch_computes_the_gradient_if_it_is_wanted(
    axes: str, written: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, operands, _ = draw({"bias": axes})
    launched: list[tuple[KernelSpec, int]] = []

    def bind(*_: jax.Array, kernel: KernelSpec, results: Any, **__: Any) -> list[jax.Array]:
        launched.append((kernel, len(results)))
        return [jnp.zeros(shape, dtype) for shape, dtype in results]

    monkeypatch.setattr(launch_p, "bind", bind)
    out, lse = jnp.zeros((B, T, N, 64), jnp.bfloat16), jnp.zeros((B, T, N))
    for names in (("query", "key", "value"), ("query", "key", "value", "bias")):
        found = cuda.backward(spec, operands, out, lse, out, None, names)
        assert (found.bias is not None) == ("bias" in names)
    (without, results), (kernel, more_results) = launched
    assert not without.dbias and kernel.dbias == bool(written)
    assert more_results - results == len(written)
