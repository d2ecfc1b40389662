# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Hopper's backward kernels with lists in the emulator: the prepass first, then the kernels on what it writes."""

from __future__ import annotations

from dataclasses import dataclass

import emulated_masks
import emulated_prepass
import numpy as np
from emulated_backward import Sizes as DrawSizes
from emulated_backward import (
    bias_of,
    bias_plane,
    bias_scalars,
    compare_dbias,
    compare_dsinks_terms,
    dbias_buffers,
    draw_bias,
    draw_sinks,
    draw_units,
    fill,
    is_poison,
)
from emulated_hopper import backward_texts, few_heads, start
from emulated_launch import place
from emulated_prepass import Predicate

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.present import launch_buffers
from jax_fastattn.kernels.bias_shapes import bias_kind
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import backward_scratch
from jax_fastattn.kernels.sm90.backward.launches import BackwardKernel
from jax_fastattn.kernels.sums.tiles import key_list_tiles

CAP = 1.5


@dataclass(frozen=True)
class Case:
    """A backward call with a predicate.

    Attributes:
        predicate: what hides pairs, and sizes.
        head_dim, v_head_dim: of Q and K, and of V; the second is the first one by default.
        dtype: of the operands.
        ordered: whether CTAs add to dq in one order.
        cap: whether logits pass through a soft cap.
        sinks: whether there are sinks, whose gradient is asked for; a cotangent of log-sum-exps comes with it.
        one_row: whether all tiles of queries share a list of keys.
        alike: whether live keys say everything, since all queries see the same ones.
        bias: shape of a bias `[b, n, t, s]` of pairs or of keys, whose gradient is asked for.
    """

    predicate: Predicate
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    ordered: bool = False
    cap: bool = False
    sinks: bool = False
    one_row: bool = False
    alike: bool = False
    bias: tuple[int, int, int, int] | None = None

    @property
    def sizes(self) -> DrawSizes:
        """The sizes of the call."""
        predicate = self.predicate
        return DrawSizes(
            batch=predicate.batch,
            queries=predicate.queries,
            keys=predicate.keys,
            kv_heads=predicate.query_heads // predicate.group,
            scale=emulated_masks.SCALE,
            bias=self.bias,
        )

    @property
    def seen(self) -> np.ndarray:
        """What each query sees, `[B, N, T, S]`."""
        return emulated_masks.draw(self.predicate, self.spec)[1]

    @property
    def spec(self) -> KernelSpec:
        """The compile key."""
        bias = None if self.bias is None else bias_kind(self.bias)
        return configured(
            KernelSpec(
                op="backward",
                arch="sm_90a",
                operand_dtype=self.dtype,  # pyright: ignore[reportArgumentType]
                head_dim=self.head_dim,
                v_head_dim=self.v_head_dim or self.head_dim,
                group=self.predicate.group,
                family="sm90",
                listed=True,
                alike=self.alike,
                ordered=self.ordered,
                features=(codes.SOFT_CAP,) if self.cap else (),
                dlse=self.sinks,
                dsinks=self.sinks,
                bias=bias,
                bias_dtype=self.dtype if bias == "matrix" else None,  # pyright: ignore[reportArgumentType]
                dbias=bias is not None,
            )
        )


def _reference(case: Case, arrays: dict[str, np.ndarray], seen: np.ndarray) -> dict[str, np.ndarray]:
    """Returns output, log-sum-exp and gradients in float64; `seen` is `[B, N, T, S]`."""
    spec, scale = case.spec, emulated_masks.SCALE
    query, key, value, dout = (arrays[name].astype(np.float64) for name in ("query", "key", "value", "dout"))
    keys, values = key.repeat(spec.group, 2), value.repeat(spec.group, 2)
    logits, slope = scale * np.einsum("btnh,bsnh->bnts", query, keys), 1.0
    planes = [(b, n) for b in range(seen.shape[0]) for n in range(seen.shape[1])]
    if case.bias:
        logits = logits + np.stack([bias_of(arrays, b, n, seen.shape[1]) for b, n in planes]).reshape(
            *seen.shape[:2], *case.bias[2:]
        )
    if case.cap:
        tanh = np.tanh(logits / CAP)
        logits, slope = CAP * tanh, 1 - tanh**2
    lse = np.logaddexp.reduce(np.where(seen, logits, -np.inf), axis=3)
    if case.sinks:
        exists = np.arange(query.shape[1]) < _lengths(case)[:, None]
        lse = np.logaddexp(lse, np.where(exists[:, None], arrays["sinks"][..., None], -np.inf))
    p = np.where(seen, np.exp(logits - np.where(np.isinf(lse), 0, lse)[..., None]), 0)
    out = np.einsum("bnts,bsnd->btnd", p, values)
    dlse = arrays["dlse"].swapaxes(1, 2) if case.sinks else np.zeros(lse.shape)
    delta = np.einsum("btnd,btnd->bnt", out, dout) - dlse
    dlogits = p * (np.einsum("btnd,bsnd->bnts", dout, values) - delta[..., None]) * slope
    ds = dlogits * scale
    found = {"out": out, "lse": lse.swapaxes(1, 2), "dq": np.einsum("bnts,bsnh->btnh", ds, keys)}
    groups = (*key.shape[:3], spec.group)
    found["dk"] = np.einsum("bnts,btnh->bsnh", ds, query).reshape(*groups, -1).sum(3)
    found["dv"] = np.einsum("bnts,btnd->bsnd", p, dout).reshape(*groups, -1).sum(3)
    if case.bias:
        found["dbias"] = np.zeros(case.bias)
        axes = tuple(axis for axis in range(2) if case.bias[2 + axis] == 1)
        for b, n in planes:
            found["dbias"][bias_plane(found["dbias"], b, n, seen.shape[1])] += dlogits[b, n].sum(axes, keepdims=True)
    if case.sinks:
        weight = np.exp(arrays["sinks"][..., None] - np.where(np.isneginf(lse), np.inf, lse))
        found["dsinks_terms"] = (-weight * delta).swapaxes(1, 2)
    return found


def _lengths(case: Case) -> np.ndarray:
    """Returns how many queries of each batch entry are no padding."""
    predicate = case.predicate
    return np.array(predicate.query_lengths or (predicate.queries,) * predicate.batch)


def draw(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns operands of the launch, poisoned wherever nothing is seen, and what the launch should write."""
    spec, predicate = case.spec, case.predicate
    operands, seen = emulated_masks.draw(predicate, spec)
    arrays = emulated_masks.rounded(spec, operands)
    random = np.random.default_rng(predicate.seed + 1)
    shape = (*arrays["query"].shape[:3], spec.v_head_dim)
    arrays["dout"] = random.standard_normal(shape).astype(arrays["query"].dtype)
    if case.sinks:
        arrays |= {"sinks": draw_sinks(spec, case.sizes), "dlse": random.standard_normal(shape[:3]).astype(np.float32)}
    arrays |= draw_bias(spec, case.sizes, random, seen)
    wanted = _reference(case, arrays, seen)
    arrays |= {"out": wanted["out"].astype(arrays["query"].dtype), "lse": wanted["lse"].astype(np.float32)}
    arrays = emulated_masks.poisoned(spec, arrays, seen)
    if case.sinks:  # the log-sum-exp of a row that sees nothing is its sink, and has a cotangent
        arrays["dlse"] = fill(arrays["dlse"], np.arange(predicate.queries) >= _lengths(case)[:, None])
    arrays |= draw_units(spec, arrays)
    lists = emulated_prepass.run(predicate, spec.tiles_of(spec.config.main), operands)
    arrays |= {"query_lists": lists["lists"], "query_bits": lists["bits"], "key_tile_counts": lists["counts"]}
    if spec.lists_keys:
        lists = emulated_prepass.run(predicate, key_list_tiles(spec), operands, one_row=case.one_row)
        arrays |= {"key_lists": lists["lists"], "key_bits": lists["bits"], "key_classes": lists["classes"]}
    return arrays, wanted


def run(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what the kernels make of operands, in float64."""
    spec, predicate = case.spec, case.predicate
    kernel = BackwardKernel(spec)
    results = {"dq": "query", "dk": "key", "dv": "value"}
    arrays = arrays | {name: np.full(arrays[x].shape, np.nan, arrays[x].dtype) for name, x in results.items()}
    if case.sinks:
        shape = (predicate.batch, predicate.query_heads, predicate.queries)
        arrays |= {"dsinks_terms": np.full(shape, np.nan, np.float32)}
    arrays |= dbias_buffers(spec, case.sizes)
    for name, shape in backward_scratch(spec, predicate.batch, predicate.queries, predicate.query_heads).items():
        dtype = launch_buffers(spec)[name]
        arrays[name] = np.full(shape, np.nan if dtype == "float32" else -1000, dtype)
    memory, buffers = place(spec, arrays)
    stride = predicate.query_heads if case.sinks else 0
    scalars = emulated_masks.scalars(predicate, one_row=case.one_row)
    scalars = scalars._replace(logits_soft_cap=CAP, sinks_stride=stride, **bias_scalars(spec, case.sizes))
    scalars = scalars._replace(bias_parts=1 if spec.sums_dbias else None)
    texts = backward_texts(spec)
    for launch in kernel.launches(buffers, scalars, few_heads(kernel, scalars)):
        start(launch, texts, memory)
    names = [*results, *(["dsinks_terms"] if case.sinks else []), *dbias_buffers(spec, case.sizes)]
    return {name: memory.read(getattr(buffers, name), arrays[name].shape, arrays[name].dtype) for name in names}


def check(case: Case) -> dict[str, np.ndarray]:
    """Runs the kernels on poisoned operands, compares every gradient with float64, and returns them."""
    arrays, wanted = draw(case)
    found = run(case, arrays)
    tolerance = 2**-6 if case.dtype == "bfloat16" else 2**-9  # roundings of out, P and dS
    for name in ("dq", "dk", "dv"):
        atol = tolerance * np.abs(wanted[name]).max() + 1e-5
        np.testing.assert_allclose(found[name].astype(np.float64), wanted[name], atol=atol, rtol=0, err_msg=name)
    for name, operand in (("dq", "query"), ("dk", "key"), ("dv", "value")):
        dead = is_poison(arrays[operand]).any(-1)
        assert not found[name][dead].any(), f"{name} of rows that are hidden from everybody"
    if case.bias:
        wide = {name: x.astype(np.float64) for name, x in found.items()}
        compare_dbias(case.spec, case.sizes, wide, arrays, wanted["dbias"], case.seen, tolerance)
    if case.sinks:
        compare_dsinks_terms(found["dsinks_terms"], wanted["dsinks_terms"], tolerance)
    return found
