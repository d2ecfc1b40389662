# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`attention_varlen` under transformations, without rows, and what it costs; `test_api.py` has its arguments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fastattn import attention_varlen
from jax_fastattn.cases.case import Case
from jax_fastattn.ffi import TARGET_NAME
from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.layouts import packed
from jax_fastattn.ops.vjp import LSE_NAME, OUT_NAME
from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.xla.blocks import Blocks
from jax_fastattn.xla.chunks import CPU

CU_Q, CU_K = jnp.array([1, 4, 4, 9]), jnp.array([0, 5, 7, 11])
OPTIONS = {"is_causal": True, "query_offset": "bottom_right", "logits_soft_cap": 2.0, "local_window_size": (3, None)}


def draw(dtype: Any = jnp.float32, rows: tuple[int, int] = (10, 12)) -> list[jax.Array]:
    """Query `[T, 4, 8]`, key `[S, 2, 8]`, value `[S, 2, 16]` and sinks."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (rows[0], 4, 8), (rows[1], 2, 8), (rows[1], 2, 16)
    arrays = [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=False)]
    return [*arrays, jax.random.normal(keys[3], (4,))]


def attend(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array, *boundaries: jax.Array) -> Any:
    return attention_varlen(query, key, value, *(boundaries or (CU_Q, CU_K)), sinks=sinks, **OPTIONS)


def loss(function: Callable[..., Any], *arrays: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(function(*arrays).astype(jnp.float32)))


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of query, key, value and sinks."""
    return jax.grad(functools.partial(loss, function), argnums=(0, 1, 2, 3))


@pytest.mark.parametrize(("names", "launches"), [((OUT_NAME, LSE_NAME), 2), ((), 3)], ids=["saved", "again"])
def test_checkpoint(names: tuple[str, ...], launches: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    saved = gradients(jax.checkpoint(attend, policy=policy))
    calls.assert_same(jax.jit(saved)(*draw()), jax.jit(gradients(attend))(*draw()))
    calls.lower_for_cuda(monkeypatch, tmp_path)
    assert calls.count_launches(calls.cuda_text(saved, *draw(jnp.bfloat16))) == launches


def test_export_runs_elsewhere_forward_and_backward() -> None:
    """With other boundaries, too."""
    arrays, others = draw(), (jnp.array([0, 2, 9, 10]), jnp.array([2, 3, 3, 12]))
    export = jax.export.export(jax.jit(attend))(*arrays, CU_Q, CU_K)
    loaded = jax.export.deserialize(export.serialize(vjp_order=1))
    for boundaries in ((CU_Q, CU_K), others):
        calls.assert_same(loaded.call(*arrays, *boundaries), attend(*arrays, *boundaries))
        found, expected = (gradients(f)(*arrays, *boundaries) for f in (loaded.call, attend))
        calls.assert_same(found, expected)


def test_export_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    export = jax.export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=checks)
    loaded = jax.export.deserialize(export(*draw(jnp.bfloat16), CU_Q, CU_K).serialize(vjp_order=1))
    assert loaded.platforms == ("cuda",)
    assert [x.shape for x in loaded.out_avals] == [(10, 4, 16)]
    assert loaded.mlir_module().count(f"stablehlo.custom_call @{TARGET_NAME}") == 1
    assert loaded.vjp().mlir_module().count(f"stablehlo.custom_call @{TARGET_NAME}") == 2


def _vmapped(arrays: list[jax.Array]) -> tuple[Callable[..., Any], list[jax.Array]]:
    """A batch of 4 calls with boundaries of their own, which share the sinks; and its arguments."""
    query, key, value, sinks = arrays
    batch = [jnp.stack([x * i for i in range(1, 5)]) for x in (query, key, value)]
    boundaries = jnp.stack([CU_Q + i - 1 for i in range(4)]), jnp.stack([CU_K - i for i in range(4)])
    return jax.vmap(attend, in_axes=(0, 0, 0, None, 0, 0)), [*batch, sinks, *boundaries]


def test_vmap_launches_once_in_each_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    function, arrays = _vmapped(draw(jnp.bfloat16))
    assert calls.count_launches(calls.cuda_text(function, *arrays)) == 1
    assert calls.count_launches(calls.cuda_text(gradients(function), *arrays)) == 2


def test_a_mesh_splits_a_batch_of_packed_calls_and_their_heads() -> None:
    function, arrays = _vmapped(draw())
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    axes = [P("data", None, "tensor")] * 3 + [P("tensor")] + [P("data")] * 2
    split = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, axes, strict=True)]
    compiled = jax.jit(gradients(function)).lower(*split).compile()
    assert "all-gather" not in compiled.as_text()
    calls.assert_same(compiled(*split), jax.jit(gradients(function))(*arrays))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_deterministic_calls_have_kernels_that_add_in_one_order(arch: str) -> None:
    case = Case("bfloat16", 1, 16000, 16000, packed=((9000, 7000),) * 2)
    for deterministic in (False, True):
        problem = dataclasses.replace(case, deterministic=deterministic).problem()
        assert kernel_spec(problem, "backward", arch).ordered == deterministic


@pytest.mark.parametrize("rows", [(0, 12), (10, 0), (0, 0)], ids=["no query", "no key", "neither"])
def test_no_rows(rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    *qkv, sinks = draw(rows=rows)
    boundaries = tuple(jnp.minimum(x, count) for x, count in zip((CU_Q, CU_K), rows, strict=True))
    run = functools.partial(attention_varlen, cu_seqlens_q=boundaries[0], cu_seqlens_k=boundaries[1], **OPTIONS)
    out, lse = run(*qkv, sinks=sinks, return_residual=True)
    assert (out.shape, lse.shape) == ((rows[0], 4, 16), (rows[0], 4))
    assert not out.any()
    inside = (np.arange(rows[0]) >= 1) & (np.arange(rows[0]) < 9)
    np.testing.assert_allclose(lse, np.where(inside[:, None], sinks, -np.inf), rtol=1e-6)
    found = jax.grad(lambda *x: jnp.sum(run(*x)), argnums=(0, 1, 2))(*qkv)
    assert all(x.shape == y.shape and not x.any() for x, y in zip(found, qkv, strict=True))
    calls.lower_for_cuda(monkeypatch, tmp_path)
    assert "custom_call" not in calls.cuda_text(run, *(x.astype(jnp.bfloat16) for x in qkv))


@pytest.mark.parametrize("boundary", [0, 4, 99], ids=["before", "inside", "past"])
@pytest.mark.parametrize("offset", [0, "bottom_right", jnp.zeros(0, jnp.int32)], ids=["0", "bottom_right", "array"])
def test_boundaries_with_one_entry_have_no_sequence(boundary: int, offset: Any) -> None:
    """All rows are padding, as in a batch of no documents."""
    query, key, value, sinks = draw(rows=(10, 12))
    starts = jnp.array([boundary])

    def results(*operands: jax.Array) -> Any:
        return attention_varlen(
            *operands, starts, starts, sinks=sinks, query_offset=offset, is_causal=True, return_residual=True
        )

    (out, lse), pullback = jax.vjp(results, query, key, value)
    assert (out.shape, lse.shape) == ((10, 4, 16), (10, 4))
    assert not out.any() and np.isneginf(lse).all()
    assert not any(x.any() for x in pullback((jnp.ones_like(out), jnp.ones_like(lse))))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [2048, 256])
def test_cost_grows_with_the_sum_of_squares(length: int, is_causal: bool) -> None:
    """The XLA path visited the square of all rows."""
    rows = 1 << 13
    boundaries = jnp.arange(0, rows + 1, length)
    sequences = packed.sequences(boundaries, boundaries, (rows, rows))[None]
    spec = AttentionSpec(1.0, is_causal=is_causal, present=("query", "key", "value", "sequences"))

    @jax.jit
    def visited(sequences: jax.Array) -> Any:
        """Returns the pairs of a chunk, and how many chunks of keys each chunk of queries visits."""
        arrays = [jnp.zeros((1, rows, 8, 1))] * 3
        blocks = Blocks.of(spec, Operands(*arrays, sequences=sequences), CPU)
        counts = [blocks.key_chunks(blocks.queries.span(jnp.int32(i))) for i in range(blocks.queries.count)]
        return blocks.queries.chunk * blocks.keys.chunk, [end - begin for begin, end in counts]

    area, counts = visited(sequences)
    pairs = int(area) * sum(max(int(count), 0) for count in counts)
    squares = rows // length * length**2 * (0.5 if is_causal else 1.0)
    chunk = int(area) ** 0.5
    assert squares <= pairs <= squares * (1 + chunk / length) ** 2 + rows * chunk


def test_nan_of_a_sequence_stays_in_its_batch_entry_and_key_value_head() -> None:
    """All that the XLA path promises; the kernels keep it in the sequence, too."""
    arrays = [jnp.stack([x] * 2) for x in draw()[:3]]
    broken = [x.at[0, 5:8, : x.shape[2] // 2].set(jnp.nan) for x in arrays]
    call = lambda q, k, v: attention_varlen(q, k, v, CU_Q, CU_K, is_causal=True)

    def results(arrays: list[jax.Array]) -> Any:
        out, pullback = jax.vjp(jax.vmap(call), *arrays)
        return out, *pullback(jnp.ones_like(out))

    found, expected = jax.jit(results)(broken), jax.jit(results)(arrays)
    for x, y in zip(found, expected, strict=True):
        half = x.shape[2] // 2
        np.testing.assert_array_equal(x[1], y[1])
        np.testing.assert_array_equal(x[0, :, half:], y[0, :, half:])
    assert np.isnan(found[0][0, :, :2]).any()
