# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which reads `benchmarks/undefined_reads.py` finds in listings. Compiles nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from undefined_reads import undefined_reads

# By name: instructions, and the registers that they read without a value. The first is what ptxas made.
LISTINGS: dict[str, tuple[list[str], list[int]]] = {
    "index ahead of its load": (
        ["ISETP.GT.U32.AND P0, PT, R38, 0x1f, PT", "LDC.64 R4, c[0x0][0x2e8]", "S2R R38, SR_TID.X", "EXIT"],
        [38],
    ),
    "in order": (["S2R R38, SR_TID.X", "ISETP.GT.U32.AND P0, PT, R38, 0x1f, PT", "EXIT"], []),
    "written at the end of a loop, read at its head": (
        ["CS2R R2, SRZ", "@P0 IADD3 R4, R5, R3, RZ", "IADD3 R5, R2, 0x1, RZ", "@P1 BRA `(@1)", "EXIT"],
        [],
    ),
    "written after a loop that reads it": (
        ["MOV R2, 0x1", "IADD3 R2, R2, R6, RZ", "@P1 BRA `(@1)", "MOV R6, R2", "EXIT"],
        [6],
    ),
    "flags of which some bits get a value": (["LOP3.LUT R9, R9, 0xfffffffd, RZ, 0xc0, !PT", "EXIT"], []),
    "half of a pair": (["MOV R8, 0x1", "LDG.E.64 R2, desc[UR4][R8.64+0x10]", "EXIT"], [9]),
    "sums of a product": (
        ["HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", "FADD R2, R24, R31", "FADD R3, R2, R32", "EXIT"],
        [32],
    ),
    "vectors": (
        ["LDSM.16.M88.4 R4, [UR4]", "HMMA.16816.F32.BF16 R8, R4, R6, RZ", "STS.64 [UR4], R10", "STG.E [R12.64], R3"],
        [3, 12, 13],
    ),
    "code that nothing reaches": (["EXIT", "IADD3 R2, R3, R4, RZ"], []),
    "never runs": (["@!PT LDS RZ, [R3]", "EXIT"], []),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_reads_without_a_value(name: str) -> None:
    instructions, registers = LISTINGS[name]
    assert sorted(read.register for read in undefined_reads(instructions)) == registers
