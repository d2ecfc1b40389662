# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Keras on the JAX backend: inside `installed()`, its layers call this package."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
import numpy as np

from jax_fastattn.integrations import keras as fused

keras.utils.set_random_seed(0)


def make_model():
    """Returns an encoder with a causal mask; kernels take the mixed policies."""
    tokens = keras.Input((24,), dtype="int32")
    x = keras.layers.Embedding(50, 32)(tokens)
    attend = keras.layers.MultiHeadAttention(4, 16, dtype="mixed_bfloat16")
    x = keras.layers.LayerNormalization()(x + attend(x, x, use_causal_mask=True))
    return keras.Model(tokens, keras.layers.Dense(50, activation="softmax")(x))


model = make_model()
tokens = np.random.default_rng(0).integers(50, size=(8, 25), dtype="int32")
x, y = tokens[:, :-1], tokens[:, 1:]
adam = keras.optimizers.Adam(1e-2)
model.compile(optimizer=adam, loss="sparse_categorical_crossentropy")
wanted = model(x)  # by Keras

with fused.installed():
    out = model(x)
    history = model.fit(x, y, epochs=3, verbose=0).history["loss"]

np.testing.assert_allclose(np.asarray(out), np.asarray(wanted), atol=0.01)
assert history[-1] < history[0]
