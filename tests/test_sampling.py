# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Samples have every case over the turns, and a case of each function of many; a turn leaves few values out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sampling

# Values that a turn of CI may leave out, on average: `sampling.left_out` says which ones count. Six of ten turns of one
# case in six left out all decoding kernels of one family.
MOST_LEFT_OUT = 2.5

SLOW = ("slow",)


def cases(function: str, keywords: Sequence[str] = SLOW, **parameters: Sequence[Any]) -> list[Any]:
    """Returns the cases of a function, of all combinations of its parameters; the last one changes first."""
    values = [dict(zip(parameters, x, strict=True)) for x in itertools.product(*parameters.values())]
    return [
        SimpleNamespace(
            nodeid=f"tests/{function}[{'-'.join(map(str, x.values()))}]",
            keywords=keywords,
            callspec=SimpleNamespace(params=x),
        )
        for x in values
    ]


def run(items: list[Any], *how: Any) -> list[str]:
    return [item.nodeid for item, runs in zip(items, sampling.sampled(items, *how), strict=True) if runs]


def test_turns_have_every_case_once() -> None:
    items = cases("test_a.py::test_x", letter="abc", number=range(7))
    turns = [run(items, 7, turn) for turn in range(7)]
    assert {len(turn) for turn in turns} == {3}
    assert len({x for turn in turns for x in turn}) == 21


def test_functions_of_few_cases_have_one_in_every_third_turn() -> None:
    functions = [cases(f"test_a.py::test_{letter}", number=range(2)) for letter in "abcdefghijkl"]
    turns = [run([x for items in functions for x in items], 7, turn) for turn in range(6)]
    assert len({x for turn in turns for x in turn}) == 24
    assert sum(map(len, turns)) == 24 and all(turns), "functions do not all have the same turns"


@pytest.mark.parametrize(("keywords", "count"), [((), 9), (("slow", "whole"), 9), (("numbers",), 2), (SLOW, 2)])
def test_whole_functions_and_cheap_ones_have_every_case(keywords: tuple[str, ...], count: int) -> None:
    assert len(run(cases("test_a.py::test_x", keywords, number=range(9)), 7, 0)) == count


def test_large_whole_functions_have_one_case_in_three() -> None:
    items = cases("test_a.py::test_x", ("slow", "whole"), number=range(21))
    turns = [run(items, 11, turn) for turn in range(3)]
    assert [len(turn) for turn in turns] == [7, 7, 7]
    assert len({x for turn in turns for x in turn}) == 21


def test_cases_of_planted_faults_run_in_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    items = cases("test_a.py::test_x", number=range(22))
    monkeypatch.setattr(sampling, "planted", lambda: {items[5].nodeid})
    for turn in range(11):
        assert items[5].nodeid in run(items, 11, turn)
    assert sum(items[5].nodeid in run(items, 11, turn, ["tests/test_b.py"]) for turn in range(22)) == 1


def test_functions_of_other_files_have_one_case() -> None:
    items = [x for name in ("a", "b") for x in cases(f"test_{name}.py::test_x", (), number=range(9))]
    for turn in (0, 5, 123456):
        found = run(items, 7, turn, ["tests/test_a.py"])
        assert [x.partition("::")[0] for x in found] == ["tests/test_a.py"] * 9 + ["tests/test_b.py"]


def test_a_value_that_no_case_of_a_turn_has_is_left_out() -> None:
    items = cases("test_a.py::test_x", number=range(6), family=("sm80", "sm90"))
    place = ("tests/test_a.py::test_x", "family", "'sm90'")
    assert sampling.left_out(items, 6)[place] == 0.5
    assert sampling.left_out(items, 5) == {}
    assert sampling.left_out([x for x in items if x.callspec.params["number"] < 4], 5) == {}, "one case runs"


def test_a_turn_leaves_few_values_of_parameters_out(every_case: list[pytest.Item]) -> None:
    """A sample of 6 left out 12.8: at every other turn no portable decoding kernel was emulated."""
    (sample,) = set(re.findall(r"--sample (\d+)", (Path(__file__).parent / "run").read_text()))
    found = sampling.left_out(every_case, int(sample))
    assert sum(found.values()) <= MOST_LEFT_OUT, sorted(found.items(), key=lambda x: -x[1])
