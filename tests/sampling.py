# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test function run: all, one in so many, or one; others in each turn."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

import pytest


def sampled(items: Sequence[pytest.Item], sample: int, turn: int, mainly: Collection[str] = ()) -> list[bool]:
    """Returns whether each item runs. A function has at least one case that does.

    Args:
        items: the cases that were found, those of a function in their order.
        sample: of functions marked `slow` or `numbers`, and not `whole`, one case in so many runs.
        turn: any number; each one takes other cases.
        mainly: files, relative to the root of the repository; of each function of another file one case runs. All
            files count if it is empty.
    """
    functions = [item.nodeid.partition("[")[0] for item in items]
    counts, cases = collections.Counter(functions), collections.Counter[str]()
    found = []
    for item, function in zip(items, functions, strict=True):
        is_other = mainly and function.partition("::")[0] not in mainly
        one_in = counts[function] if is_other else min(_one_in(item, sample), counts[function])
        found.append((cases[function] + turn) % one_in == 0)
        cases[function] += 1
    return found


def _one_in(item: pytest.Item, sample: int) -> int:
    """Of how many cases of the item's function one is in the sample."""
    return sample if {"numbers", "slow"} & {*item.keywords} and "whole" not in item.keywords else 1


def left_out(items: Sequence[pytest.Item], sample: int) -> dict[tuple[str, str, str], float]:
    """Returns what turns leave out: in which part of them, by function, parameter and value.

    A value counts if a third of the cases of its function have it, and if at least two cases of that function run in
    each turn: it could have been among them.
    """
    functions: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if not {"gpu", "multi_gpu", "gpu_compiler", "every_arch"} & {*item.keywords} and _one_in(item, sample) > 1:
            functions[item.nodeid.partition("[")[0]].append(item)
    found = collections.Counter[tuple[str, str, str]]()
    for function, cases in functions.items():
        if len(cases) < 2 * sample:
            continue
        values = [{(name, repr(x)) for name, x in case.callspec.params.items()} for case in cases]  # pyright: ignore[reportAttributeAccessIssue]
        counts = collections.Counter(value for of_case in values for value in of_case)
        often = {value for value, count in counts.items() if 3 * count >= len(cases)}
        for turn in range(sample):
            run = [x for x, runs in zip(values, sampled(cases, sample, turn), strict=True) if runs]
            found.update((function, *value) for value in often.difference(*run))
    return {place: count / sample for place, count in found.items()}
