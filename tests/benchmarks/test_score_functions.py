# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/score_functions.py` in a tiny size: what a record has, and that functions say what arguments say."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import score_functions

TINY: dict[str, Any] = {"batch": 1, "length": 24, "heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    cases = {name: dataclasses.replace(case, **TINY) for name, case in score_functions.CASES.items()}
    monkeypatch.setattr(score_functions, "CASES", cases)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_a_record(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    options = ["--rounds", "2", "--measurement-ms", "0.1", "--peers", "--commit", "0" * 40]
    score_functions.main(["--cases", "alibi", "distances", "--output", str(output), *options])
    found = json.loads(output.read_text())["cases"]
    assert {*found["alibi"]["speed of plain"]} == {
        f"{kind} {mode}" for kind in ("function", "same", "gradient") for mode in ("forward", "backward")
    }
    assert "gradient backward" in found["distances"]["ms"]


def test_flex_attention_gets_fewer_stages_where_it_needs_more_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def of_torch(case: Any, stages: int | None, *, differentiates: bool) -> dict[str, Any]:
        del case, differentiates
        asked.append(stages)
        if stages != 1:
            raise RuntimeError("OutOfMemoryError: out of resource: triton_flex_attention_backward")
        return {"forward": lambda: None}

    monkeypatch.setattr(score_functions, "of_torch", of_torch)
    found: dict[str, Any] = {}
    case = score_functions.CASES["distances"]
    assert {*score_functions.with_few_stages(case, found, "flex", differentiates=True)} == {"forward"}
    assert asked == [None, 2, 1] and found == {"flex": 1}


@pytest.mark.parametrize("name", ["cap", "alibi", "distances"])
def test_functions_say_what_arguments_say(name: str) -> None:
    case = score_functions.CASES[name]
    assert case.same is not None
    function = score_functions.ours(case, lambda x: {"score_mod": case.mod(x)}, differentiates=False)["forward"]()
    same = score_functions.ours(case, lambda x: case.same(case, x), differentiates=False)["forward"]()
    np.testing.assert_allclose(np.asarray(function, np.float32), np.asarray(same, np.float32), atol=0.05)
