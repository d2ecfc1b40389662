# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which calls save the mean keys of rows for the gradient of a head's numbers, and their gradients on the XLA path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.row_means import mean_plane, with_means
from jax_fastattn.programs import analysis

SLOPES = jnp.array([0.3, -0.2])
X = jax.random.normal(jax.random.key(0), (2, 24, 2, 8), jnp.bfloat16)

# By name: a function of captured slopes, other arguments, and how much the derivative grows from key to key; None if
# no means are saved.
CALLS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], float | None]] = {
    "alibi": (lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), {"is_causal": True}, 1.0),
    "halves": (lambda x: lambda s, b, h, q, k: s + x[h] * ((3 * k - q) / 4.0), {}, 0.75),
    "distance": (lambda x: lambda s, b, h, q, k: s - x[h] * jnp.abs(q - k), {}, None),
    "factor": (lambda x: lambda s, b, h, q, k: s * x[h], {}, None),
    "sinks": (lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), {"sinks": jnp.zeros(2)}, None),
    "cap": (lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), {"logits_soft_cap": 5.0}, None),
}


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_means_are_saved_where_the_derivative_is_linear_in_the_key(name: str) -> None:
    make, options, slope = CALLS[name]
    spec, _ = canonicalize(X, X, X, score_mod=make(SLOPES), **options)
    plane = mean_plane(spec, "bfloat16", ["query", "head_numbers"])
    assert (plane is None) == (slope is None)
    if plane is not None:
        code: Any = spec.score_mod
        assert analysis.key_slope(code, code.results[2 + plane]) == slope
        assert mean_plane(spec, "float32", ["head_numbers"]) is None and mean_plane(spec, "bfloat16", ["key"]) is None


def test_kernels_take_means_where_they_have_registers() -> None:
    def takes(family: Any, head_dim: int, **options: Any) -> bool:
        kernel = KernelSpec("backward", "", "bfloat16", head_dim, 64, family=family, dplane=0, **options)
        found = with_means(kernel, 0)
        assert (found.mean_plane, found.dplane) in ((0, None), (None, 0))
        return found.has_row_means

    portable, hopper = ([takes(x, n) for n in (64, 128, 136, 160, 168, 192, 200, 256)] for x in ("sm80", "sm90"))
    assert portable == [True, True, True, True, False, False, True, True]
    assert hopper == [True, True, False, False, False, False, False, False]
    assert not takes("sm80", 64, dlse=True) and not takes("sm80", 64, products="bf16x3")


def _loss(slopes: jax.Array, x: jax.Array) -> jax.Array:
    out = attention(x, x, x, is_causal=True, score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k))
    return out.astype(jnp.float32).sum()


def test_the_backward_pass_takes_means_if_slopes_are_differentiated() -> None:
    found = [str(jax.make_jaxpr(jax.grad(_loss, argnums=i))(SLOPES, X)) for i in range(2)]
    assert ["row_means" in x for x in found] == [True, False]


def test_means_follow_vmap_remat_and_second_derivatives() -> None:
    single, both = jax.grad(_loss)(SLOPES, X), jnp.stack([SLOPES, 2 * SLOPES])
    np.testing.assert_allclose(jax.vmap(jax.grad(_loss), (0, None))(both, X)[0], single, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(_loss))(SLOPES, X), single, rtol=1e-6)
    tangent = jnp.array([1.0, 0.0])
    step = 2.0**-5
    moved = [jax.grad(_loss)(SLOPES + x * tangent, X) for x in (step, -step)]
    second = jax.jvp(lambda x: jax.grad(_loss)(x, X), (SLOPES,), (tangent,))[1]
    np.testing.assert_allclose(second, (moved[0] - moved[1]) / (2 * step), rtol=0.05, atol=0.05)
