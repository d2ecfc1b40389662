# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Modules of Flax with dropout: next to lengths, and in memory that is linear in the length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_flax import QUERIES, assert_same, flax_dropout, make_inputs, make_layer, outputs_and_gradients

from jax_fastattn.integrations.flax import attention_fn, bind

# `test_flax.py` has the other half of pairs at every commit.
PAIRS = [("linen", False), ("nnx", True)]


@pytest.mark.numbers
@pytest.mark.parametrize(("family", "broadcast"), PAIRS)
def test_a_model_with_attention_dropout_trains(family: str, broadcast: bool) -> None:
    flax_dropout(family, {}, broadcast_dropout=broadcast)


@pytest.mark.numbers
@pytest.mark.parametrize(("family", "broadcast"), PAIRS)
def test_lengths_with_dropout(family: str, broadcast: bool) -> None:
    """A mask that hides the same keys has the same results."""
    inputs, lengths = make_inputs((2, QUERIES)), jnp.array([QUERIES, 4])
    options = {"dropout_rate": 0.4, "broadcast_dropout": broadcast}
    seen = (jnp.arange(QUERIES)[None] < lengths[:, None])[:, None, None]
    params = make_layer(family)(None, *inputs)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        layer = make_layer(family, attention_fn=bind(key_value_seq_lengths=lengths), **options)
        found = outputs_and_gradients(layer, params, inputs, deterministic=False)
        masked = make_layer(family, attention_fn=attention_fn, **options)
        assert_same(found, outputs_and_gradients(masked, params, inputs, deterministic=False, mask=seen), 2e-5)
        assert np.any(found["out"] != outputs_and_gradients(layer, params, inputs, deterministic=True)["out"])


@pytest.mark.numbers
@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_memory_is_linear(family: str) -> None:
    """Forward and backward, of 2^15 tokens: weights of one head would take 4 GiB, their mask 1 GiB."""
    inputs = [jax.ShapeDtypeStruct((1, 1 << 15, 24), jnp.float32)]
    params = make_layer(family)(None, *make_inputs((1, QUERIES)))
    layer = make_layer(family, attention_fn=bind(is_causal=True), dropout_rate=0.4, broadcast_dropout=False)

    def loss(params: object, x: jax.Array) -> jax.Array:
        return jnp.sum(layer(params, x, deterministic=False) ** 2)

    program = jax.jit(jax.grad(loss, (0, 1))).lower(params, *inputs).compile()
    assert program.memory_analysis().temp_size_in_bytes < 256 << 20
