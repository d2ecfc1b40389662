# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""checkpoint, scan, donation, checkify and export."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import attention
from jax_fastattn.ffi import TARGET_NAME
from jax_fastattn.ops.backward import gradient_op
from jax_fastattn.ops.forward import attend_op
from jax_fastattn.ops.partitioned import CACHED_FUNCTIONS
from jax_fastattn.ops.vjp import LSE_NAME, OUT_NAME
from jax_fastattn.spec import QKV, AttentionSpec

POLICIES = jax.checkpoint_policies

# Policy, and the kernel launches of both passes: 2, and 1 more where the forward pass runs again.
CHECKPOINTS = {
    "nothing": (POLICIES.nothing_saveable, 3),
    "everything": (POLICIES.everything_saveable, 2),
    "both-names": (POLICIES.save_only_these_names(OUT_NAME, LSE_NAME), 2),
    "output-alone": (POLICIES.save_only_these_names(OUT_NAME), 3),
    "log-sum-exp-alone": (POLICIES.save_only_these_names(LSE_NAME), 3),
}


def layer(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Self-attention between two products, `[B, T, N, H]`."""
    query, key, value = (jnp.einsum("btnh,hk->btnk", x, w) for w in weight)
    return x + attention(query, key[:, :, ::2], value[:, :, ::2], is_causal=True)


def make_layers(count: int = 3, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    weights = jax.random.normal(jax.random.key(0), (count, 3, 8, 8), dtype)
    return weights * 0.3, jax.random.normal(jax.random.key(1), (2, 5, 4, 8), dtype)


def loss(weights: jax.Array, x: jax.Array, function: Any = layer) -> jax.Array:
    for weight in weights:
        x = function(weight, x)
    return jnp.sum(jnp.sin(x.astype(jnp.float32)))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_policies(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy, launches = CHECKPOINTS[name]
    gradient = jax.grad(lambda *args: loss(*args, function=jax.checkpoint(layer, policy=policy)), argnums=(0, 1))
    calls.assert_same(jax.jit(gradient)(*make_layers()), jax.jit(jax.grad(loss, argnums=(0, 1)))(*make_layers()))
    calls.lower_for_cuda(monkeypatch, tmp_path)
    text = calls.cuda_text(gradient, *make_layers(dtype=jnp.bfloat16))
    assert calls.count_launches(text) == 3 * launches


def test_names_are_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "semantics.md").read_text()
    assert f"`{OUT_NAME}`" in page
    assert f"`{LSE_NAME}`" in page


def test_scan_over_layers() -> None:
    weights, x = make_layers()

    def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, weight: (layer(weight, x), None), x, weights)
        return jnp.sum(jnp.sin(x))

    found, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(weights, x) for f in (scanned, loss))
    calls.assert_same(found, expected)


def test_scan_over_layers_with_checkpoint_launches_once_in_each_body(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = POLICIES.save_only_these_names(OUT_NAME, LSE_NAME)
    body = jax.checkpoint(layer, policy=policy, prevent_cse=False)

    def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, weight: (body(weight, x), None), x, weights)
        return jnp.sum(jnp.sin(x.astype(jnp.float32)))

    weights, x = make_layers()
    calls.assert_same(jax.jit(jax.grad(scanned))(weights, x), jax.jit(jax.grad(loss))(weights, x))
    calls.lower_for_cuda(monkeypatch, tmp_path)
    assert calls.count_launches(calls.cuda_text(jax.grad(scanned), *make_layers(dtype=jnp.bfloat16))) == 2


def test_donated_query_is_used_up() -> None:
    query, key, value = dataclasses.replace(calls.EVERYTHING, v_head_dim=None).operands(jax.random.key(0))[:3]
    expected = attention(query, key, value)
    donated = jnp.array(query)
    step = jax.jit(attention, donate_argnums=0)
    assert "donor" in (text := step.lower(donated, key, value).as_text()) or "aliasing_output" in text
    calls.assert_same(step(donated, key, value), expected, tolerance=1e-6)
    assert donated.is_deleted()


def test_donated_training_step() -> None:
    weights, x = make_layers()
    gradient = jax.jit(jax.grad(loss))(weights, x)
    donated = jnp.array(weights)
    found = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), donate_argnums=0)(donated, x)
    calls.assert_same(found, weights - 0.1 * gradient)
    assert donated.is_deleted()


def call_everything(arrays: calls.Arrays) -> Any:
    return attention(**arrays, **calls.options_of(calls.EVERYTHING.spec()), return_residual=True)


def round_trip(exported: Any, vjp_order: int = 0) -> Any:
    return jax.export.deserialize(exported.serialize(vjp_order=vjp_order))


def test_checkify_finds_what_is_not_finite_by_a_check_of_the_result() -> None:
    """As docs/semantics.md has it; `float_checks` alone does not look into a call."""
    _, x = make_layers()

    def unchecked(x: jax.Array) -> jax.Array:
        return attention(x, x, x)

    def checked(x: jax.Array) -> jax.Array:
        out = unchecked(x)
        checkify.check(jnp.isfinite(out).all(), "attention: not finite")
        return out

    def errors_of(function: Any, x: jax.Array) -> str | None:
        errors = checkify.float_checks | checkify.user_checks
        error, _ = jax.jit(checkify.checkify(function, errors=errors))(x)
        return error.get()

    bad = x.at[0, 0, 0, 0].set(jnp.inf)  # inf - inf in the softmax
    assert np.isnan(unchecked(bad)).any()
    assert errors_of(unchecked, bad) is None
    assert "attention: not finite" in str(errors_of(checked, bad))
    assert errors_of(checked, x) is None


def test_export_runs_elsewhere_forward_and_backward() -> None:
    arrays = calls.arrays_of(calls.EVERYTHING.operands(jax.random.key(0)))
    exported = round_trip(jax.export.export(jax.jit(call_everything))(arrays), vjp_order=1)
    calls.assert_same(exported.call(arrays), jax.jit(call_everything)(arrays), tolerance=1e-6)

    def gradient(function: Any) -> Any:
        return jax.grad(lambda query: jnp.sum(jnp.sin(function(arrays | {"query": query})[0])))(arrays["query"])

    calls.assert_same(gradient(exported.call), gradient(call_everything), tolerance=1e-6)


def test_export_for_another_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    arrays = [jax.ShapeDtypeStruct((2, length, heads, 8), jnp.bfloat16) for length, heads in ((5, 6), (7, 3), (7, 3))]
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    with pytest.raises(ValueError, match=TARGET_NAME):
        jax.export.export(jax.jit(attention), platforms=["cuda"])(*arrays).serialize()
    exported = jax.export.export(jax.jit(attention), platforms=["cuda"], disabled_checks=checks)(*arrays)
    loaded = round_trip(exported, vjp_order=1)
    assert loaded.platforms == ("cuda",)
    assert [x.shape for x in loaded.out_avals] == [(2, 5, 6, 8)]
    assert loaded.mlir_module().count(f"stablehlo.custom_call @{TARGET_NAME}") == 1
    assert loaded.vjp().mlir_module().count(f"stablehlo.custom_call @{TARGET_NAME}") == 2
    with pytest.raises(ValueError, match="cuda"):
        loaded.call(*(jnp.zeros(x.shape, x.dtype) for x in arrays))


def test_export_for_several_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One file runs the kernels on CUDA and the XLA path here."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    query, key, value = (x.astype(jnp.bfloat16) for x in calls.EVERYTHING.operands(jax.random.key(0))[:3])
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    export = jax.export.export(jax.jit(attention), platforms=["cpu", "cuda"], disabled_checks=checks)
    loaded = round_trip(export(query, key, value))
    assert TARGET_NAME in loaded.mlir_module()
    np.testing.assert_array_equal(loaded.call(query, key, value), jax.jit(attention)(query, key, value))


def test_export_for_several_devices_inside_shard_map() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")
    query = jax.device_put(jax.random.normal(jax.random.key(0), (8, 5, 4, 8)), NamedSharding(mesh, split))
    sharded = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=split, out_specs=split))
    loaded = round_trip(jax.export.export(sharded)(query, query, query))
    assert loaded.nr_devices == 8
    np.testing.assert_array_equal(jax.jit(loaded.call)(query, query, query), sharded(query, query, query))
    with pytest.raises(NotImplementedError, match="serialization"):
        jax.export.export(jax.jit(attention))(query, query, query).serialize()


OPS = {"forward": (attend_op, {"mapped": (False,) * 3}), "backward": (gradient_op, {"with_dlse": False, "wanted": QKV})}


@pytest.mark.parametrize("kept", ["partitioned", "jitted"])
@pytest.mark.parametrize("name", OPS)
def test_a_new_scale_does_not_grow_caches_for_ever(name: str, kept: str) -> None:
    op, params = OPS[name]
    make = getattr(op, kept)

    def new_function(scale: float) -> weakref.ref[Any]:
        return weakref.ref(make(tuple(({"spec": AttentionSpec(scale=scale)} | params).items())))

    first = new_function(-1.0)
    x = jnp.ones((1, 2, 1, 4))
    jax.block_until_ready(first()(*[x] * 3, *((x, x[..., 0], x) if name == "backward" else ())))
    last = [new_function(float(scale)) for scale in range(CACHED_FUNCTIONS)][-1]
    gc.collect()
    assert first() is None
    assert last() is not None
