# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Faults of `faults.toml` can be planted, and CI runs all their cases at every commit. `plant.py` plants them."""

from __future__ import annotations

import re

import plant
import pytest
import sampling

FAULTS = plant.faults()


@pytest.mark.parametrize("name", FAULTS)
def test_the_text_that_a_fault_replaces_is_gone_or_there_twice(name: str) -> None:
    fault = FAULTS[name]
    assert (plant.ROOT / fault.file).read_text().count(fault.text) == 1
    assert fault.text != fault.planted
    assert fault.cases and all((plant.ROOT / case.partition("::")[0]).is_file() for case in fault.cases)


def test_a_case_of_a_fault_is_gone_or_sampled(every_case: list[pytest.Item]) -> None:
    """Node ids of all cases, and those that are collected in each turn of a sample."""
    named = {case for fault in FAULTS.values() for case in fault.cases}
    if missing := {case.partition("::")[0] for case in named} - {item.nodeid.partition("::")[0] for item in every_case}:
        pytest.skip(f"without {sorted(missing)[0]} and others it is not known what a turn has; collect all tests")
    assert not named - {item.nodeid for item in every_case}
    (sample,) = map(int, set(re.findall(r"--sample (\d+)", (plant.ROOT / "tests" / "run").read_text())))
    turns = [
        {item.nodeid for item, runs in zip(every_case, sampling.sampled(every_case, sample, turn), strict=True) if runs}
        for turn in range(sample)
    ]
    always = set.intersection(*turns)
    assert not named - always


@pytest.mark.parametrize(
    ("status", "failures", "is_caught"),
    [(1, ["AssertionError"], True), (0, [], False), (1, [], False), (2, [], False), (None, [], False)],
    ids=["failure", "pass", "error of a set-up", "error of collection", "timeout"],
)
def test_what_is_no_failure_of_a_case_counts_as_caught(
    status: int | None, failures: list[str], is_caught: bool
) -> None:
    assert plant.Outcome(status, 0.0, failures, "").is_caught == is_caught
