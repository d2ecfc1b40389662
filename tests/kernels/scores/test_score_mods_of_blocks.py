# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions in a block of a ring, whose rows are not the first of the sequence, in the kernels; emulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.canonical.programs import programs
from jax_fastattn.kernels.support import gradient_reasons, unsupported_reasons
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.ring.blocks import BlockPlace, block_call
from jax_fastattn.ops.ring.plan import Block, View
from jax_fastattn.ring import Ring
from jax_fastattn.spec import QKV, AttentionSpec, Operands, Problem
from jax_fastattn.xla import passes as xla

# Rows and keys of a device.
B, T, S, N, K, D = 2, 40, 72, 2, 1, 64
SIZE = 3
_random = np.random.default_rng(5)
SLOPES = jnp.asarray([0.3, 0.02], jnp.float32)
IDS = jnp.asarray(np.sort(_random.integers(0, 3, (B, SIZE * max(T, S))), 1), jnp.int32)
TABLE = jnp.asarray(_random.standard_normal((SIZE * (T + S), N)), jnp.float32)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# What the gradient is summed of, and the function.
CAPTURED: dict[str, Any] = {
    "head_numbers": lambda s, b, h, q, k: s - SLOPES[h] * jnp.abs(q - k) + 0.01 * (q % 7),
    "distance_numbers": lambda s, b, h, q, k: s + TABLE[k - q + SIZE * T, h] + jnp.tanh(0.01 * k),
}


def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (IDS[b, q] == IDS[b, k]) | (q - k < 20) & (k % 5 > 0)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("head_numbers", "sm_80"),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (("head_numbers", "sm_90a"), ("distance_numbers", "sm_80"))
        ),
    ],
)
def test_the_second_device_and_the_first_keys(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has more keys than the block, so that dS of the block do not add up to 0 in a row."""
    emulated_ops.emulate(monkeypatch, arch)
    found, planes = programs({"B": B, "N": N, "T": SIZE * T, "S": SIZE * S}, jnp.bfloat16, CAPTURED[name], mask)  # pyright: ignore[reportArgumentType]
    shapes = (B, T, N, D), (B, S, K, D), (B, S, K, D), (B, T, N, D)
    *arrays, dout = (jnp.asarray(_random.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    operands = Operands(*arrays, **planes)
    whole = AttentionSpec(D**-0.5, present=operands.present(), ring=Ring(("seq",), SIZE), **found)
    block = Block(View(0, T), View(0, S), (0,), (0,), (None, None))
    spec, operands = block_call(whole, operands, block, BlockPlace(jnp.int32(1), jnp.int32(0), T, S, 0))
    problem = Problem.of(spec, operands)
    assert not unsupported_reasons(problem, arch) and not gradient_reasons(problem, (*QKV, name))

    single = operands._replace(**{x: getattr(operands, x).astype(jnp.float32) for x in QKV})
    out, lse = cuda.forward(spec, operands)
    wanted, wanted_lse = xla.forward(spec, single)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(wanted_lse), atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), np.asarray(wanted), atol=0.02)
    # Keys of other devices have half of the weight.
    lse, out = wanted_lse + np.log(2), (wanted / 2 + _random.standard_normal(wanted.shape) / 8).astype(jnp.bfloat16)
    got = cuda.backward(spec, operands, out, lse, dout, None, (*QKV, name))
    expected = xla.backward(spec, single, out.astype(jnp.float32), lse, dout.astype(jnp.float32), None, (*QKV, name))
    for x in (*QKV, name):
        y, z = (np.asarray(getattr(g, x).astype(jnp.float32)) for g in (got, expected))
        np.testing.assert_allclose(y, z, atol=2**-6 * np.abs(z).max() + 1e-5, err_msg=x)
