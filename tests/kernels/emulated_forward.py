# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the portable forward kernel, runs its PTX in `ptx_emulator` and compares with a float64 reference."""

from __future__ import annotations

import tempfile

import cutlass
import ml_dtypes
import numpy as np
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_ptr
from ptx_emulator import Memory, launch

from jax_fastattn.kernels.sm80.config import ForwardConfig
from jax_fastattn.kernels.sm80.forward import ForwardKernel
from jax_fastattn.kernels.spec import KernelSpec

# Distinct, no multiple of a tile; offset and lengths leave rows without keys, a padding tail and an empty sequence.
BATCH, QUERIES, KEYS, KV_HEADS = 3, 133, 201, 2
LEFT, RIGHT, CAP = 37, 5, 1.5
OFFSETS = [60, -140, 1 << 30]
QUERY_LENGTHS = [133, 70, 0]
KEY_LENGTHS = [201, 0, 77]


def compile_forward(spec: KernelSpec, config: ForwardConfig | None = None) -> tuple[ForwardKernel, str]:
    """The kernel object and its PTX; no GPU needed."""

    def pointer(dtype: type) -> cute.Pointer:
        return make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=16)

    element = pointer({"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype])
    integers = [spec.query_seq_lengths, spec.key_value_seq_lengths, spec.query_offset]
    arguments = [element] * 3 + [pointer(cutlass.Int32) if given else None for given in integers]
    arguments += [pointer(cutlass.Float32) if spec.sinks else None, element, pointer(cutlass.Float32)]
    arguments += [cutlass.Int32(0)] * 8 + [cutlass.Float32(0.0)] * 2
    kernel = ForwardKernel(spec, config)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {spec.arch} --keep-ptx --dump-dir {folder}"
        return kernel, cute.compile(kernel, *arguments, make_fake_stream(), options=options).artifacts.PTX


def reference(spec: KernelSpec, arrays: dict, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp, row by row from the visibility rule of `plan.py`, in float64."""
    query, key, value = (arrays[name].astype(np.float64) for name in ("query", "key", "value"))
    batch, queries, heads, _ = query.shape
    out = np.zeros((batch, queries, heads, value.shape[-1]))
    lse = np.full((batch, queries, heads), -np.inf)
    for b, i, n in np.ndindex(batch, queries, heads):
        if spec.query_seq_lengths and i >= QUERY_LENGTHS[b]:
            continue
        end = KEY_LENGTHS[b] if spec.key_value_seq_lengths else key.shape[1]
        position = i + (OFFSETS[b] if spec.query_offset else 0)
        low = max(position - LEFT, 0) if spec.window_left else 0
        high = min(position + RIGHT + 1, end) if spec.window_right else end
        seen = slice(low, max(high, low))
        logits = scale * (key[b, seen, n // spec.group] @ query[b, i, n])
        if spec.logits_soft_cap:
            logits = CAP * np.tanh(logits / CAP)
        everything = np.append(logits, arrays["sinks"][b, n]) if spec.sinks else logits
        if len(everything):
            lse[b, i, n] = np.logaddexp.reduce(everything)
            out[b, i, n] = np.exp(logits - lse[b, i, n]) @ value[b, seen, n // spec.group]
    return out, lse


def check(spec: KernelSpec, scale: float, config: ForwardConfig | None = None) -> None:
    """Compares on random operands whose padding rows are NaN; the output buffers start as NaN."""
    kernel, ptx = compile_forward(spec, config)
    dtype = ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else np.float16
    heads = KV_HEADS * spec.group
    random = np.random.default_rng(0)
    shapes = {
        "query": (BATCH, QUERIES, heads, spec.head_dim),
        "key": (BATCH, KEYS, KV_HEADS, spec.head_dim),
        "value": (BATCH, KEYS, KV_HEADS, spec.v_head_dim),
    }
    arrays = {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    for b in range(BATCH):
        if spec.query_seq_lengths:
            arrays["query"][b, QUERY_LENGTHS[b] :] = np.nan
        if spec.key_value_seq_lengths:
            arrays["key"][b, KEY_LENGTHS[b] :] = np.nan
            arrays["value"][b, KEY_LENGTHS[b] :] = np.nan
    wanted_out, wanted_lse = reference(
        spec, arrays | {"sinks": (sinks := random.standard_normal((BATCH, heads)))}, scale
    )

    memory = Memory()
    parameters = [memory.add(array) for array in arrays.values()]
    for given, values in (
        (spec.query_seq_lengths, QUERY_LENGTHS),
        (spec.key_value_seq_lengths, KEY_LENGTHS),
        (spec.query_offset, OFFSETS),
    ):
        parameters += [memory.add(np.array(values, np.int32))] if given else []
    parameters += [memory.add(sinks.astype(np.float32))] if spec.sinks else []
    out_shape, lse_shape = wanted_out.shape, wanted_lse.shape
    out = memory.add(np.full(out_shape, np.nan, dtype))
    lse = memory.add(np.full(lse_shape, np.nan, np.float32))
    parameters += [out, lse, QUERIES, KEYS, heads, LEFT, RIGHT, heads, scale, CAP]
    blocks = BATCH * heads * -(-QUERIES // kernel.config.rows)
    launch(ptx, parameters, memory, blocks, kernel.config.shared_memory(spec.head_dim, spec.v_head_dim))

    tolerance = 2**-7 if spec.dtype == "bfloat16" else 2**-10  # a few roundings of P and of the output
    got_out, got_lse = memory.read(out, out_shape, dtype).astype(np.float64), memory.read(lse, lse_shape, np.float32)
    np.testing.assert_allclose(got_out, wanted_out, atol=tolerance * np.abs(wanted_out).max(), rtol=tolerance)
    np.testing.assert_allclose(got_lse, wanted_lse, atol=1e-4, rtol=1e-5)
    empty = np.isneginf(wanted_lse)
    assert (got_out[empty] == 0).all()
