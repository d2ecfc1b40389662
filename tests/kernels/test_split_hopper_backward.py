# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper backward kernels of float32 operands, in the emulator."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_draws
import emulated_hopper
import hopper_emulator
import numpy as np
import split_calls
import split_model
from emulated_backward import Sizes, draw_operands
from split_calls import EVERYTHING, LENGTHS

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.key import KernelSpec

_spec = functools.partial(split_calls.spec, "backward")
_ALL = {**EVERYTHING, "dlse": True}
_CAUSAL = {"window_right": True}
_BIASED = Sizes(batch=2, queries=140, keys=200, right=0, bias=(1, 2, 140, 200))
CASES = {
    "d32-everything": (_spec(32, 32, **_ALL), LENGTHS),
    "d32-empty-sequences": (_spec(32, 96, **_ALL), None),
    "d64": (_spec(64, 64), Sizes(batch=1, queries=140, keys=300)),
    "d64-causal-negative-scale": (_spec(64, 64, **_CAUSAL), Sizes(2, 300, 270, 2, right=0, scale=-0.3)),
    "d96-64": (_spec(96, 64, group=2, key_value_seq_lengths=True), Sizes(2, 140, 230, key_lengths=(140, 230))),
    "d128-causal": (_spec(128, 128, **_CAUSAL), Sizes(1, 270, 300, right=0)),
    "d128-everything": (_spec(128, 128, **_ALL, features=(codes.EXACT_SOFT_CAP,)), LENGTHS),
    "sinks": (_spec(64, 32, dsinks=True, small_weights=True), Sizes(1, 140, 130)),
    "bias": (_spec(64, 64, bias="matrix", bias_dtype="float32", dbias=True, **_CAUSAL, group=2), _BIASED),
    "d128-bias": (_spec(128, 128, bias="matrix", bias_dtype="float32", dbias=True, group=2), _BIASED),
    "key-bias": (_spec(32, 64, bias="keys", dbias=True, group=2), Sizes(2, 140, 200, bias=(2, 2, 1, 200))),
}
# These run at every commit: poison in all kinds of hidden rows.
_UNMARKED = ("d32-everything",)


def _cases() -> list[Any]:
    return [pytest.param(x, marks=() if x in _UNMARKED else pytest.mark.slow) for x in CASES]


@pytest.mark.parametrize("case", _cases())
def test_gradients(case: str) -> None:
    emulated_hopper.check_backward(*CASES[case])


# Draws 0 and 1 have one product, see `emulated_draws.check`.
_CALL = Case("float32", 1, 70, 150, num_kv_heads=2, dlse=True, draw=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "bnts", "head_dim": 32},
        {"mask": "bnts", "head_dim": 128, "group": 2},
        {"bias": "nts", "bias_dtype": "float32", "head_dim": 128, "mask": "bs"},
        {"bias": "ts", "bias_dtype": "bfloat16", "is_causal": True},
        {"bias": "nt", "bias_dtype": "float32", "logits_soft_cap": 5.0},
        {"packed": ((30, 0, 35), (40, 20, 80)), "first": (1, 5)},
        {"is_causal": True, "group": 2},
        {"is_causal": True, "group": 2, "head_dim": 128, "draw": 7},
        {"mask": "bnts", "draw": 10},
    ],
    ids=lambda x: "-".join(x),
)
def test_calls(changes: dict[str, Any]) -> None:
    """With lists, biases and packed sequences; the last three have dropout, that and a function, or a function."""
    emulated_draws.check(Case(**{**vars(_CALL), **changes}), "sm_90a")


def _errors(spec: KernelSpec, sizes: Sizes) -> dict[str, float]:
    """Returns the relative error of each gradient."""
    arrays, wanted = draw_operands(spec, sizes)
    found = emulated_hopper.run_backward(spec, sizes, arrays)
    size = {name: np.sqrt(np.mean(wanted[name] ** 2)) for name in found}
    return {name: np.sqrt(np.mean((found[name] - wanted[name]) ** 2)) / size[name] for name in found}


def test_delta_is_of_the_cotangent_that_products_have() -> None:
    """Else rows of dS do not add up to 0, which shows where values have a large mean."""
    emulated_hopper.check_backward(_spec(32, 32), Sizes(batch=1, queries=40, keys=70, value_mean=256.0))


def test_errors_are_as_small_as_jax_nn_has_them() -> None:
    """With the preset BF16_BF16_F32_X3, by a model of it."""
    sizes, spec = Sizes(batch=1, queries=40, keys=70), _spec(32, 32)
    arrays, exact = draw_operands(spec, sizes)
    found = emulated_hopper.run_backward(spec, sizes, arrays)
    model = split_model.attention(sizes.scale, *(arrays[name][0, :, 0] for name in ("query", "key", "value", "dout")))
    of_head = {name: exact[name][0, :, 0] for name in found}
    split_model.assert_as_small({name: x[0, :, 0] for name, x in found.items()}, model, of_head)


@pytest.mark.parametrize(("names", "grows"), [(("dk", "dv"), "queries"), (("dq",), "keys")])
def test_errors_do_not_grow_with_the_length(
    names: tuple[str, ...], grows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores truncate sums, here after 15 bits. Threads add the sums of tiles, and round."""

    def truncated(_: Any, old: np.ndarray, product: np.ndarray) -> np.ndarray:
        return ((old + product).view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)

    monkeypatch.setattr(hopper_emulator.Warpgroup, "add", truncated)
    few, many = (_errors(_spec(32, 32), Sizes(batch=1, **{"queries": 64, "keys": 64, grows: x})) for x in (64, 320))
    for name in names:
        assert few[name] > 2**-16 and many[name] < 1.5 * few[name], (name, few, many)
