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
    """The mean of two numbers is a tie of the rounding, or a number of the dtype, in which case its byte is 0."""
    emulated_ops.emulate(monkeypatch, arch)
    values = np.random.default_rng(1).standard_normal((2, 1, 64)).astype(np.float32)
    values[:, 0, :6] = [[3.0, np.inf, 0.0, -0.0, 2**-24, -(2.0**-16)], [3.0, np.inf, 0.0, -0.0, 0.0, -(2.0**-24)]]
    value = jnp.asarray(values, dtype)
    spec, operands = batched.canonicalize(jnp.zeros((96, 1, 64), dtype), jnp.zeros((2, 1, 64), dtype), value)
    out, _, rests = cuda.forward(replace(spec, keeps_rests=True), operands)
    exact = np.asarray(value, np.float32).mean(0)
    bits, wanted = (np.asarray(x).astype(np.float32).view(np.int32) for x in (out[0, 5, 0], exact[0]))
    found = bits + (np.asarray(rests)[0, 5, 0].astype(np.int32) << SHIFTS[dtype])
    lost = np.abs(found - wanted) > 1 << SHIFTS[dtype]  # a tie that is rounded down takes 128, and a byte ends at 127
    # float16 has fewer bits than a byte adds to where numbers are subnormal.
    assert np.flatnonzero(lost).tolist() == ([] if dtype == "bfloat16" else [4, 5])
    assert (found[lost] == bits[lost]).all() and not np.asarray(rests)[0, 5, 0, :4].any()
    assert np.abs(np.asarray(rests)[0, 5, 0]).max() in (127, 128)
