# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of a bias of every shape, from canonical operands to results, with emulated custom calls."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import calls
import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
import test_bias_ops
from testing.poison import poison

from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda.launch import launch_p
from jax_fastattn.spec import Operands
from jax_fastattn.xla import passes as xla

pytestmark = pytest.mark.slow

B, T, S, N, K = 2, 70, 141, 4, 2
SIZES = {"b": B, "n": N, "t": T, "s": S}
# Of a bias of rows two will do: without a soft cap backward kernels do not read it.
SHAPES = [*(axes + "s" for axes in ("", "b", "n", "bn", "t", "bt", "nt", "bnt")), "", "bnt"]

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
    "nt-cap-mask": {"bias": "nt", "logits_soft_cap": 2.0, "mask": (B, 1, 1, S)},
    # Far below the cap the gradient is smaller than the rounding of the output.
    "nt-cap50-dlse": {"bias": "nt", "logits_soft_cap": 50.0, "dlse": True},
    "bt-cap50-sinks": {"bias": "bt", "logits_soft_cap": 50.0, "sinks": True},
    "-cap-sinks": {"bias": "", "logits_soft_cap": 2.0, "sinks": True, "dlse": True},
    "nts-float32": {"bias": "nts", "bias_dtype": "float32", "is_causal": True},
    "bnts-d40v256": {"bias": "bnts", "head_dim": 40, "v_head_dim": 256},
}


def draw(case: dict[str, Any]) -> tuple[Any, Operands, jax.Array | None]:
    """Returns specification, canonical operands, and the cotangent of log-sum-exps if there is one."""
    case, axes = dict(case), case["bias"]
    shape = tuple(size if axis in axes else 1 for axis, size in SIZES.items())
    dlse = case.pop("dlse", False)
    case |= {"bias": shape, "size": 2.0, "holes": 0.1 if {"t", "s"} <= {*axes} else 0.0}
    spec, operands = test_bias_ops.draw(case, (B, T, S, N, K))
    given = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, N)), jnp.float32)
    return spec, operands, given if dlse else None


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_ops.emulate(monkeypatch)


@pytest.mark.parametrize("name", ["nts-mask", "nt-cap-mask", "nt-cap50-dlse"])
def test_portable_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No query differs from another by the mask: lists of tiles of queries are one row, those of keys are not."""
    emulated_ops.emulate(monkeypatch, "sm_80")
    emulated_ops.compare_with_reference(*draw(CASES[name]))


@pytest.mark.parametrize("axes", SHAPES)
def test_every_shape(axes: str) -> None:
    emulated_ops.compare_with_reference(*draw({"bias": axes}))


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_the_reference(name: str) -> None:
    emulated_ops.compare_with_reference(*draw(CASES[name]))


def test_cotangents_of_rows_that_see_nothing_add_nothing_to_a_capped_bias() -> None:
    case = {"bias": "nt", "logits_soft_cap": 2.0, "dlse": True, "is_causal": True, "query_offset": (-30, 100)}
    emulated_ops.compare_with_reference(*draw(case))


@pytest.mark.parametrize("name", ["nt-cap50-dlse", "-cap-sinks"])
def test_parts_of_the_keys_add_up(name: str) -> None:
    """As blocks of a ring, which have no sinks: the delta of a row is that of all keys."""
    spec, operands, dlse = draw(CASES[name])
    dout = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, N, operands.value.shape[3])), jnp.bfloat16)
    out, lse = calls.quick_jit(functools.partial(xla.forward, spec))(operands)
    wanted = calls.quick_jit(functools.partial(xla.backward, spec, wanted=["bias"]))(
        operands, out, lse, dout, dlse
    ).bias
    assert wanted is not None
    found = jnp.zeros_like(wanted)
    for keys in (slice(0, 64), slice(64, S)):
        part = operands._replace(key=operands.key[:, keys], value=operands.value[:, keys], sinks=None)
        of_part = replace(spec, is_part=True, present=part.present())
        share = cuda.backward(of_part, part, out, lse, dout, dlse, ["bias"]).bias
        assert share is not None
        found = found + share
    np.testing.assert_allclose(found, wanted, atol=2**-7 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize(
    ("arch", "axes", "head_dim"),
    [
        ("sm_90a", "bnts", 64),
        ("sm_90a", "bnts", 192),
        ("sm_90a", "s", 64),
        ("sm_90a", "t", 64),
        ("sm_80", "bnts", 64),
    ],
)
def test_rows_of_vague_log_sum_exps(arch: str, axes: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights cannot be told from log-sum-exps of 2^20, which float32 rounds to 1/8.

    A row of far negative logits gets no gradient, as if it saw no key. One of large logits gets NaN, not a wrong one.
    """
    emulated_ops.emulate(monkeypatch, arch)
    spec, operands, _ = draw({"bias": axes, "head_dim": head_dim})
    dout = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, N, head_dim)), jnp.bfloat16)
    out, lse = calls.quick_jit(functools.partial(xla.forward, spec))(operands)
    spoiled: dict[str, Any] = {"query": np.s_[1, 20:50], "key": 1, "value": 1}
    spoiled |= {"bias": np.s_[1, :, 20:50]} if axes == "bnts" else {}
    gradients = calls.quick_jit(functools.partial(xla.backward, spec, wanted=spoiled))
    wanted = gradients(operands, out, lse, dout.at[:, 20:50].set(0.0), None)
    lse = lse.at[0, 20:50].set(-(2.0**20)).at[1, 20:50].set(2.0**20)
    found = cuda.backward(spec, operands, out, lse, dout, None, spoiled)
    for name, where in spoiled.items():
        got, expected = (np.array(getattr(x, name), np.float32) for x in (found, wanted))
        expected[where] = np.nan
        np.testing.assert_allclose(got, expected, atol=2**-6 * np.nanmax(np.abs(expected)), err_msg=name)


@pytest.mark.parametrize(
    ("arch", "axes", "head_dim", "step"),
    [
        ("sm_90a", "bnt", 64, 0.0),
        pytest.param("sm_90a", "bnt", 64, 1.0, marks=pytest.mark.whole),
        pytest.param("sm_90a", "bnts", 64, 1.0, marks=pytest.mark.whole),
        pytest.param("sm_80", "bnts", 128, 1.0, marks=pytest.mark.whole),
    ],
)
def test_rows_that_see_no_key_of_a_call_with_sinks(
    arch: str, axes: str, head_dim: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their log-sum-exp is the sink, up to rounding, and NaN in them reaches nothing; nor is a live row taken for one.

    On an H100 a log-sum-exp lay one rounding above its sink.
    """
    emulated_ops.emulate(monkeypatch, arch)
    case = {"bias": axes, "sinks": True, "is_causal": True, "query_offset": (-30, 100), "head_dim": head_dim}
    spec, operands, _ = draw(case)
    assert operands.sinks is not None and operands.bias is not None
    operands = operands._replace(bias=operands.bias.at[1, :, :10].set(-40.0))  # a visible row whose sink is all
    dout = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, N, head_dim)), jnp.bfloat16)
    out, lse = calls.quick_jit(functools.partial(xla.forward, spec))(operands)
    names = ("query", "key", "value", "bias", "sinks")
    wanted = calls.quick_jit(functools.partial(xla.backward, spec, wanted=names))(operands, out, lse, dout, None)
    sinks = operands.sinks.astype(jnp.float32)
    lse = lse.at[0, :30].set(jnp.nextafter(sinks, sinks + step))
    hidden, dout, _ = poison(spec, operands, dout)
    found = cuda.backward(spec, hidden, out, lse, dout, None, names)
    for name in names:
        got, expected = (np.asarray(getattr(x, name), np.float32) for x in (found, wanted))
        np.testing.assert_allclose(got, expected, atol=2**-6 * np.abs(expected).max(), err_msg=name)
        if name == "query":
            np.testing.assert_allclose(got[1, :10], expected[1, :10], atol=2**-6 * np.abs(expected[1, :10]).max())


@pytest.mark.parametrize(
    ("axes", "cap", "written"),
    [("nts", None, {"dbias"}), ("bs", None, {"dkey_bias"}), ("bt", None, set()), ("bt", 2.0, {"dbias"})],
    ids=["matrix", "keys", "rows", "capped rows"],
)
def test_a_launch_computes_the_gradient_if_it_is_wanted(
    axes: str, cap: float | None, written: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, operands, _ = draw({"bias": axes, "logits_soft_cap": cap})
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
