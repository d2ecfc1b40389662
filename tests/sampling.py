# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test function run: all, one in so many, one, or none; others in each turn."""

from __future__ import annotations

import collections
import functools
import tomllib
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

# A `whole` function with more cases than that runs one case in three: that of few cases stays whole.
MOST_WHOLE = 20
LARGE_WHOLE = 3
# A function that has too few cases for one in each turn has one in about every third turn.
SELDOM = 3


def sampled(items: Sequence[pytest.Item], sample: int, turn: int, mainly: Collection[str] = ()) -> list[bool]:
    """Returns whether each item runs. Functions of few cases take turns, by a number of their name.

    A case that has to notice a planted fault runs in each turn, unless `mainly` leaves it out.

    Args:
        items: the cases that were found, those of a function in their order.
        sample: of functions marked `slow` or `numbers`, and not `whole`, one case in so many runs. Of `whole`
            functions with more than `MOST_WHOLE` cases one in `LARGE_WHOLE` runs, and all cases of other ones.
        turn: any number; each one takes other cases.
        mainly: files, relative to the root of the repository; of each function of another file one case runs. All
            files count if it is empty.
    """
    functions = [item.nodeid.partition("[")[0] for item in items]
    counts, cases = collections.Counter(functions), collections.Counter[str]()
    found = []
    for item, function in zip(items, functions, strict=True):
        is_other = mainly and function.partition("::")[0] not in mainly
        one_in = counts[function] if is_other else _one_in(item, counts[function], sample)
        place = cases[function] + turn + zlib.crc32(function.encode())
        found.append(place % one_in == 0 or (not is_other and item.nodeid in planted()))
        cases[function] += 1
    return found


@functools.cache
def planted() -> frozenset[str]:
    """Returns the node ids of the cases that have to notice a planted fault."""
    rows = tomllib.loads((Path(__file__).parent / "planted" / "faults.toml").read_text()).values()
    return frozenset(case for row in rows for case in row["cases"])


def _one_in(item: pytest.Item, count: int, sample: int) -> int:
    """Of how many cases of the item's function, which has `count`, one is in the sample."""
    if not {"numbers", "slow"} & {*item.keywords}:
        return 1
    if "whole" in item.keywords:
        return min(LARGE_WHOLE, sample) if count > MOST_WHOLE else 1
    return min(sample, SELDOM * count)


def left_out(items: Sequence[pytest.Item], sample: int) -> dict[tuple[str, str, str], float]:
    """Returns what turns leave out: in which part of them, by function, parameter and value.

    A value counts if a third of the cases of its function have it, and if at least two cases of that function run in
    each turn: it could have been among them.
    """
    functions: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if not {"gpu", "multi_gpu", "gpu_compiler", "every_arch"} & {*item.keywords}:
            functions[item.nodeid.partition("[")[0]].append(item)
    found = collections.Counter[tuple[str, str, str]]()
    for function, cases in functions.items():
        one_in = min(_one_in(case, len(cases), sample) for case in cases)
        if one_in == 1 or len(cases) < 2 * one_in:
            continue
        values = [{(name, repr(x)) for name, x in case.callspec.params.items()} for case in cases]  # pyright: ignore[reportAttributeAccessIssue]
        counts = collections.Counter(value for of_case in values for value in of_case)
        often = {value for value, count in counts.items() if 3 * count >= len(cases)}
        for turn in range(sample):
            run = [x for x, runs in zip(values, sampled(cases, sample, turn), strict=True) if runs]
            found.update((function, *value) for value in often.difference(*run))
    return {place: count / sample for place, count in found.items()}
