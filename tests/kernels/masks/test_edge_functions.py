# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Mask functions whose code edge tiles evaluate, since their bits would take too much memory; emulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_draws
import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from test_mask_mods import BLOCKS, MODS, OTHERS, WINDOWS, B, K, N, S, T, draw, results

from jax_fastattn import target_arch
from jax_fastattn.canonical import packed
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.kernels.tiles import lists as tile_lists
from jax_fastattn.spec import Problem

_MAX_BITS_NBYTES = tile_lists.MAX_BITS_NBYTES

# A function of `MODS`, architecture, head dim, and other arguments.
CALLS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "documents": ("documents", "sm_90a", 64, {}),
    "documents-sm80": ("documents", "sm_80", 64, {}),
    "windows-sinks": ("windows", "sm_90a", 128, {"sinks": jnp.asarray([0.1, -0.3, 0.7, 0.2])}),
    "windows-cap-sm80": ("windows", "sm_80", 128, {"logits_soft_cap": 2.0}),
    "distances-d192": ("distances", "sm_90a", 192, {}),
    "booleans-ids": ("booleans", "sm_90a", 64, OTHERS["ids"]),
    "booleans-lengths-sm80": ("booleans", "sm_80", 64, OTHERS["lengths"]),
    "dilated-window": ("dilated", "sm_90a", 96, OTHERS["window"]),
    "dilated-mask-of-keys-sm86": ("dilated", "sm_86", 192, OTHERS["mask of keys"]),
    "far-cap": ("far", "sm_90a", 64, {"logits_soft_cap": 2.0}),
    "nothing-d256": ("nothing", "sm_90a", 256, {}),
}


@pytest.fixture(autouse=True)
def _no_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No call may have bits of pairs. Functions of users rely on JAX's promotion."""
    monkeypatch.setattr(tile_lists, "MAX_BITS_NBYTES", 0)
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_calls_match_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mod, arch, head_dim, options = CALLS[name]
    emulated_ops.emulate(monkeypatch, arch)
    emulated_ops.compare_with_reference(*canonicalize(*draw(head_dim), mask_mod=MODS[mod], **options))


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["ts", "s"])
def test_gradients_of_a_bias(axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of its own sums that of pairs."""
    emulated_ops.emulate(monkeypatch, "sm_90a" if axes == "ts" else "sm_80")
    shape = 1, N, T if "t" in axes else 1, S
    bias = jnp.asarray(np.random.default_rng(5).standard_normal(shape), jnp.bfloat16)
    emulated_ops.compare_with_reference(*canonicalize(*draw(64), mask_mod=MODS["windows"], bias=bias))


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_function_gives_the_same_results_with_and_without_bits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes of queries, keys, distances and heads; output, log-sum-exp and all gradients, bit by bit."""
    emulated_ops.emulate(monkeypatch, arch)

    def mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return MODS["documents"](b, h, q, k) | MODS["distances"](b, h, q, k) & (q - k < WINDOWS[h])

    found = []
    for limit in (1 << 28, 0):
        monkeypatch.setattr(tile_lists, "MAX_BITS_NBYTES", limit)
        found.append(results(mask_mod=mod))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "arch"), [(0, "sm_80"), (4, "sm_90a"), (9, "sm_80"), (20, "sm_90a"), (24, "sm_80"), (26, "sm_90a")]
)
def test_random_functions(number: int, arch: str) -> None:
    emulated_draws.check(Case("bfloat16", 2, T, S, num_kv_heads=K, group=N // K, head_dim=64, mask_mod=number), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_packed_sequences(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows of padding and an empty sequence."""
    emulated_ops.emulate(monkeypatch, arch)
    starts = jnp.array([3, 40, 40, 110, 125]), jnp.array([0, 50, 60, 100, 160])
    query, key, value = (x[0] for x in draw(64))
    mod = lambda b, h, q, k: ((q - k) % 3 != 0) & (k - q < WINDOWS[b]) | (h == 2) & (k < 9)
    options = {"is_causal": True, "query_offset": jnp.array([13, 0, 5, -20])}
    emulated_ops.compare_with_reference(*packed.canonicalize(query, key, value, *starts, mask_mod=mod, **options))


@pytest.mark.parametrize(
    ("mod", "options"),
    [
        (lambda b, h, q, k: BLOCKS[b, h, q // 16, k // 32], {}),
        (MODS["floats"], {}),
        (MODS["causal"], {"score_mod": lambda s, b, h, q, k: s * 0.5}),
        (MODS["causal"], {"mask": jnp.ones((B, K, T, S), bool)}),
    ],
    ids=["table", "floats", "score_mod", "mask"],
)
def test_other_functions_need_bits(mod: Any, options: dict[str, Any]) -> None:
    """A float that is computed may round to another number than on the XLA path."""
    with target_arch("sm_90a"):
        problem = Problem.of(*canonicalize(*draw(64), mask_mod=mod, **options))
        (reason,) = unsupported_reasons(problem, "sm_90a")
    assert "bits of `mask_mod`" in reason.text and "computes with integers" in reason.remedy


def test_a_long_call_of_documents_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes and lists of 128k tokens are small. Next to a score function there are bits, which are too many."""
    monkeypatch.setattr(tile_lists, "MAX_BITS_NBYTES", _MAX_BITS_NBYTES)
    shape = jax.ShapeDtypeStruct((1, 1 << 17, 2, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 1 << 17), jnp.int32)
    reasons = []

    def call(query: jax.Array, ids: jax.Array) -> jax.Array:
        def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (ids[b, q] == ids[b, k]) & (q >= k)

        for options in ({}, {"score_mod": lambda s, b, h, q, k: s * 0.5}):
            problem = Problem.of(*canonicalize(query, query, query, mask_mod=documents, **options))
            reasons.append(unsupported_reasons(problem, "sm_90a"))
        return query

    jax.eval_shape(call, shape, ids)
    assert not reasons[0] and "bits of `mask_mod`" in reasons[1][0].text
