# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores next to dropout in the kernels of both families: masks bit by bit, and all gradients; emulated.

Masks are those of the key in both passes, so gradients are compared with those of the XLA path for the same key, and so
are gradients of captured arrays. Slopes of some functions are negative: signs of their weights say nothing of dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import jax
import jax.numpy as jnp
import numpy as np
from emulated_dropout import Call, check_gradients, check_mask

pytestmark = pytest.mark.slow

_random = np.random.default_rng(9)
SLOPES = jnp.asarray([0.05, -0.3, 0.02, 0.7], jnp.float32)
TABLE = jnp.asarray(_random.standard_normal((500, 4)), jnp.float32)
ROWS = jnp.asarray(_random.standard_normal((2, 200)), jnp.float32)
COLUMNS = jnp.asarray(_random.standard_normal((4, 200)), jnp.float32)
SEEN = jnp.asarray(_random.random((2, 200)) < 0.7)
IDS = tuple(jnp.asarray(np.sort(_random.integers(0, 3, (1, n))), jnp.int32) for n in (77, 150))

Mod = Callable[..., Any]


def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - SLOPES[h] * (q - k)


def buckets(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + TABLE[k - q + 250, h]


def of_keys(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + COLUMNS[h, k]


def turned(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Half of the rows have a negative slope."""
    return s * jnp.tanh(ROWS[b, q])


def by_pairs(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Signs of slopes differ from pair to pair, and no array is captured."""
    return jnp.abs(s) - 0.03 * jnp.abs(q - k)


def near(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - 0.03 * jnp.abs(q - k)


def call(mod: Mod, head_dim: int = 64, lengths: tuple[int, int] = (50, 133), batch: int = 1, **other: Any) -> Call:
    names = ("kv_heads", "group", "rate", "rates", "broadcast", "dtype")
    fields = {name: other.pop(name) for name in names if name in other}
    return Call(head_dim, lengths, batch, options=tuple({"score_mod": mod, **other}.items()), **fields)


# By name: GPU and call. Every commit runs these: each kernel that masks dP of a function whose slopes may be negative,
# and the sums of both families.
ALWAYS = {
    "portable-two-roles": ("sm_80", call(turned, 128)),
    "portable-one-role": ("sm_80", call(alibi, lengths=(50, 70))),
    "hopper-dk-dv-dq": ("sm_90a", call(turned)),
    "hopper-dk-dv-and-dq": ("sm_90a", call(turned, 192)),
    "hopper-diagonals": ("sm_90a", call(buckets, lengths=(77, 150))),
}
BOTH: dict[str, Call] = {
    "alibi-d128-rates": call(alibi, 128, lengths=(50, 61), group=3, rates=(0.2, 0.6, 0.9)),
    "alibi-d96-causal": call(alibi, 96, is_causal=True),
    "alibi-d256": call(alibi, 256, lengths=(50, 70)),
    "alibi-float16": call(alibi, dtype="float16"),
    "alibi-float32": call(alibi, 128, lengths=(50, 70), dtype="float32"),
    "buckets-d128-ids": call(buckets, 128, lengths=(77, 150), segment_ids=IDS),
    "term-bias": call(near, 128, lengths=(77, 100), bias=jnp.asarray(_random.standard_normal((1, 2, 77, 100)))),
    "keys": call(of_keys, batch=2),
    "keys-d192": call(of_keys, 192),
    "turned-d160": call(turned, 160, lengths=(50, 70)),
    "turned-d256": call(turned, 256, lengths=(50, 70)),
    "turned-float32": call(turned, lengths=(50, 70), dtype="float32"),
    "turned-float32-d128": call(turned, 128, lengths=(50, 70), dtype="float32"),
    "turned-lengths": call(
        turned,
        128,
        lengths=(77, 150),
        batch=2,
        key_value_seq_lengths=jnp.array([100, 33]),
        query_seq_lengths=jnp.array([70, 77]),
    ),
    "turned-mask-function": call(turned, lengths=(77, 150), mask_mod=lambda b, h, q, k: (q >= k) | SEEN[b, k]),
    "turned-mask-function-d192": call(turned, 192, mask_mod=lambda b, h, q, k: (q >= k) | SEEN[b, k]),
    "pairs-cap-sinks-window": call(
        by_pairs,
        128,
        lengths=(77, 150),
        logits_soft_cap=2.0,
        sinks=jnp.array([0.3, -1.0]),
        local_window_size=(60, 20),
        query_offset=40,
    ),
    "pairs-bias": call(by_pairs, lengths=(77, 100), bias=jnp.asarray(_random.standard_normal((1, 2, 77, 100)))),
    "pairs-d192-ids": call(by_pairs, 192, lengths=(77, 150), segment_ids=IDS),
    "pairs-deterministic": call(by_pairs, lengths=(77, 150), kv_heads=2, deterministic=True, is_causal=True),
    "pairs-broadcast": call(by_pairs, 128, batch=2, broadcast=True),
    "pairs-rate-1": call(by_pairs, 128, lengths=(50, 61), rate=1.0),
}
# float32 operands have two terms of 8 bits each.
TOLERANCES = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-12}


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.whole
@pytest.mark.parametrize("name", ALWAYS)
def test_gradients_of_each_kernel(name: str) -> None:
    arch, given = ALWAYS[name]
    check_gradients(given, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", BOTH)
def test_gradients(name: str, arch: str) -> None:
    check_gradients(BOTH[name], arch, TOLERANCES[BOTH[name].dtype])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mod", [alibi, by_pairs])
def test_masks(mod: Mod, head_dim: int, arch: str) -> None:
    """Each weight that the forward kernel keeps, `dropout_mask` keeps."""
    check_mask(call(mod, head_dim, lengths=(77, 61)), arch)
