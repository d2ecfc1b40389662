# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Features of this file's own, in kernels that know nothing of them: what a new score function has to define."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_dkdv_dq
import emulated_forward
import emulated_hopper
from cutlass import Boolean, Float32, cute
from emulated_backward import Sizes

from jax_fastattn.kernels.arguments import Buffer
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.device.softmax import LOG2_E
from jax_fastattn.kernels.features.feature import Element, Feature, Head, Logit
from jax_fastattn.kernels.key import KernelSpec

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Distance(Feature):
    """Adds a slope of each head times key - query, and hides every fifth of these distances."""

    operand: Any = None
    slope: Any = None

    def buffers(self) -> Mapping[str, Buffer]:
        """Returns the operand: slopes float32 `[N]`."""
        return {"slopes": Buffer("operand", "float32")}

    def bind(self, buffers: Any) -> Distance:
        """Returns the feature with the slopes of a launch."""
        return replace(self, operand=buffers.added.slopes)

    def start(self, head: Head) -> Distance:
        """Returns the feature with the slope of a head."""
        slopes = cute.make_tensor(self.operand, cute.make_layout((1 << 20,)))
        return replace(self, slope=slopes[head.head] * LOG2_E)

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns the logit with the distance."""
        return x.plus(self.slope * Float32(at.key - at.query))

    def sees(self, at: Element) -> Boolean:
        """Returns whether a score counts."""
        return Boolean((at.key - at.query + 10_000) % 5 != 0)

    # What the emulators' reference asks.

    def draw(self, random: np.random.Generator, heads: int, queries: int, keys: int) -> dict[str, np.ndarray]:
        """Returns the operand."""
        del queries, keys
        return {"slopes": (0.02 * random.standard_normal(heads)).astype(np.float32)}

    def reference(
        self, logits: np.ndarray, seen: np.ndarray, head: int, arrays: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits `[T, S]` and what is visible."""
        distance = np.arange(logits.shape[1]) - np.arange(logits.shape[0])[:, None]
        return logits + arrays["slopes"][head] * distance, seen & ((distance + 10_000) % 5 != 0)


# By name: head dims, features, sizes.
CASES = {
    "d64-causal": (64, 64, {"window_right": True, "group": 2}, Sizes(batch=2, queries=150, keys=170, right=20)),
    "d128-cap-window-lengths": (
        128,
        128,
        {
            "window_left": True,
            "window_right": True,
            "query_seq_lengths": True,
            "key_value_seq_lengths": True,
            "query_offset": True,
            "logits_soft_cap": True,
        },
        Sizes(),
    ),
    "d192v128-full": (192, 128, {}, Sizes(batch=1, queries=133, keys=140, kv_heads=2)),
}


def key(case: str, op: str, family: str) -> tuple[KernelSpec, Sizes]:
    """Returns a compile key with the feature, and the sizes of its launch."""
    head_dim, v_head_dim, features, sizes = CASES[case]
    arch = "sm_90a" if family == "sm90" else "sm_80"
    spec = KernelSpec(op, arch, "bfloat16", head_dim, v_head_dim, family=family, programs=(Distance(),), **features)
    return configured(spec), sizes


@pytest.mark.parametrize("case", CASES)
def test_hopper_forward(case: str) -> None:
    emulated_hopper.check_forward(*key(case, "forward", "sm90"))


@pytest.mark.parametrize("case", CASES)
def test_hopper_backward(case: str) -> None:
    emulated_hopper.check_backward(*key(case, "backward", "sm90"))


@pytest.mark.parametrize("case", CASES)
def test_portable_forward(case: str) -> None:
    emulated_forward.check(*key(case, "forward", "sm80"))


@pytest.mark.parametrize("case", CASES)
def test_portable_backward(case: str) -> None:
    emulated_dkdv_dq.check(*key(case, "backward", "sm80"))
