# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of Hopper's bfloat16 kernels, in the emulator, next to a model of the roundings of FlashAttention.

The forward kernel makes the output and the log-sum-exp that the backward kernels take. In the model the greatest weight
of a row is 1 before the division, and dS comes from P in float32, of which the kernels have bfloat16.
docs/numerics.md has what was measured of both.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_hopper
from emulated_backward import DTYPES, Sizes, draw_operands

from jax_fastattn.compilation.compiler import _open_runtime
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec

Results = tuple[np.ndarray, np.ndarray, np.ndarray]  # the output, dq and dk

# How many times the error of the model results may have.
ALLOWED = {"out": 1.05, "dq": 1.25, "dk": 1.25}

QUERIES, KEYS = 128, 512
SLOW = pytest.mark.slow
# A head dim, and a spread of logits at which the maximum decides that weights are relative to. At head dim 64 the
# forward kernel trusts its maxima for longer.
CASES = [
    (128, 11),
    *(pytest.param(head_dim, spread, marks=SLOW) for head_dim in (96, 256) for spread in (3, 11)),
    pytest.param(128, 3, marks=SLOW),
]


@pytest.fixture(autouse=True)
def _runtime() -> None:
    _open_runtime()


@pytest.mark.parametrize(("head_dim", "spread"), CASES)
def test_errors_are_those_of_flash_attention(head_dim: int, spread: int) -> None:
    plain = "bfloat16", head_dim, head_dim
    forward, backward = (configured(KernelSpec(op, "sm_90a", *plain, family="sm90")) for op in ("forward", "backward"))
    sizes = Sizes(1, QUERIES, KEYS, 1, scale=spread / head_dim**0.5)
    arrays, wanted = draw_operands(backward, sizes, seed=spread)
    arrays |= emulated_hopper.run_forward(forward, sizes, arrays)
    found = emulated_hopper.run_backward(backward, sizes, arrays)
    exact = tuple(wanted[name] for name in ("out", "dq", "dk"))
    own = _errors((arrays["out"], found["dq"], found["dk"]), exact)
    flash = _errors(_flash_attention(arrays, sizes.scale), exact)
    for (name, allowed), error, other in zip(ALLOWED.items(), own, flash, strict=True):
        assert error < allowed * other, (name, error / other)


def _errors(results: Results, exact: Results) -> list[float]:
    """Returns relative errors, in root mean square."""
    pairs = [(x.astype(np.float64).reshape(y.shape), y) for x, y in zip(results, exact, strict=True)]
    return [float(np.sqrt(((x - y) ** 2).mean() / (y**2).mean())) for x, y in pairs]


def _flash_attention(arrays: dict[str, np.ndarray], scale: float) -> Results:
    """Weights are rounded before they are divided, delta comes from the rounded output."""
    query, key, value, dout = _operands(arrays)
    exponentials, totals = _exponentials(query, key, scale)
    out = _rounded(_rounded(exponentials) @ value / totals)
    ds = _rounded(exponentials / totals * (dout @ value.T - (out * dout).sum(1, keepdims=True)))
    return out, _rounded(ds @ key * np.float32(scale)), _rounded(ds.T @ query * np.float32(scale))


def _operands(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [arrays[name][0, :, 0].astype(np.float32) for name in ("query", "key", "value", "dout")]


def _exponentials(query: np.ndarray, key: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights relative to the greatest one of their row, and their sums."""
    logits = query @ key.T * np.float32(scale)
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials, exponentials.sum(1, keepdims=True)


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(DTYPES["bfloat16"]).astype(np.float32)
