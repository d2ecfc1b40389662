# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the launches of kernels in the StableHLO of a program, for tests and benchmarks."""

import re


def count_launches(text: str, function: str = "main") -> int:
    """Returns how often `function` launches kernels: as often as its functions are called, with loops counted once."""
    bodies = dict(re.findall(r"func\.func (?:public |private )?@(\w+)(.*?)(?=func\.func|\Z)", text, re.DOTALL))
    called = re.findall(r"[ .]call @(\w+)", bodies[function])
    return sum(name.startswith("jax_fastattn_launch") or count_launches(text, name) for name in called)
