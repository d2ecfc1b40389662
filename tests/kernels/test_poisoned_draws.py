# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Every suite draws hidden rows in each setting that hides them in another way, and `testing/poison.py` fills them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest
import test_combinations
import test_gpu
import test_passes
from testing import combinations, compare, draw_sizes
from testing.cases.hidden_rows import HIDDEN_ROWS
from testing.poison import visible_rows

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured, kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.spec import Operands

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
        dtype=spec.operand_dtype,
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
        sinks="bn" if codes.SINKS in spec.features or spec.dsinks else None,
        dlse=spec.dlse,
        deterministic=spec.ordered,
    )


def cases_of(test: Any) -> list[Case]:
    """Returns the cases that a test is parametrized with."""
    (found,) = (mark.args[1] for mark in test.pytestmark if mark.name == "parametrize")
    return list(found)


def draws(suite: str) -> list[Case]:
    """Returns what a suite draws."""
    if suite == "CPU":
        return cases_of(test_passes.test_chunks)
    if suite == "GPU":
        return [case for case in cases_of(test_gpu.test_results_and_gradients) if case in HIDDEN_ROWS.values()]
    if suite == "GPU, portable kernels":
        return cases_of(test_gpu.test_portable_kernels)
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    import test_device_layouts
    import test_sm80_dkdv_dq
    import test_sm90_emulated as hopper
    from emulated_backward import Sizes

    if suite == "sm80 emulator":
        rows = [
            (KernelSpec("forward", "sm_80", **{"operand_dtype": "bfloat16", **fields}), Sizes(**sizes))
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


@pytest.mark.parametrize("suite", ["CPU", "GPU", "GPU, portable kernels", "sm80 emulator", "sm90 emulator"])
def test_every_setting_is_poisoned(suite: str) -> None:
    cases = draws(suite)
    for setting, has in SETTINGS.items():
        if setting != "deterministic" or suite != "CPU":  # where sums have no other order
            assert any(has(case) and hides(setting, case) for case in cases), f"no poisoned draw: {setting}"


def listed_draws(suite: str) -> Iterator[Operands]:
    """Yields the operands of what a suite draws with masks and segment ids."""
    if suite in ("CPU", "GPU"):
        module, sizes = (test_combinations, draw_sizes.SMALL) if suite == "CPU" else (test_gpu, draw_sizes.LARGE)
        counts = (module.DRAWS, module.KINDS) if suite == "CPU" else (module.COMBINED_DRAWS, module.COMBINED_KINDS)
        for case in combinations.combined_draws(34, *counts, sizes):
            if combinations.features_of(case) & {"mask", "ids"}:
                yield combinations.inputs(case)[1]
        return
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    import test_masks_ops
    import test_portable_masks_ops

    portable = [name for name, _ in cases_of(test_portable_masks_ops.test_calls_match_the_reference)]
    for name in test_masks_ops.CASES if suite == "sm90 emulator" else portable:
        yield test_masks_ops.draw(test_masks_ops.CASES[name])[1]


@pytest.mark.parametrize("suite", ["CPU", "GPU", "sm80 emulator", "sm90 emulator"])
def test_what_masks_and_ids_hide_is_poisoned(suite: str) -> None:
    """Queries and keys that a mask or ids hide from everybody; `poison` fills them."""
    found: set[str] = set()
    wanted = {f"{side} by {name}" for name in ("mask", "ids") for side in ("queries", "keys")}
    for operands in listed_draws(suite):
        if operands.mask is not None:
            mask = np.asarray(operands.mask)
            found |= {"queries by mask"} if not mask.any(3).all() else set()
            found |= {"keys by mask"} if not mask.any((1, 2)).all() else set()
        if operands.query_segment_ids is not None:
            sides = zip(np.asarray(operands.query_segment_ids), np.asarray(operands.key_value_segment_ids), strict=True)
            for queries, keys in sides:
                found |= {"queries by ids"} if not np.isin(queries, keys).all() else set()
                found |= {"keys by ids"} if not np.isin(keys, queries).all() else set()
        if found == wanted:
            return
    assert found == wanted


@pytest.mark.parametrize("name", ["decoding", "lengths too"])
def test_both_families_run_on_poison_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cotangent of the log-sum-exp and without one."""
    case, ran = HIDDEN_ROWS[name], []
    poisoned = ("operands", "dout", "dlse" if case.dlse else None)

    def run(spec: Any, family: Any, *arrays: Any) -> tuple[()]:
        ran.append((arrays, cuda.kernel_spec))
        return ()

    monkeypatch.setattr(test_gpu, "poison", lambda *_: poisoned)
    monkeypatch.setattr(test_gpu, "_kernels", run)
    monkeypatch.setattr(test_gpu, "_kernels_without_lse", run)
    monkeypatch.setattr(test_gpu, "_first_results", {})
    monkeypatch.setattr(compare, "assert_within_budget", lambda *_: None)
    expectation: Future[Any] = Future()
    expectation.set_result(((), ()))
    test_gpu.test_results_and_gradients(case, {case: expectation})
    test_gpu.test_portable_kernels(case, {case: expectation}, monkeypatch)
    arrays = poisoned if case.dlse else poisoned[:2]
    assert ran == [(arrays, kernel_spec), (arrays, test_gpu.portable_kernel)]


def test_the_portable_path_runs_on_poison(key: jax.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(test_passes, "poison", lambda *_: ("operands", "dout", "dlse"))
    monkeypatch.setattr(test_passes, "run", lambda spec, *arrays: ran.append(arrays[:3]))
    monkeypatch.setattr(test_passes, "evaluate", lambda *_: None)
    monkeypatch.setattr(test_passes, "assert_same", lambda *_: None)
    case = cases_of(test_passes.test_chunks)[0]
    assert case.dtype == "float32"  # another one is compared in another way
    test_passes.test_chunks(case, key)
    assert ran == [("operands", "dout", "dlse")]


def test_operands_of_emulators_are_poisoned() -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from emulated_backward import Sizes, draw_operands, is_poison

    spec = KernelSpec("backward", "sm_80", "bfloat16", 8, 8, query_offset=True, window_right=True)
    sizes = Sizes(batch=1, right=0, offsets=(-1,), queries=3, keys=5)
    arrays, _ = draw_operands(spec, sizes)  # query 0 sees no key, the others keys 0 and 1
    whole = {name: (~is_poison(x)).all((2, 3))[0].tolist() for name, x in arrays.items() if x.ndim == 4}
    queries, keys = [False, True, True], [True, True, False, False, False]
    assert whole == {"query": queries, "dout": queries, "out": queries, "key": keys, "value": keys}


class Drawn(Exception):
    """A harness has asked for operands."""


@pytest.mark.parametrize(
    ("module", "function", "op", "arch", "family"),
    [
        ("emulated_forward", "check", "forward", "sm_80", "sm80"),
        ("emulated_dkdv_dq", "check", "backward", "sm_80", "sm80"),
        ("emulated_hopper", "check_forward", "forward", "sm_90a", "sm90"),
        ("emulated_hopper", "check_backward", "backward", "sm_90a", "sm90"),
    ],
)
def test_emulators_run_on_these_operands(
    module: str, function: str, op: Any, arch: str, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    harness = importlib.import_module(module)

    def draw(*_: Any) -> None:
        raise Drawn

    monkeypatch.setattr(harness, "draw_operands", draw)
    monkeypatch.setattr(harness, "compile_kernel", lambda *_: {})
    with pytest.raises(Drawn):
        getattr(harness, function)(configured(KernelSpec(op, arch, "bfloat16", 64, 64, family=family)))
