# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients by the float16 kernels where P or dS would underflow or overflow, in the emulators of both families.

Sinks leave weights of about 2^-17 to the keys. The two key/value heads have cotangents of other sizes, and so other
units: what one head takes from the other is wrong by a power of two. The rule is the rounding of the result itself: a
kernel rounds P and dS as well, so that its error is about 1.8 times as large, up to 2.2. Without units it is far
larger, or infinite.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_dkdv_dq
import emulated_hopper
from emulated_backward import Sizes, compare_dbias, draw_operands, visibility

from jax_fastattn.compilation.compiler import _open_runtime
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec

SINKS = {"dsinks": True, "dlse": False}
MATRIX = {**SINKS, "bias": "matrix", "bias_dtype": "float32", "dbias": True}
KEYS = {**SINKS, "bias": "keys", "dbias": True}
CAP = {**SINKS, "features": (codes.SOFT_CAP,)}
# Small queries and keys, and a large scale, make gradients normal numbers although dS is 2^-22 in the first head.
SMALL = Sizes(1, 40, 72, 2, scale=2.0**16.9, factor=2.0**-10, cotangents=(2.0**-8, 2.0**-2), sink=12.0)
# Gradients of logits above 65504.
LARGE = Sizes(1, 40, 72, 2, scale=0.125, cotangents=(2.0**13, 2.0**-3))

CASES = {
    "sm80-d64": ("sm_80", 64, MATRIX, SMALL),
    "sm80-d96": ("sm_80", 96, KEYS, SMALL),
    "sm80-d256-large": ("sm_80", 256, {}, LARGE),
    "sm90-d64": ("sm_90a", 64, MATRIX, SMALL),
    "sm90-d128-ordered": ("sm_90a", 128, {**KEYS, "ordered": True, "group": 2}, SMALL),
    "sm90-d64-cap": ("sm_90a", 64, CAP, SMALL),
    "sm90-d128-large": ("sm_90a", 128, {}, LARGE),
    "sm90-d160": ("sm_90a", 160, KEYS, SMALL),
}
BIASES = {"matrix": (1, 1, 40, 72), "keys": (1, 1, 1, 72)}


@pytest.fixture(autouse=True)
def _runtime() -> None:
    _open_runtime()


def _run(spec: KernelSpec, sizes: Sizes, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what the kernels make of operands, in float64."""
    if spec.family == "sm90":
        return emulated_hopper.run_backward(spec, sizes, arrays)
    run = emulated_dkdv_dq.Run(spec, sizes)
    for name in run.launches:
        run.run(name)
    names = ("dq", "dk", "dv", *emulated_dkdv_dq.dbias_buffers(spec, sizes))
    return {name: run.read(name).astype(np.float64) for name in names}


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_underflows(name: str) -> None:
    arch, head_dim, features, sizes = CASES[name]
    family = "sm90" if arch == "sm_90a" else "sm80"
    sizes = sizes if "bias" not in features else _with_bias(sizes, BIASES[features["bias"]])
    spec = configured(KernelSpec("backward", arch, "float16", head_dim, head_dim, family=family, **features))
    arrays, wanted = draw_operands(spec, sizes)
    found = _run(spec, sizes, arrays)
    for gradient in ("dq", "dk", "dv"):
        heads = 2 * spec.group if gradient == "dq" else 2
        for head in range(heads):
            exact = wanted[gradient][:, :, head]
            rounding, error = (
                np.sqrt(((x - exact) ** 2).mean()) for x in (_rounded(exact), found[gradient][:, :, head])
            )
            assert error < 2.5 * rounding, (gradient, head, error / rounding)
    if spec.dbias:
        pairs = visibility(spec, sizes)[2][:, None]
        compare_dbias(spec, sizes, found, arrays, wanted["dbias"], pairs, tolerance=2**-10)


def _rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float64)


def _with_bias(sizes: Sizes, shape: tuple[int, int, int, int]) -> Sizes:
    return Sizes(**{**vars(sizes), "bias": shape})
