# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs kernels with lists in the emulators: the prepass first, then the kernel on what it has written."""

from __future__ import annotations

import emulated_prepass
import numpy as np
from emulated_backward import DTYPES, fill
from emulated_hopper import forward_texts, start
from emulated_launch import MULTIPROCESSORS, place
from emulated_prepass import Predicate

from jax_fastattn.kernels.arguments.scalars import BIAS_SCALARS, Scalars
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.forward.kernel import ForwardKernel
from jax_fastattn.limits import UNBOUNDED

SCALE = 0.3


def draw(predicate: Predicate, spec: KernelSpec) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns operands by name, in float64, and what each query sees, `[B, N, T, S]`."""
    random = np.random.default_rng(predicate.seed)
    operands = predicate.draw()
    seen = predicate.seen(operands)
    if predicate.query_lengths:
        queries = np.arange(predicate.queries)[:, None]
        seen = seen & (queries < operands["query_seq_lengths"][:, None, None, None])
    rows, kv_heads = predicate.batch, predicate.query_heads // spec.group
    shapes = {
        "query": (rows, predicate.queries, predicate.query_heads, spec.head_dim),
        "key": (rows, predicate.keys, kv_heads, spec.head_dim),
        "value": (rows, predicate.keys, kv_heads, spec.v_head_dim),
    }
    return operands | {name: random.standard_normal(shape) for name, shape in shapes.items()}, seen


def rounded(spec: KernelSpec, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns query, key and value in the kernel's dtype."""
    return {name: operands[name].astype(DTYPES[spec.operand_dtype]) for name in ("query", "key", "value")}


def poisoned(spec: KernelSpec, arrays: dict[str, np.ndarray], seen: np.ndarray) -> dict[str, np.ndarray]:
    """Returns arrays with poison in keys that no query sees, in queries that see no key, and in their cotangents."""
    groups = seen.reshape(seen.shape[0], -1, spec.group, *seen.shape[2:])
    dead_keys, dead_queries = ~groups.any((2, 3)).swapaxes(1, 2), ~seen.any(3).swapaxes(1, 2)
    dead = {"query": dead_queries, "dout": dead_queries, "key": dead_keys, "value": dead_keys}
    return {name: fill(x, dead[name]) if name in dead else x for name, x in arrays.items()}


def attention(spec: KernelSpec, arrays: dict[str, np.ndarray], seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns output and log-sum-exp in float64."""
    query, key, value = (arrays[name].astype(np.float64) for name in ("query", "key", "value"))
    key, value = key.repeat(spec.group, 2), value.repeat(spec.group, 2)
    logits = np.where(seen, SCALE * np.einsum("btnh,bsnh->bnts", query, key), -np.inf)
    lse = np.logaddexp.reduce(logits, axis=3)
    weights = np.where(seen, np.exp(logits - np.where(np.isinf(lse), 0, lse)[..., None]), 0)
    return np.einsum("bnts,bsnd->btnd", weights, value), lse.swapaxes(1, 2)


def visit_scalars(predicate: Predicate, *, one_row: bool = False) -> dict[str, int]:
    """Returns the scalars of lists, see `lists.Planes`."""
    heads = predicate.heads
    return {
        "visit_batch": heads if predicate.entries > 1 else 0,
        "visit_head": int(heads > 1 and heads == predicate.query_heads),
        "visit_kv_head": int(1 < heads < predicate.query_heads),
        "visit_tile": int(not one_row),
    }


def scalars(predicate: Predicate, *, one_row: bool = False) -> Scalars:
    """Returns the scalars of a launch."""
    return Scalars(
        batch=predicate.batch,
        query_length=predicate.queries,
        key_length=predicate.keys,
        num_heads=predicate.query_heads,
        window_left=UNBOUNDED,
        window_right=UNBOUNDED,
        sinks_stride=0,
        multiprocessors=MULTIPROCESSORS,
        **visit_scalars(predicate, one_row=one_row),
        side_heads=None,
        pages=None,
        **dict.fromkeys((*BIAS_SCALARS, "bias_parts")),
        scale=SCALE,
        logits_soft_cap=0.0,
    )


def check_forward(predicate: Predicate, head_dim: int, *, short: bool = True, one_row: bool = False) -> None:
    """Runs Hopper's forward kernel on poisoned operands, and compares output and log-sum-exp with float64.

    Args:
        predicate: what hides pairs, and sizes.
        head_dim: of queries, keys and values.
        short: selects the config, see `choose.configured`.
        one_row: whether all tiles of queries share a list.
    """
    spec = KernelSpec(
        op="forward",
        arch="sm_90a",
        operand_dtype="bfloat16",
        head_dim=head_dim,
        v_head_dim=head_dim,
        group=predicate.group,
        family="sm90",
        listed=True,
        query_seq_lengths=bool(predicate.query_lengths),
    )
    spec = configured(spec, short=short)
    operands, seen = draw(predicate, spec)
    lists = emulated_prepass.run(predicate, spec.config.prepass, operands, one_row=one_row)
    arrays = rounded(spec, operands)
    out, lse = attention(spec, arrays, seen)
    arrays = poisoned(spec, arrays, seen)
    arrays |= {"key_lists": lists["lists"], "key_bits": lists["bits"]}
    arrays |= {name: x for name, x in operands.items() if name == "query_seq_lengths"}
    arrays |= {"out": np.full(out.shape, np.nan, arrays["query"].dtype), "lse": np.full(lse.shape, np.nan, np.float32)}
    memory, buffers = place(spec, arrays)
    texts = forward_texts(spec)
    for launch in ForwardKernel(spec).launches(buffers, scalars(predicate, one_row=one_row)):
        start(launch, texts, memory)
    got = memory.read(buffers.out, out.shape, arrays["out"].dtype).astype(np.float64)
    np.testing.assert_allclose(got, out, atol=2**-7 * np.abs(out).max(), rtol=2**-7)
    np.testing.assert_allclose(memory.read(buffers.lse, lse.shape, np.float32), lse, atol=1e-4, rtol=1e-5)
