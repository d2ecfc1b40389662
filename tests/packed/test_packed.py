# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences between `attention_varlen` and the kernels: boundaries, joined batch entries, records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import compare

from jax_fastattn import attention_varlen, target_arch
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.forward.config import SharedMemory
from jax_fastattn.kernels.tiles.records import Record
from jax_fastattn.layouts import packed
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda.launch_plan import LaunchPlan
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.xla import passes as xla
from jax_fastattn.xla.chunks import ACCELERATOR


def _launch(plan: LaunchPlan) -> dict[str, jax.Array]:
    """Computes by the XLA path what a launch should, of the sequences that the records name."""
    kernel, problem, shapes = plan.kernel, plan.problem, plan.shapes
    arrays: Any = plan.operands
    assert plan.lists is None and arrays["query"].shape[0] == 1 and arrays["sequences"] is None
    ids = [np.full((1, length), -1 - side) for side, length in enumerate((problem.query_length, problem.key_length))]
    offset, entry = np.zeros((2, 1, problem.query_length), np.int32)
    for i, words in enumerate(np.asarray(arrays["query_tiles"])):
        record = Record(*map(int, words))
        if record.rows and record.entry >= 0:
            queries = slice(record.first, record.first + record.rows)
            ids[0][0, queries] = ids[1][0, record.first_other : record.first_other + record.others] = i
            offset[0, queries] = record.first_other - record.first + record.offset
            entry[0, queries] = record.entry
    rows = jnp.asarray(ids[0] >= 0)
    query_ids, key_ids = (jnp.asarray(x, jnp.int32) for x in ids)
    given = {"query_offset": jnp.asarray(offset), "query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    operands = Operands(*(arrays[name] for name in ("query", "key", "value")), **given)
    if kernel.op == "forward":
        out, lse = xla.forward(problem.spec, operands)
        if arrays["sinks"] is not None:
            total = jnp.logaddexp(lse, arrays["sinks"][entry if arrays["sinks"].shape[0] > 1 else entry * 0])
            out, lse = out * jnp.exp(lse - total)[..., None].astype(out.dtype), total
        return {"out": out, "lse": jnp.where(rows[..., None], lse, -jnp.inf)}
    out, lse, dout, dlse = (arrays[name] for name in ("out", "lse", "dout", "dlse"))
    # The sinks are in the log-sum-exp alone.
    spec = dataclasses.replace(problem.spec, is_part=True)
    found = xla.backward(spec, operands, out, lse, dout, dlse)
    terms = {}
    if kernel.dsinks:
        delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1) - (0.0 if dlse is None else dlse)
        sinks = arrays["sinks"][entry if arrays["sinks"].shape[0] > 1 else entry * 0]
        terms["dsinks_terms"] = jnp.where(lse == -jnp.inf, 0.0, -jnp.exp(sinks - lse) * delta).swapaxes(1, 2)
        assert terms["dsinks_terms"].shape == shapes["dsinks_terms"]
    scratch = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return scratch | {"dq": found.query, "dk": found.key, "dv": found.value} | terms


BOUNDARIES = ([2, 7, 7, 40, 41], [0, 9, 30, 30, 47])


@pytest.mark.parametrize("sinks_per_entry", [False, True])
@pytest.mark.parametrize(("arch", "dlse"), [("sm_80", True), ("sm_90a", False), ("sm_90a", True)])
def test_launches_get_the_sequences_of_all_batch_entries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sinks_per_entry: bool, arch: str, dlse: bool
) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path, arch)
    monkeypatch.setattr(LaunchPlan, "bind", _launch)
    keys = iter(jax.random.split(jax.random.key(0), 9))
    draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32).astype(jnp.bfloat16)
    entries = [
        packed.with_offsets(packed.sequences(*(jnp.array(x) + b for x in BOUNDARIES), (44, 49)), jnp.arange(4) - b)
        for b in range(2)
    ]
    operands = Operands(
        draw(2, 44, 4, 8),
        draw(2, 49, 2, 8),
        draw(2, 49, 2, 16),
        sinks=draw(1 + sinks_per_entry, 4).astype(jnp.float32),
        sequences=jnp.stack(entries),
    )
    spec = AttentionSpec(0.3, is_causal=True, window=(20, None), present=operands.present())
    dout, cotangent = draw(2, 44, 4, 16), draw(2, 44, 4).astype(jnp.float32) if dlse else None
    out, lse = cuda.forward(spec, operands)
    gradients = cuda.backward(spec, operands, out, lse, dout, cotangent)
    found = compare.Results.of(out, lse, gradients)
    names = ("query", "key", "value")
    wide = operands._replace(**{name: getattr(operands, name).astype(jnp.float32) for name in names})
    expected = compare.evaluate(attention_reference, spec, wide, dout, cotangent)
    for name, x, y in zip(compare.Results._fields, found, expected, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            largest = float(jnp.max(jnp.where(jnp.isfinite(y), jnp.abs(y), 0.0)))
            np.testing.assert_allclose(x.astype(jnp.float32), y, atol=0.05 * largest, err_msg=name)


def test_other_boundaries_lower_the_same_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With kernels, which take boundaries as data."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    x = jnp.zeros((300, 2, 64), jnp.bfloat16)

    def loss(x: jax.Array, cu: jax.Array) -> jax.Array:
        return attention_varlen(x, x, x, cu, cu, is_causal=True).astype(jnp.float32).sum()

    with target_arch("sm_90a"):
        texts = [calls.cuda_text(jax.grad(loss), x, jnp.array(cu)) for cu in ([0, 100, 300], [7, 8, 9])]
    assert texts[0] == texts[1] and calls.count_launches(texts[0]) == 2


def test_an_eager_call_waits_for_no_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them on the host would be a wait for the device."""

    def refuse(array: jax.Array) -> None:
        raise AssertionError(f"the host reads {array.aval}")

    x, cu, offset = jnp.ones((30, 2, 8)), jnp.array([0, 10, 30]), jnp.array([1, -2])
    monkeypatch.setattr(type(x), "_value", property(refuse))
    with pytest.raises(AssertionError, match="the host reads"):
        int(cu[1])
    for option in (0, offset, "bottom_right"):
        attend = lambda x, option=option: attention_varlen(x, x, x, cu, cu, is_causal=True, query_offset=option)
        out, pullback = jax.vjp(attend, x)
        jax.block_until_ready(pullback(out))


def test_bottom_right_is_the_offset_of_each_sequence() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (n, 2, 8)) for key, n in zip(keys, (20, 30, 30), strict=True))
    cu_q, cu_k = jnp.array([1, 9, 9, 20]), jnp.array([0, 12, 20, 25])
    call = lambda offset: attention_varlen(q, k, v, cu_q, cu_k, is_causal=True, query_offset=offset)
    np.testing.assert_array_equal(call("bottom_right"), call(jnp.array([4, 8, -6])))
    with pytest.raises(ValueError, match="`query_offset` is 'top_left', expected"):
        call("top_left")


def test_chunks_of_queries_visit_the_keys_of_their_sequences_alone() -> None:
    """The XLA path took time in proportion to the square of all rows."""
    random = np.random.default_rng(5)
    for _ in range(20):
        cu = [np.sort(random.integers(0, 65, 5)) for _ in range(2)]
        sequences = packed.sequences(jnp.array(cu[0]), jnp.array(cu[1]), (64, 64))[None]
        begin = int(random.integers(0, 60))
        end = int(random.integers(begin + 1, 65))
        owners = [b for b in range(4) if max(cu[0][b], begin) < min(cu[0][b + 1], end)]
        first, last = (int(x) for x in packed.key_range(sequences, begin, end))
        if owners:
            assert (first, last) == (cu[1][owners[0]], cu[1][owners[-1] + 1])
        else:
            assert first > last


def test_loops_search_nothing() -> None:
    """XLA for GPUs refused a slice in the loop over chunks whose start a loop of its own had found."""
    x = jnp.zeros((1, 64, 2, 8))
    operands = Operands(x, x, x, sequences=packed.sequences(*2 * [jnp.array([0, 30, 64])], (64, 64))[None])
    spec = AttentionSpec(1.0, present=operands.present())
    tuning = dataclasses.replace(ACCELERATOR, whole=0, chunk=16, min_chunk=16)
    text = jax.jit(lambda x: xla.forward(spec, x, tuning)).lower(operands).as_text()
    assert text.count("stablehlo.while") == 2  # over queries and over keys


@pytest.mark.parametrize("short", [False, True])
def test_hopper_forward_counts_tiles_where_its_ctas_are_persistent(short: bool) -> None:
    """CTAs for head dims up to 64 take one tile each; those of the portable kernel do for every head dim."""
    for head_dim in range(8, 257, 8):
        hopper = KernelSpec("forward", "sm_90a", "bfloat16", head_dim, 8, packed=True, family="sm90")
        hopper = configured(hopper, short=short)
        assert hopper.has_tile_counter == SharedMemory.of(hopper, hopper.config).has_tile_counter == (head_dim > 64), (
            hopper
        )
        assert not dataclasses.replace(hopper, packed=False).has_tile_counter
        assert not configured(dataclasses.replace(hopper, family="sm80", arch="sm_80")).has_tile_counter
