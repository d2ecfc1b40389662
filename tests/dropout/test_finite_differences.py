# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of calls with dropout against finite differences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_fastattn import attention, dropout_mask


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_both_orders(mode: str) -> None:
    key, rate = jax.random.key(7), 0.3
    assert 6 < np.count_nonzero(dropout_mask(key, rate, (1, 2, 3, 4))) < 24
    call = functools.partial(attention, is_causal=True, query_offset=1, dropout_rate=rate, dropout_key=key)
    with jax.enable_x64(True):
        shapes = (1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 4)
        x = [jax.random.normal(jax.random.key(i), shape, jnp.float64) for i, shape in enumerate(shapes)]
        check_grads(jax.jit(call), x, order=2, modes=[mode], rtol=1e-6, atol=1e-7)
