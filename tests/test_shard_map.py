# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""shard_map with its replication checks on: each device runs its share, gradients of replicated arrays are summed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import calls
import jax
import numpy as np
import pytest
import test_sharding
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention, attention_varlen, ring_attention

CASE = test_sharding.CASE
SPECS = {name: P(*axes) for name, axes in test_sharding.SPLIT.items()}


def run(case: calls.Case, specs: dict[str, P], mesh: Any) -> Any:
    """Gradients of the sum of all devices' losses."""
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    spec = case.spec()

    def local(arrays: calls.Arrays, dout: jax.Array, dlse: jax.Array) -> jax.Array:
        out, lse = calls.attention(**arrays, **calls.options_of(spec), return_residual=True)
        total = (out * dout).sum() + jax.numpy.where(jax.numpy.isfinite(lse), lse * dlse, 0.0).sum()
        return jax.lax.psum(total, ("data", "model"))

    rows = P("data", None, "model")
    in_specs = ({name: specs[name] for name in arrays}, rows, rows)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=True)
    dout, dlse = case.cotangents(jax.random.key(1))
    return jax.jit(lambda arrays: calls.gradients(lambda x: mapped(x, dout, dlse), arrays))(arrays)


def test_split_everywhere() -> None:
    found = run(CASE, SPECS, test_sharding.make_mesh())
    calls.assert_same(found, calls.expected_gradients(CASE)(calls.arrays_of(CASE.operands(jax.random.key(0)))), 5e-5)


@pytest.mark.parametrize("name", ["bias", "sinks", "scale", "integers", "key-value"])
def test_gradients_of_replicated_arrays_are_summed(name: str) -> None:
    """What is replicated over the batch serves every batch entry: the oracle repeats it."""
    change: dict[str, Any] = {
        "bias": {"bias": "nts"},
        "sinks": {"bias": None},
        "scale": {"bias": None, "scale": -0.6, "scale_is_array": True},
        "integers": {"mask": "ts"},
        "key-value": {"group": 4, "num_kv_heads": 1, "bias": "ns"},
    }[name]
    case = dataclasses.replace(CASE, **change)
    specs = dict(SPECS)
    if case.bias is not None and "b" not in case.bias:
        specs["bias"] = P(None, "model")
    if name == "integers":
        specs["mask"] = P()
    if name == "key-value":  # one head, on every device of the model axis
        specs |= {"key": P("data"), "value": P("data")}
    found = run(case, specs, test_sharding.make_mesh())
    calls.assert_same(found, calls.expected_gradients(case)(calls.arrays_of(case.operands(jax.random.key(0)))), 5e-5)


def test_packed_sequences_on_each_device() -> None:
    """Every device holds its own packed sequences."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    query, key, value = (x.reshape(-1, *x.shape[2:]) for x in CASE.operands(jax.random.key(0))[:3])
    starts_q, starts_k = jax.numpy.array([0, 4, 15, 0, 9, 14]), jax.numpy.array([0, 8, 21, 0, 2, 20])
    arrays = (query, key, value, starts_q, starts_k)

    def packed(*arrays: jax.Array) -> jax.Array:
        return attention_varlen(*arrays, is_causal=True)

    mapped = jax.jit(jax.shard_map(packed, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=True))
    halves = [packed(*(x[i * len(x) // 2 : (i + 1) * len(x) // 2] for x in arrays)) for i in range(2)]
    calls.assert_same(jax.device_get(mapped(*arrays)), jax.device_get(jax.numpy.concatenate(halves)))


@pytest.mark.parametrize(("packed", "check_vma"), [(False, True), (True, False)], ids=["attention", "packed"])
def test_without_jit(packed: bool, check_vma: bool) -> None:
    """jax evaluates a `shard_map` primitive by primitive then."""
    arrays = CASE.operands(jax.random.key(0))[:3]

    def local(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not packed:
            return calls.attention(*arrays, is_causal=True, return_residual=True)
        rows = [x.reshape(-1, *x.shape[2:]) for x in arrays]
        starts = [jax.numpy.array([0, 4, len(x)]) for x in rows[:2]]
        out, lse = attention_varlen(*rows, *starts, return_residual=True)
        return out.reshape(*arrays[0].shape[:3], -1), lse.reshape(arrays[0].shape[:3])

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    calls.assert_same(jax.device_get(mapped(*arrays)), jax.device_get(jax.jit(mapped)(*arrays)))


@pytest.mark.parametrize("auto", [P("data", None, "model"), P(("data", "model")), P("data")], ids=str)
def test_some_axes_alone(auto: P) -> None:
    """The other mesh axis splits the heads, the batch or nothing; the XLA path needs no communication."""
    case = dataclasses.replace(test_sharding.PLAIN, batch=8)
    arrays = calls.arrays_of(case.operands(jax.random.key(0)))
    mesh = test_sharding.make_mesh()

    def run(attend: Any) -> Any:
        def results(arrays: calls.Arrays) -> Any:
            out, vjp = jax.vjp(lambda x: attend(x["query"], x["key"], x["value"]), arrays)
            return out, vjp(jax.numpy.sin(out))[0]

        return calls.quick_jit(results)

    mapped = jax.shard_map(
        calls.attention, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names=frozenset({"data"})
    )
    split = jax.device_put(arrays, jax.sharding.NamedSharding(mesh, auto))
    compiled = run(mapped).lower(split).compile()
    assert test_sharding.collectives(compiled) == []
    calls.assert_same(jax.device_get(compiled(split)), jax.device_get(run(calls.attention)(arrays)))


def test_a_ring_has_its_gradients_where_a_shard_map_checks_no_axes() -> None:
    """With jax 0.8, marks of varying axes summed the gradients over the devices of the ring."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 4))

    def gradient(function: Any, x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: (function(x, x, x, is_causal=True) * x).sum())(x)

    ring = functools.partial(gradient, functools.partial(ring_attention, axis_name="rows"))
    rows = P(None, "rows")
    mapped = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    np.testing.assert_allclose(mapped(x), gradient(attention, x), atol=2e-6)
