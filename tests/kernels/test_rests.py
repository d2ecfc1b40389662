# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`precise_gradients` in the kernels of both families, in the emulators: errors of dq and dk of peaked weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from testing import peaked
from testing.peaked import CALLS, SHARE

from jax_fastattn.canonical import batched
from jax_fastattn.kernels.device.rests import SHIFTS
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.spec import QKV

AT_EVERY_COMMIT = ("sm90-d64", "sm80-d64")


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in AT_EVERY_COMMIT else pytest.mark.slow) for x in CALLS]
)
def test_errors_of_peaked_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    emulated_ops.emulate(monkeypatch, call.arch)
    without, precise = peaked.errors(call, *peaked.draw(call))
    assert max(x / y for x, y in zip(precise, without, strict=True)) < SHARE, (precise, without)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_bytes_are_what_rounding_takes(arch: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of two numbers is exact in float32."""
    emulated_ops.emulate(monkeypatch, arch)
    values = np.random.default_rng(1).standard_normal((2, 1, 64)).astype(np.float32)
    values[:, 0, :6] = [[3.0, np.inf, 0.0, -0.0, 2**-24, -(2.0**-16)], [3.0, np.inf, 0.0, -0.0, 0.0, -(2.0**-24)]]
    value = jnp.asarray(values, dtype)
    spec, operands = batched.canonicalize(jnp.zeros((96, 1, 64), dtype), jnp.zeros((2, 1, 64), dtype), value)
    _, _, rests = cuda.forward(replace(spec, keeps_rests=True), operands)
    wanted = np.asarray(value, np.float32).mean(0)[0].view(np.int32) >> SHIFTS[dtype]
    np.testing.assert_array_equal(np.asarray(rests)[0, 5, 0], wanted.astype(np.int8))


@pytest.mark.parametrize("name", ["ties", "tiny numbers"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_bytes_that_say_nothing_are_not_added(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of two neighbors is a tie. A byte added to a float16 0 would be a NaN."""
    emulated_ops.emulate(monkeypatch, arch)
    random = np.random.default_rng(1)
    dtype, keys = {"ties": ("bfloat16", 2), "tiny numbers": ("float16", 19)}[name]
    value = np.zeros((keys, 1, 64), np.float32)
    if name == "ties":
        value[0] = jnp.asarray(random.standard_normal((1, 64)), dtype)
        value[1] = (value[0].view(np.int32) + (1 << 16)).view(np.float32)
    else:
        value[0] = 2**-24
    dout = jnp.asarray(random.standard_normal((1, 96, 1, 64)), dtype)
    key = jnp.asarray(random.standard_normal((keys, 1, 64)), dtype)
    spec, operands = batched.canonicalize(jnp.zeros((96, 1, 64), dtype), key, jnp.asarray(value, dtype))
    out, lse, rests = cuda.forward(replace(spec, keeps_rests=True), operands)
    assert (np.asarray(rests) < 0).all(where=value[0] != 0)
    found = []
    for taken in (operands, operands._replace(out_rests=rests)):
        gradients = cuda.backward(replace(spec, present=taken.present()), taken, out, lse, dout, None, QKV)
        found.append(np.asarray(gradients.query))
    assert np.abs(found[0]).max() > 0 or name != "ties"
    np.testing.assert_array_equal(*found)
