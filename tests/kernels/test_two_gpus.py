# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels and collectives in one program, on two GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
import sys
import parallel
found = parallel.block(int(sys.argv[1]), 512)
assert not found["gathered"], found
assert max(found["relative_difference"].values()) < 0.01, found
"""


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kv_heads", (1, 3))
def test_kernels_that_are_first_used_beside_a_collective(kv_heads: int) -> None:
    """Two H100s waited for each other for ever where a kernel was loaded while a collective ran."""
    command = [sys.executable, "-c", PROGRAM, str(kv_heads)]
    subprocess.run(command, cwd=BENCHMARKS, timeout=300, check=True)
