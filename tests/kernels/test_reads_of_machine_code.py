# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Machine code of kernels with random functions of scores reads no register without a value. No GPU needed.

ptxas made such a read of a thread's index; PTX has none, so emulated tests do not see it (notebook/checks.md).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import machine_code
import undefined_reads
from resources import kept_object
from test_gpu_functions import drawn
from testing import combinations
from testing.random_functions import has_random_score, with_random_score

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.choose import configured, kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda.launch_plan import launched_problem
from jax_fastattn.ops.cuda.passes import for_kernels


def _has_disassembler() -> bool:
    try:
        return bool(machine_code.disassembler())
    except SystemExit:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _has_disassembler(), reason="nvdisasm is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),
]

# Calls of this seed have the one whose kernel had such a read, as it was compiled for a Hopper GPU with these tiles.
SEED, ARCH = 61, "sm_90-a100"
CASES = {case.draw: case for case in drawn(SEED) if has_random_score(case) and case.packed is None}


def _backward(case: Case) -> KernelSpec:
    """Returns the compile key of the gradients of a case by the portable kernels."""
    spec, operands = with_random_score(case, *combinations.inputs(case)[:2])
    wanted, problem = combinations.wanted(case), launched_problem(spec, for_kernels(operands))
    found = kernel_spec(problem, "backward", "sm_80", dsinks="sinks" in wanted, dbias="bias" in wanted)
    return configured(dataclasses.replace(found, arch=ARCH))


@pytest.mark.whole
def test_the_kernel_that_had_one() -> None:
    assert _reads(CASES[45]) == []


@pytest.mark.parametrize("draw", [draw for draw in CASES if draw != 45][:21])
def test_kernels_of_random_functions(draw: int) -> None:
    assert _reads(CASES[draw]) == []


def _reads(case: Case) -> list[undefined_reads.Read]:
    found = undefined_reads.of_object(kept_object(_backward(case))[0])
    return [read for reads in found.values() for read in reads]
