# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of captured arrays that are read several times: under `deterministic` no sum has an order that varies."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import mods
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mods import B, N, S, T

from jax_fastattn import attention, attention_varlen

# Each makes a `score_mod` of an array, whose shape is next to it.
READS: dict[str, tuple[Callable[[Any], Callable[..., Any]], tuple[int, ...]]] = {
    "buckets": (lambda x: lambda s, b, h, q, k: s + x[jnp.clip(k - q, -8, 7) + 8, h], (16, N)),
    "rows of buckets": (lambda x: lambda s, b, h, q, k: s + x[jnp.clip(k - q, -8, 7) + 8][h], (16, N)),
    "take": (lambda x: lambda s, b, h, q, k: s + jnp.take(x, jnp.clip(k - q, -8, 7) + 8, axis=0)[h], (16, N)),
    "filled": (lambda x: lambda s, b, h, q, k: s + x.at[k - q, h].get(mode="fill", fill_value=0.5), (16, N)),
    "heads": (lambda x: lambda s, b, h, q, k: s + x[h // 2] * (k - q), (N,)),
    "keys": (lambda x: lambda s, b, h, q, k: s - jax.nn.softplus(x[b, k // 3]), (B, S)),
    "queries of a row": (lambda x: lambda s, b, h, q, k: s * (1 + x[b][q // 2]), (B, T)),
}


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def scatters(text: str) -> list[str]:
    """Returns of each scatter of a lowered program whether its indices are unique."""
    return re.findall(r"(?<!select_and_)scatter.*unique_indices = (\w+)", text)


def losses(name: str) -> tuple[jax.Array, Callable[..., jax.Array]]:
    """Returns a captured array, and a loss of it that takes `deterministic`."""
    given: dict[str, Any] = mods.draw()
    make, shape = READS[name]

    def loss(x: jax.Array, deterministic: bool = True) -> jax.Array:
        return jnp.sin(attention(**given, score_mod=make(x), deterministic=deterministic)).sum()

    return jax.random.normal(jax.random.key(1), shape), loss


# These run at every commit.
ALWAYS = ("rows of buckets", "filled")
NAMES = [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in READS]


@pytest.mark.parametrize("name", NAMES)
def test_each_element_is_scattered_once(name: str) -> None:
    x, loss = losses(name)
    unique, others = (
        scatters(jax.jit(jax.grad(loss), static_argnums=1).lower(x, on).as_text()) for on in (True, False)
    )
    assert unique and set(unique) == {"true"}
    assert "false" in others


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_any_order(name: str) -> None:
    """Values have the same bits."""
    x, loss = losses(name)
    both = jax.jit(lambda x: [jax.value_and_grad(loss)(x, on) for on in (True, False)])
    (value, gradient), (wanted, wanted_gradient) = both(x)
    assert value == wanted
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows of buckets", "keys"])
def test_second_derivatives_and_maps(name: str) -> None:
    x, loss = losses(name)
    found, wanted = (jax.jvp(jax.grad(lambda x, on=on: loss(x, on)), (x,), (x,)) for on in (True, False))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, wanted)
    mapped = jax.vmap(jax.grad(loss))(jnp.stack([2 * x, x]))
    np.testing.assert_allclose(mapped[1], wanted[0], atol=1e-5)


@pytest.mark.parametrize("is_packed", [False, True])
def test_programs_of_kernels_scatter_each_element_once(
    is_packed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    arrays = [jnp.ones((1, 64, 2, 64), jnp.bfloat16)] * 3

    def loss(x: jax.Array) -> jax.Array:
        options: Any = {"score_mod": READS["buckets"][0](x), "deterministic": True, "implementation": "cuda"}
        if not is_packed:
            return attention(*arrays, **options).sum()
        return attention_varlen(*(x[0] for x in arrays), *[jnp.array([0, 30, 64])] * 2, **options).sum()

    unique = scatters(calls.cuda_text(jax.grad(loss), jnp.ones((16, 2))))
    assert unique and set(unique) == {"true"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_shard_map(kind: AxisType) -> None:
    """With an array that varies from device to device, and one that all devices share."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    given: dict[str, Any] = mods.draw()
    own, shared = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((2, 16, N), (N, T))))

    def call(given: Any, own: jax.Array, shared: jax.Array) -> jax.Array:
        mod = lambda s, b, h, q, k: s * shared[h, q // 2] + own[0][jnp.clip(k - q, -8, 7) + 8, h]
        return attention(**given, score_mod=mod, deterministic=True)

    share = jax.shard_map(call, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=P("x"))

    def by_entry(given: Any, own: jax.Array, shared: jax.Array) -> jax.Array:
        parts = [({x: y[i : i + 1] for x, y in given.items()}, own[i : i + 1], shared) for i in range(B)]
        return jnp.concatenate([call(*x) for x in parts])

    def gradients(run: Any, *arrays: Any) -> Any:
        return calls.quick_jit(jax.grad(lambda *x: jnp.sin(run(*x)).sum(), argnums=(1, 2)))(*arrays)

    wanted = gradients(by_entry, given, own, shared)
    with contextlib.nullcontext() if kind == AxisType.Auto else jax.set_mesh(mesh):
        placed = jax.device_put((given, own, shared), (NamedSharding(mesh, P("x")),) * 2 + (NamedSharding(mesh, P()),))
        found = jax.tree.map(np.asarray, gradients(share, *placed))
    calls.assert_same(found, wanted)
