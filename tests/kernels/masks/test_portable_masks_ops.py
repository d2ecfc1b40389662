# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls with masks and segment ids that run the portable kernels, from canonical operands to gradients; emulated."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
from test_masks_ops import CASES, draw

pytestmark = pytest.mark.slow


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    emulated_ops.emulate(monkeypatch, arch)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("bnts-dead-keys", "sm_80"),
        ("b11s", "sm_80"),
        ("b1t1-cap", "sm_86"),
        ("1kts-window", "sm_80"),
        ("ts-lengths", "sm_86"),
        ("bkts-sinks", "sm_80"),
        ("ids-causal-mask", "sm_80"),
        ("d192v128", "sm_86"),
    ],
)
@pytest.mark.usefixtures("_emulated")
def test_calls_match_the_reference(name: str) -> None:
    emulated_ops.compare_with_reference(*draw(CASES[name]))
