# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Registers, shared memory and local memory of kernels with a function of scores, as a call would choose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import jax
import jax.numpy as jnp
from resources import kept_resources

from jax_fastattn.canonical import batched
from jax_fastattn.canonical.shapes import shapes_of
from jax_fastattn.kernels.architectures import shared_memory_limit
from jax_fastattn.kernels.choose import forward_spec, kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.spec import Problem

LENGTH, HEADS = 4096, 16
SLOPES, TABLE = jnp.ones(HEADS), jnp.ones((2 * LENGTH, HEADS))
KEYS = jnp.ones((HEADS, LENGTH))

# By name: a function, and whether a backward pass sums the gradient of its plane.
MODS: dict[str, tuple[Callable[..., Any], bool]] = {
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), True),
    "table": (lambda s, b, h, q, k: s + TABLE[k - q + LENGTH, h], True),
    "keys": (lambda s, b, h, q, k: s + KEYS[h, k], True),
    "cap": (lambda s, b, h, q, k: 30.0 * jnp.tanh(s / 30.0), False),
}
DIMS = {"alibi": (64, 96, 128, 256), "table": (64, 128), "keys": (128,), "cap": (64, 128)}
CASES = [
    (name, arch, op, dim)
    for name, dims in DIMS.items()
    for dim in dims
    for arch in ("sm_90a", "sm_80")
    for op in ("forward", "backward")
]
# Bytes of local memory; 0 elsewhere.
LOCAL_BYTES = {
    ("alibi", "sm_90a", "forward", 96): 32,
    ("alibi", "sm_80", "backward", 64): 56,
    ("alibi", "sm_80", "forward", 256): 8,
    ("alibi", "sm_80", "backward", 256): 32,
    ("table", "sm_90a", "backward", 128): 8,
    ("table", "sm_80", "backward", 64): 64,
    ("table", "sm_80", "backward", 128): 32,
    ("cap", "sm_80", "forward", 64): 128,
    ("cap", "sm_80", "backward", 64): 48,
    ("cap", "sm_80", "backward", 128): 160,
}


def spec_of(name: str, arch: str, op: str, head_dim: int) -> KernelSpec:
    """Returns the compile key of a causal call, with the gradient of what the function captures."""
    mod, is_learned = MODS[name]
    x = jax.ShapeDtypeStruct((4, LENGTH, HEADS, head_dim), jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        given: Any = {"query": x, "key": x, "value": x, "score_mod": mod, "is_causal": True}
        problem = Problem.of(*shapes_of(batched.canonicalize, **given))
    if op == "forward":
        return forward_spec(problem, arch)
    return kernel_spec(problem, "backward", arch, dplane=0 if is_learned else None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "op", "head_dim"), CASES)
def test_kernels_with_a_score_function_fit(name: str, arch: str, op: str, head_dim: int) -> None:
    spec = spec_of(name, arch, op, head_dim)
    for kernel in kept_resources(spec):
        assert kernel.registers <= 255, kernel
        assert kernel.local_bytes <= LOCAL_BYTES.get((name, arch, op, head_dim), 0), kernel
        assert kernel.shared_bytes <= shared_memory_limit(spec.arch), kernel
