# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls in float32 by products of float16, in the emulators of both families, with poison in all that is hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from testing.poison import poison

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.layouts import packed
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import QKV, AttentionSpec, Operands

MaskMod = Callable[..., Any]


class Call(NamedTuple):
    """A call, and the sizes B, T, S, N, K, H and D. `large` multiplies the last value of its first head."""

    arch: str
    sizes: tuple[int, int, int, int, int, int, int]
    facts: dict[str, Any]
    arrays: dict[str, Any]
    dlse: bool = False
    large: float = 1.0
    mask_mod: MaskMod | None = None


def _int32(*x: int) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


LENGTHS = {
    "query_seq_lengths": _int32(70, 50),
    "key_value_seq_lengths": _int32(90, 61),
    "query_offset": _int32(-10, 25),
}
IDS = {"query_segment_ids": _int32(*range(70))[None] // 30, "key_value_segment_ids": _int32(*range(90))[None] // 25}
BOUNDARIES = packed.sequences(_int32(3, 30, 60), _int32(0, 40, 85), (70, 90))[None]
SINKS = {"sinks": jnp.array([[0.5, -1.0]])}
BIAS = {"bias": jnp.asarray(np.random.default_rng(7).standard_normal((1, 2, 70, 90)), jnp.float32)}
KEYS = {"bias": jnp.asarray(np.random.default_rng(8).standard_normal((1, 2, 1, 90)), jnp.float32)}
MASK = {"mask": jnp.asarray(np.random.default_rng(9).random((1, 1, 70, 90)) < 0.3)}
CAUSAL = {"is_causal": True}
SMALL = (1, 70, 90, 2, 1, 64, 64)

CALLS = {
    "sm80-lengths": Call("sm_80", (2, 70, 90, 2, 1, 64, 64), {"window": (30, 5)}, LENGTHS, dlse=True),
    "sm80-d128-sinks": Call("sm_80", (1, 70, 70, 2, 2, 128, 128), CAUSAL, SINKS, large=1e4),
    "sm80-d256": Call("sm_80", (1, 40, 70, 1, 1, 256, 224), {}, {}),
    "sm80-d160-narrow": Call("sm_86", (1, 40, 70, 1, 1, 160, 192), CAUSAL, {}),
    "sm80-mask": Call("sm_80", SMALL, {}, MASK),
    "sm80-ids": Call("sm_80", SMALL, CAUSAL, IDS),
    "sm80-packed": Call("sm_80", SMALL, CAUSAL, {"sequences": BOUNDARIES}, dlse=True),
    "sm80-mask-function": Call("sm_80", SMALL, CAUSAL, {}, mask_mod=lambda b, h, q, k: (q + k + h) % 3 != 0),
    "sm80-bias": Call("sm_80", SMALL, CAUSAL, BIAS),
    "sm80-deterministic-cap": Call("sm_80", SMALL, {"deterministic": True, "logits_soft_cap": 2.0}, {}),
    "sm90-lengths": Call("sm_90a", (2, 70, 90, 2, 1, 64, 64), {"window": (30, 5)}, LENGTHS, dlse=True),
    "sm90-d128-sinks": Call("sm_90a", (1, 70, 70, 2, 2, 128, 128), CAUSAL, SINKS, large=1e4),
    "sm90-d192": Call("sm_90a", (1, 40, 70, 1, 1, 192, 128), CAUSAL, {}),
    "sm90-d256": Call("sm_90a", (1, 40, 70, 1, 1, 256, 256), {}, {}),
    "sm90-mask": Call("sm_90a", SMALL, {}, MASK),
    "sm90-ids": Call("sm_90a", SMALL, CAUSAL, IDS),
    "sm90-packed": Call("sm_90a", SMALL, CAUSAL, {"sequences": BOUNDARIES}, dlse=True),
    "sm90-mask-function": Call("sm_90a", SMALL, {}, {}, mask_mod=lambda b, h, q, k: q >= k + 7 * h),
    "sm90-bias": Call("sm_90a", SMALL, CAUSAL, BIAS),
    "sm90-key-bias": Call("sm_90a", SMALL, {"scale": -0.1}, KEYS),
    "sm90-deterministic-cap": Call("sm_90a", SMALL, {"deterministic": True, "logits_soft_cap": 2.0}, {}),
}
# These run at every commit: each family once, with all that hides rows one by one.
_UNMARKED = ("sm80-lengths", "sm90-lengths")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in _UNMARKED else pytest.mark.slow) for x in CALLS])
def test_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are roundings of float16 in each result. Poison has 1e38 in the first hidden row."""
    call = CALLS[name]
    batch, queries, keys, heads, kv_heads, head_dim, v_head_dim = call.sizes
    random = np.random.default_rng(2)
    rows, columns = (batch, queries, heads), (batch, keys, kv_heads)
    shapes = (*rows, head_dim), (*columns, head_dim), (*columns, v_head_dim), (*rows, v_head_dim), rows
    query, key, value, dout, dlse = (jnp.asarray(random.standard_normal(x), jnp.float32) for x in shapes)
    operands = Operands(query, key, value.at[0, -1, 0].multiply(call.large), **call.arrays)
    facts = {"scale": head_dim**-0.5} | call.facts
    spec = AttentionSpec(present=operands.present(), precision="tensorfloat32", **facts)
    if call.mask_mod is not None:
        given, operands = canonicalize(*operands[:3], mask_mod=call.mask_mod)
        spec = dataclasses.replace(spec, present=given.present, mask_mod=given.mask_mod)
    names = [*QKV, *(x for x in ("bias", "sinks") if getattr(operands, x) is not None)]

    emulated_ops.emulate(monkeypatch, call.arch)
    poisoned, poisoned_dout, poisoned_dlse = poison(spec, operands, dout, dlse if call.dlse else None, turn=3)
    out, lse = cuda.forward(spec, poisoned)
    found = cuda.backward(spec, poisoned, out, lse, poisoned_dout, poisoned_dlse, names)

    def loss(*given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        results = attention_reference(spec, operands._replace(**dict(zip(names, given, strict=True))))
        told = jnp.where(jnp.isfinite(results[1]), results[1] * dlse, 0.0).sum() if call.dlse else 0.0
        return (results[0] * dout).sum() + told, results

    with jax.default_matmul_precision("highest"):
        given = [getattr(operands, x) for x in names]
        gradients, wanted = jax.grad(loss, argnums=tuple(range(len(names))), has_aux=True)(*given)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(wanted[1]), atol=2e-3, rtol=1e-4)
    results = {"out": (out, wanted[0])} | {x: (getattr(found, x), y) for x, y in zip(names, gradients, strict=True)}
    for which, (x, exact) in results.items():
        assert x.dtype == jnp.float32, which
        error, size = (np.sqrt((np.asarray(y, np.float64) ** 2).mean()) for y in (x - exact, exact))
        assert error < 1e-3 * size, (which, error / size)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_weights_add_up_to_their_sum(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of equal values is that value: sums are of rounded weights, also where a maximum was passed."""
    emulated_ops.emulate(monkeypatch, arch)
    random = np.random.default_rng(3)
    query, key = (jnp.asarray(3 * random.standard_normal((1, x, 1, 64)), jnp.float32) for x in (40, 300))
    operands = Operands(query, key, jnp.ones_like(key))
    spec = AttentionSpec(0.125, present=operands.present(), precision="tensorfloat32")
    out, _ = cuda.forward(spec, operands)
    np.testing.assert_allclose(np.asarray(out), 1.0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.inf, -np.inf], ids=["infinite", "minus-infinite"])
@pytest.mark.parametrize("which", [*QKV, "dout"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_infinities_stay_in_the_rows_that_see_them(
    arch: str, which: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row has a number where the XLA path has none; where both have one, they are near each other."""
    random = np.random.default_rng(2)
    arrays = {x: jnp.asarray(random.standard_normal((1, 70, 1, 64)), jnp.float32) for x in (*QKV, "dout")}
    arrays[which] = arrays[which].at[0, 40, 0, 3].set(value)
    dout = arrays.pop("dout")
    operands = Operands(**arrays)
    spec = AttentionSpec(0.125, present=operands.present(), precision="tensorfloat32", is_causal=True)
    emulated_ops.emulate(monkeypatch, arch)
    out, lse = cuda.forward(spec, operands)
    found = out, *cuda.backward(spec, operands, out, lse, dout, None, QKV)[:3]
    with jax.default_matmul_precision("highest"):
        exact, pullback = jax.vjp(lambda *x: attention_reference(spec, Operands(*x))[0], *operands[:3])
        wanted = exact, *pullback(dout)
    for result, x, y in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        numbers, exact_numbers = np.isfinite(x), np.isfinite(y)
        both = numbers & exact_numbers
        assert np.sqrt((np.subtract(x, y, where=both, out=np.zeros_like(x)) ** 2).mean()) <= 2e-3, result
        # The XLA path multiplies hidden pairs by 0, so that it may have NaN for keys that no such row sees.
        rows = slice(None) if result in ("out", "dq") else slice(41)
        assert not (numbers & ~exact_numbers)[:, rows].any(), result
        # In dk Hopper's kernels multiply hidden pairs by 0, too.
        assert (arch, result) == ("sm_90a", "dk") or not (exact_numbers & ~numbers).any(), result
