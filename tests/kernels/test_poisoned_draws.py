# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Every suite draws hidden rows, which `testing/poison.py` fills, in each setting that hides them in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jax_fastattn.kernels.spec import KernelSpec
from jax_fastattn.testing.cases import CPU_CASES, GPU_CASES, HIDDEN_ROWS, Case
from jax_fastattn.testing.poison import visible_rows

# Settings that hide rows, and whether a case has them.
SETTINGS: dict[str, Callable[[Case], Any]] = {
    "causal without lengths": lambda case: (
        case.is_causal and case.query_seq_lengths is case.key_value_seq_lengths is None
    ),
    "left side of a window": lambda case: case.window[0] is not None,
    "offset": lambda case: case.query_offset is not None,
    "sinks": lambda case: case.sinks is not None,
    "dlse": lambda case: case.dlse,
    "query heads that share keys": lambda case: case.group > 1,
    "deterministic": lambda case: case.deterministic,
}


def emulated(spec: KernelSpec, sizes: Any) -> Case:
    """Returns the case that an emulator draws for a spec and its sizes."""

    def entries(name: str, values: tuple[int, ...]) -> tuple[int, ...] | None:
        return values[: sizes.batch] if getattr(spec, name) else None

    return Case(
        dtype=spec.dtype,
        batch=sizes.batch,
        query_length=sizes.queries,
        key_length=sizes.keys,
        num_kv_heads=sizes.kv_heads,
        group=spec.group,
        is_causal=spec.window_right and sizes.right == 0,
        window=(sizes.left if spec.window_left else None, sizes.right if spec.window_right else None),
        query_seq_lengths=entries("query_seq_lengths", sizes.query_lengths),
        key_value_seq_lengths=entries("key_value_seq_lengths", sizes.key_lengths),
        query_offset=entries("query_offset", sizes.offsets),
        sinks="bn" if spec.sinks else None,
        dlse=spec.dlse,
        deterministic=spec.ordered,
    )


def draws(suite: str) -> list[Case]:
    """Returns what a suite draws."""
    if suite == "CPU":
        return CPU_CASES
    if suite == "GPU":  # with both families, see `test_portable_kernels`
        assert set(HIDDEN_ROWS.values()) <= set(GPU_CASES)
        return list(HIDDEN_ROWS.values())
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    import test_device_layouts
    import test_sm80_dkdv_dq
    import test_sm90_emulated as hopper
    from emulated_backward import Sizes

    if suite == "sm80 emulator":
        rows = [
            (KernelSpec("forward", "sm_80", **{"dtype": "bfloat16", **fields}), Sizes(**sizes))
            for fields, sizes in test_device_layouts.EMULATED.values()
        ]
        rows += test_sm80_dkdv_dq._CASES.values()
    else:
        tables = [*hopper.FORWARD.values(), *hopper.BACKWARD.values()]
        rows = [(hopper._spec("backward", *row), sizes) for *row, sizes in tables]
        rows += [(hopper._spec("backward", 32, 32, "bfloat16", row), sizes) for row, sizes in hopper.HIDDEN.values()]
        row, sizes = hopper.HIDDEN["window-and-offsets"]
        rows.append((hopper._spec("backward", 32, 32, "bfloat16", {**row, "ordered": True}), sizes))
    return [emulated(spec, sizes or Sizes()) for spec, sizes in rows]


def hides(setting: str, case: Case) -> bool:
    """Returns whether a case has hidden rows of the kind that the setting is about."""
    visible = jax.jit(lambda key: visible_rows(case.spec(), case.operands(key))[:2])(jax.random.key(0))
    sees, seen = (np.asarray(x) for x in visible)
    if setting == "left side of a window":
        return bool((np.logical_not(seen[:, :1]) & seen.any(1, keepdims=True)).any())
    if setting in ("sinks", "dlse"):
        return not sees.all()
    return not (sees.all() and seen.all())


@pytest.mark.parametrize("suite", ["CPU", "GPU", "sm80 emulator", "sm90 emulator"])
def test_every_setting_is_poisoned(suite: str) -> None:
    cases = draws(suite)
    for setting, has in SETTINGS.items():
        if setting != "deterministic" or suite != "CPU":  # where sums have no other order
            assert any(has(case) and hides(setting, case) for case in cases), f"no poisoned draw: {setting}"
