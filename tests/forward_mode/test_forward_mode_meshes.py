# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Forward mode and second derivatives under meshes: split as gradients are, with the collectives of a gradient."""

from __future__ import annotations

from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
import test_sharding
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_forward_mode import ARGS, loss, ours, plain, qkv
from test_sharding import partitioner  # noqa: F401 (a fixture)

X, U = (qkv(seed, (4, 6, 6, 4, 2, 8)) for seed in (5, 6))
NEW_JAX = pytest.mark.skipif(
    test_sharding.JAX_VERSION < (0, 9), reason="jax 0.8 itself fails on custom_partitioning under AxisType.Explicit"
)

MODES: dict[str, Any] = {
    "jvp": lambda f: lambda x, u: jax.jvp(f, x, u),
    "linearized": lambda f: lambda x, u: jax.linearize(f, *x)[1](*u),
    "forward-over-reverse": lambda f: lambda x, u: jax.jvp(jax.grad(loss(f), ARGS), x, u)[1],
    "reverse-over-forward": lambda f: lambda x, u: jax.grad(lambda x: jax.jvp(loss(f), x, u)[1])(x),
}


def expected_of(mode: str) -> Any:
    return jax.device_get(calls.quick_jit(MODES[mode](plain))(X, U))


def small_mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("mode", MODES)
def test_batch_and_heads_need_no_communication(partitioner: str, mode: str) -> None:  # noqa: F811
    split = jax.device_put((X, U), NamedSharding(small_mesh(), P("data", None, "model")))
    compiled = calls.quick_jit(MODES[mode](ours)).lower(*split).compile()
    assert test_sharding.collectives(compiled) == []
    calls.assert_same(jax.device_get(compiled(*split)), expected_of(mode), 5e-5)


@pytest.mark.parametrize("mode", ["jvp", "forward-over-reverse"])
def test_heads_split_further_than_key_heads(mode: str) -> None:
    """Two devices hold each key/value head. Only shares of dk and dv are added up, as those of a gradient are."""
    mesh = test_sharding.make_mesh()
    specs = [NamedSharding(mesh, spec) for spec in (P("data", None, "model"), P("data"), P("data"))]
    split = [tuple(jax.device_put(x, s) for x, s in zip(xs, specs, strict=True)) for xs in (X, U)]
    compiled = calls.quick_jit(MODES[mode](ours)).lower(*split).compile()
    found = test_sharding.collectives(compiled)
    assert set(found) == ({"all-reduce"} if mode != "jvp" else set())
    assert len(found) <= 4
    calls.assert_same(jax.device_get(compiled(*split)), expected_of(mode), 5e-5)


@NEW_JAX
@pytest.mark.parametrize("mode", ["jvp", "forward-over-reverse"])
def test_explicit_axes(mode: str) -> None:
    mesh = small_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        split = jax.device_put((X, U), NamedSharding(mesh, P("data", None, "model")))
        found = calls.quick_jit(MODES[mode](ours))(*split)
    calls.assert_same(jax.device_get(found), expected_of(mode), 5e-5)


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("mode", "jitted", "check_vma", "axes"),
    [
        ("jvp", True, True, "all"),
        ("jvp", False, True, "all"),
        ("forward-over-reverse", True, True, "all"),
        ("forward-over-reverse", False, False, "all"),
        ("reverse-over-forward", True, False, "all"),
        ("forward-over-reverse", True, True, "some"),
        ("jvp", True, False, "some"),
    ],
    ids=str,
)
def test_within_shard_map(mode: str, jitted: bool, check_vma: bool, axes: str) -> None:
    spec, names = (P("data", None, "model"), {"data", "model"}) if axes == "all" else (P("data"), {"data"})
    options = {"in_specs": spec, "out_specs": spec, "check_vma": check_vma, "axis_names": names}
    run = jax.shard_map(MODES[mode](ours), mesh=small_mesh(), **options)
    found = (calls.quick_jit(run) if jitted else run)(X, U)
    calls.assert_same(jax.device_get(found), expected_of(mode), 5e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_of_a_shard_map(check_vma: bool) -> None:
    """Keys are replicated over the batch: their gradients are sums over devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda q, k, v: jax.vmap(lambda q: ours(q, k, v))(q[:, None])[:, 0],
        mesh=mesh,
        in_specs=(P("data"), P(), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    x, u = ((y[0], y[1][:1], y[2][:1]) for y in (X, U))

    def one_device(q: Any, k: Any, v: Any) -> jax.Array:
        return plain(q, *(jnp.broadcast_to(y, (4, *y.shape[1:])) for y in (k, v)))

    def run(f: Any) -> Any:
        return jax.device_get(calls.quick_jit(lambda x, u: [mode(f)(x, u) for mode in MODES.values()])(x, u))

    calls.assert_same(run(mapped), run(one_device), 5e-5)


def test_eager_transposes_of_a_jitted_function_get_their_devices() -> None:
    """JAX lowers without devices what has no `custom_partitioning` in sight, and then asks to file a bug."""
    x, u = jax.device_put((X, U), NamedSharding(small_mesh(), P("data", None, "model")))
    out, pullback = jax.vjp(jax.jit(ours), *x)
    _, line = jax.linearize(jax.jit(jax.grad(loss(ours), ARGS)), *x)
    assert len(out.sharding.device_set) == 4
    found = jax.device_get((pullback(out), line(*u)))
    expected = (lambda out, f: f(out))(*jax.vjp(plain, *X)), MODES["forward-over-reverse"](plain)(X, U)
    calls.assert_same(found, jax.device_get(expected), 5e-5)
