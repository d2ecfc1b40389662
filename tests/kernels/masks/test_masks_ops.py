# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls with masks and segment ids, from canonical operands to results, with emulated custom calls."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from testing.poison import poison

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.choose import kernel_spec, prepass_configs
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda import prepass
from jax_fastattn.ops.cuda.launch import launch_p
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import QKV, Operands, Problem

B, T, S, N, K = 2, 70, 141, 4, 2

# Shapes of masks, and other arguments; "ids" says of how many documents, and "sort" whether they ascend.
CASES: dict[str, dict[str, Any]] = {
    "b1ts": {"mask": (B, 1, T, S)},
    "11ts-causal": {"mask": (1, 1, T, S), "is_causal": True},
    "bnts-dead-keys": {"mask": (B, N, T, S), "density": 0.01},
    "1kts-window": {"mask": (1, K, T, S), "local_window_size": (30, 5)},
    "bkts-sinks": {"mask": (B, K, T, S), "sinks": True},
    "b11s": {"mask": (B, 1, 1, S)},
    "111s-offset": {"mask": (1, 1, 1, S), "is_causal": True, "query_offset": (50, -3)},
    "b1t1-cap": {"mask": (B, 1, T, 1), "logits_soft_cap": 2.0},
    "ts-lengths": {"mask": (T, S), "query_seq_lengths": (70, 40), "key_value_seq_lengths": (100, 141)},
    "ids": {"ids": 3},
    "ids-causal-mask": {"ids": 3, "is_causal": True, "mask": (1, 1, T, S), "density": 0.9},
    "d128": {"mask": (B, 1, T, S), "head_dim": 128},
    "d40v128-ids": {"ids": 2, "head_dim": 40, "v_head_dim": 128},
    "d192v128": {"mask": (B, N, T, S), "head_dim": 192, "v_head_dim": 128},
}


def draw(case: dict[str, Any]) -> tuple[Any, Operands]:
    """Returns specification and canonical operands."""
    random, case = np.random.default_rng(0), dict(case)
    head_dim = case.pop("head_dim", 64)
    v_head_dim, density = case.pop("v_head_dim", head_dim), case.pop("density", 0.4)
    shapes = ((B, T, N, head_dim), (B, S, K, head_dim), (B, S, K, v_head_dim))
    query, key, value = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    if shape := case.pop("mask", None):
        case["mask"] = jnp.asarray(random.random(shape) < density)
    if documents := case.pop("ids", None):
        # The first id is one of queries alone, and the last one of keys alone.
        sides = ((T, range(-1, documents)), (S, range(documents + 1)))
        drawn = [random.choice(ids, (B, rows)) for rows, ids in sides]
        drawn = [np.sort(x, 1) for x in drawn] if case.pop("sort", True) else drawn
        case["segment_ids"] = tuple(jnp.asarray(x, jnp.int32) for x in drawn)
    if case.pop("sinks", False):
        case["sinks"] = jnp.asarray(random.standard_normal(N), jnp.float32)
    case = {name: jnp.asarray(x, jnp.int32) if name in INTEGERS else x for name, x in case.items()}
    return canonicalize(query, key, value, **case)


INTEGERS = ("query_offset", "query_seq_lengths", "key_value_seq_lengths")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_ops.emulate(monkeypatch)


BACKWARD = ("bnts-dead-keys", "b11s", "ts-lengths", "ids-causal-mask", "d192v128", "bkts-sinks")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in BACKWARD])
def test_outputs_match_the_reference(name: str) -> None:
    spec, operands = draw(CASES[name])
    poisoned, *_ = poison(spec, operands, jnp.zeros((B, T, N, operands.value.shape[3]), jnp.bfloat16))
    out, lse = cuda.forward(spec, poisoned)
    single = [x.astype(jnp.float32) for x in operands[:3]]
    wanted, lse_wanted = attention_reference(spec, operands._replace(**dict(zip(QKV, single, strict=True))))
    np.testing.assert_allclose(np.asarray(lse), np.asarray(lse_wanted), atol=1e-4, rtol=1e-4)
    expected = np.asarray(wanted, np.float64)
    error = 2**-7 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), expected, atol=error, rtol=2**-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
def test_forward_and_backward(name: str) -> None:
    emulated_ops.compare_with_reference(*draw(CASES[name]))


def test_kept_lists_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call runs no prepass, and the kernel reads what the first one has written."""
    spec, operands = draw(CASES["ids-causal-mask"])
    ops: list[str] = []

    def bind(*arrays: jax.Array, kernel: KernelSpec, **params: Any) -> list[jax.Array]:
        ops.append(kernel.op)
        return emulated_ops.bind(*arrays, kernel=kernel, **params)

    monkeypatch.setattr(launch_p, "bind", bind)
    kernel = kernel_spec(Problem.of(spec, operands), "forward", "sm_90a")
    kept = [prepass.tile_lists(spec, operands, config) for config in prepass_configs(kernel)]
    assert ops == ["prepass"]
    found, expected = cuda.forward(spec, operands, kept=kept), cuda.forward(spec, operands)
    assert ops == ["prepass", "forward", "prepass", "forward"]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    # With the lists of a mask that shows nothing, nothing is visible.
    assert operands.mask is not None
    hidden = operands._replace(mask=jnp.zeros_like(operands.mask))
    nothing = [prepass.tile_lists(spec, hidden, config) for config in prepass_configs(kernel)]
    out, _ = cuda.forward(spec, operands, kept=nothing)
    assert not np.asarray(out).any()


def test_wide_ids_lose_no_bit() -> None:
    with jax.enable_x64(True):
        queries, keys = jnp.array([[1 << 40, 7, 0]]), jnp.array([[0, 1 << 40, (1 << 40) + 1]])
        narrow = prepass.narrow_ids(queries, keys)
    assert all(x.dtype == jnp.int32 for x in narrow)
    same = np.asarray(narrow[0])[0][:, None] == np.asarray(narrow[1])[0]
    np.testing.assert_array_equal(same, np.asarray(queries)[0][:, None] == np.asarray(keys)[0])
