# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tangents of calls, from canonical operands to results, with emulated custom calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax.numpy as jnp
import numpy as np
from test_masks_ops import K, N, draw
from testing import tangents

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.canonical.packed import canonicalize as canonicalize_packed
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda.tangents import tangent
from jax_fastattn.spec import QKV, AttentionSpec, Operands
from jax_fastattn.xla import passes as xla

LENGTHS = np.array([0, 40, 0, 77, 9, 0]), np.array([33, 50, 0, 60, 0, 12])

# Arguments as `test_masks_ops.draw` takes them.
CASES: dict[str, dict[str, Any]] = {
    "mask": {"mask": (2, N, 70, 141), "density": 0.02},
    "mask-of-keys": {"mask": (2, 1, 1, 141), "query_seq_lengths": (70, 40)},
    "ids-causal": {"ids": 3, "is_causal": True},
    "function": {"mask_mod": lambda b, h, q, k: (q - k) % 3 != 1},
    "sinks": {"sinks": True, "is_causal": True, "query_offset": (50, -30), "head_dim": 36},
    "scale": {"local_window_size": (30, 5), "scale": jnp.float32(-0.125)},
    "packed": {"cu_seqlens": True, "is_causal": True},
    "packed-function": {"cu_seqlens": True, "mask_mod": lambda b, h, q, k: q >= k - b},
    "packed-distances": {"cu_seqlens": True, "mask_mod": lambda b, h, q, k: jnp.arange(400)[k - q + 200] % 3 != 1},
}


def _draw(case: dict[str, Any]) -> tuple[AttentionSpec, Operands]:
    if not case.pop("cu_seqlens", False):
        return draw(case)
    random = np.random.default_rng(0)
    totals = [int(x.sum()) + 5 for x in LENGTHS]
    shapes = (totals[0], N, 64), (totals[1], K, 64), (totals[1], K, 64)
    cu = [jnp.asarray(np.cumsum([0, *x]), jnp.int32) for x in LENGTHS]
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    return canonicalize_packed(*arrays, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **case)


# A case of each silent fault.
ALWAYS = {("mask", "sm_80"), ("ids-causal", "sm_90a"), ("sinks", "sm_80"), ("packed", "sm_90a")}
# Functions are lists, as masks are: one architecture each.
ONCE = {("function", "sm_80"), ("packed-function", "sm_90a")}
CALLS = [(name, arch) for name in CASES for arch in ("sm_80", "sm_90a") if (name, arch) not in ONCE]


@pytest.mark.parametrize(
    ("name", "arch"), [pytest.param(*x, marks=[] if x in ALWAYS else pytest.mark.slow) for x in CALLS]
)
def test_tangents(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_ops.emulate(monkeypatch, arch)
    _compare(*_draw(dict(CASES[name])))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("precision", ["default", "tensorfloat32"])
def test_float32(precision: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By three products also where the forward pass has one."""
    emulated_ops.emulate(monkeypatch, arch)
    spec, operands = draw({"sinks": True, "is_causal": True, "query_seq_lengths": (70, 40)})
    operands = operands._replace(**{x: getattr(operands, x).astype(jnp.float32) for x in QKV})
    _compare(dataclasses.replace(spec, precision=precision), operands)


def _compare(spec: AttentionSpec, operands: Operands) -> None:
    """Compares tangents of poisoned operands with those of the XLA path."""
    moved = tangents.draw(operands)
    poisoned, moving = tangents.hidden(spec, operands, moved)
    out, lse = cuda.forward(spec, poisoned)
    tangents.assert_within_budget(tangent(spec, poisoned, out, lse, moving), spec, operands, moved)


def test_sinks_alone_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel was launched")

    random = np.random.default_rng(0)
    query, key = (jnp.asarray(random.standard_normal((2, 9, n, 8)), jnp.bfloat16) for n in (N, K))
    sinks = jnp.asarray(random.standard_normal(N), jnp.float32)
    spec, operands = canonicalize(query, key, key, sinks=sinks)
    moved = {"sinks": jnp.ones_like(operands.sinks)}
    out, lse = xla.forward(spec, operands)
    emulated_ops.emulate(monkeypatch, bind=launched)
    tangents.assert_within_budget(tangent(spec, operands, out, lse, moved), spec, operands, moved)
