# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed batches in the attention modules of Flax: `Packed` in the place of a mask, traced once for all batches."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from test_flax import FEATURES, HEADS, KEYS, QUERIES, assert_same, make_inputs, make_layer, nnx

from jax_fastattn import attention_varlen
from jax_fastattn.integrations.flax import Packed, attention_fn, bind

# Rows of a packed batch, and the boundaries of the same segments.
SEGMENT_IDS = jnp.array([[1, 1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 5, 5, 5]])
BOUNDARIES = jnp.array([[0, 3, 5, 7], [0, 2, 7, 7]])


def segment_mask(segment_ids: jax.Array) -> jax.Array:
    return nn.make_attention_mask(segment_ids, segment_ids, jnp.equal)


@pytest.mark.parametrize("kind", ["segment_ids", "cu_seqlens"])
def test_a_jitted_step_is_traced_once_for_all_packed_batches(kind: str) -> None:
    """`bind(segment_ids=...)` in a step makes another module, to nnx, of each batch."""
    data = {
        "segment_ids": [SEGMENT_IDS, SEGMENT_IDS[::-1], jnp.ones_like(SEGMENT_IDS)],
        "cu_seqlens": [BOUNDARIES, BOUNDARIES[::-1], jnp.array([[0, 7, 7, 7]] * 2)],
    }
    traces = 0

    @nnx.jit
    def step(layer: Any, x: jax.Array, packed: Packed) -> Any:
        nonlocal traces
        traces += 1
        return nnx.value_and_grad(lambda layer: jnp.sum(jnp.sin(layer(x, mask=packed))))(layer)

    layers = [
        nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(3), **own)
        for own in ({}, {"attention_fn": attention_fn})
    ]
    (x,) = make_inputs((2, QUERIES))
    gradient = nnx.jit(nnx.value_and_grad(lambda layer, mask: jnp.sum(jnp.sin(layer(x, mask=mask)))))
    for ids, given in zip(data["segment_ids"], data[kind], strict=True):
        with jax.numpy_dtype_promotion("standard"):
            want = gradient(layers[0], segment_mask(ids))
        assert_same(jax.tree.leaves(step(layers[1], x, Packed(**{kind: given}))), jax.tree.leaves(want), tolerance=5e-5)
    assert traces == 1


@pytest.mark.parametrize("family", ["linen", "nnx"])
@pytest.mark.parametrize("kind", ["segment_ids", "cu_seqlens"])
def test_a_packed_causal_batch_equals_a_mask(family: str, kind: str) -> None:
    """A `Packed` passes through `jit`; there are two batch axes."""
    inputs = make_inputs((2, 1, QUERIES))
    theirs, ours = make_layer(family), make_layer(family, attention_fn=bind(is_causal=True))
    params = theirs(None, *inputs)
    mask = nn.make_causal_mask(SEGMENT_IDS) * segment_mask(SEGMENT_IDS)
    packed = Packed(**{kind: {"segment_ids": SEGMENT_IDS, "cu_seqlens": BOUNDARIES}[kind][:, None]})
    got = jax.jit(lambda params, packed: ours(params, *inputs, mask=packed))(params, packed)
    assert_same(got, theirs(params, *inputs, mask=mask[:, None]), tolerance=2e-5)


def test_packed_queries_and_keys_of_their_own() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, (n, HEADS, 8)) for k, n in zip(keys, (QUERIES, KEYS, KEYS), strict=True))
    query_ids, key_ids = (
        jnp.repeat(jnp.arange(3), jnp.array([2, 1, 4])),
        jnp.repeat(jnp.arange(3), jnp.array([3, 6, 2])),
    )
    want = nn.dot_product_attention(query, key, value, mask=nn.make_attention_mask(query_ids, key_ids, jnp.equal))
    boundaries = jnp.array([0, 2, 3, 7]), jnp.array([0, 3, 9, 11])
    for packed in (Packed(segment_ids=(query_ids, key_ids)), Packed(cu_seqlens=boundaries)):
        assert_same(attention_fn(query, key, value, mask=packed), want, tolerance=2e-5)


def test_wrong_packed_batches_raise() -> None:
    x = jnp.zeros((2, QUERIES, HEADS, 8))
    for packed in (Packed(), Packed(SEGMENT_IDS, BOUNDARIES)):
        with pytest.raises(ValueError, match=r"`mask` is a `Packed` with .*; expected `segment_ids` or `cu_seqlens`"):
            attention_fn(x, x, x, mask=packed)
    with pytest.raises(ValueError, match=r"`cu_seqlens` of `mask` has shape \(4,\); expected the batch axes \(2,\)"):
        attention_fn(x, x, x, mask=Packed(cu_seqlens=BOUNDARIES[0]))
    with pytest.raises(NotImplementedError, match="`bias`: attention inside `cu_seqlens` takes no bias"):
        attention_fn(x, x, x, jnp.zeros((QUERIES, QUERIES)), Packed(cu_seqlens=BOUNDARIES))


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_in_packed_batches(broadcast: bool) -> None:
    """Ids have the mask of rows, boundaries the mask of packed rows: without `broadcast`, each row has its own key."""
    x, key = jax.random.normal(jax.random.key(1), (2, QUERIES, HEADS, 8)), jax.random.key(0)
    options = {"dropout_rate": 0.4, "dropout_rng": key, "broadcast_dropout": broadcast}
    found = attention_fn(x, x, x, mask=Packed(SEGMENT_IDS), **options)
    mask = (SEGMENT_IDS[:, :, None] == SEGMENT_IDS[:, None, :])[:, None]
    assert_same(found, attention_fn(x, x, x, mask=mask, **options), tolerance=2e-6)
    found = attention_fn(x, x, x, mask=Packed(cu_seqlens=BOUNDARIES), **options)
    keys = [key, key] if broadcast else jax.random.split(key, 2)
    rows = [
        attention_varlen(
            *[x[b]] * 3, *[BOUNDARIES[b]] * 2, dropout_rate=0.4, dropout_key=keys[b], broadcast_dropout=broadcast
        )
        for b in range(2)
    ]
    assert_same(found, jnp.stack(rows), tolerance=2e-6)
