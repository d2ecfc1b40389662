# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/machine_code.py` reads from listings, and what it says about two of them. Compiles nothing."""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import machine_code
from machine_code import Kernel, compare, loop_sizes, read_listing

SYMBOL = "kernel_cutlass_background_jax_fastattnkernelssm90preprocessPreprocessKernel_object_at__ptrf32gmem_0"
# As nvdisasm prints it: a loop in a loop, of which a wait and a rare case are out of line; a branch to itself.
LISTING = f"""
	.target	sm_90a
	.section	.text.{SYMBOL},"ax",@progbits
	.align	128
{SYMBOL}:
.text.{SYMBOL}:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ULDC.64 UR4, c[0x0][0x210] ;
.L_x_7:
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0030*/                   BSSY B0, `(.L_x_3) ;
.L_x_2:
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*0050*/              @!P1 BRA `(.L_x_4) ;
.L_x_5:
        /*0060*/                   FFMA R4, R4, R5, R6 ;
        /*0070*/               @P2 BRA `(.L_x_6) ;
.L_x_8:
        /*0080*/                   ISETP.GE.AND P0, PT, R2, R7, PT ;
        /*0090*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*00a0*/               @P3 BRA `(.L_x_7) ;
        /*00b0*/                   EXIT ;
.L_x_4:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3 ;
        /*00d0*/              @!P1 BRA `(.L_x_4) ;
        /*00e0*/                   BRA `(.L_x_5) ;
.L_x_6:
        /*00f0*/                   FADD R4, R4, R4 ;
        /*0100*/                   BRA `(.L_x_8) ;
.L_x_9:
        /*0110*/                   BRA `(.L_x_9);
        /*0120*/                   NOP;
        /*0130*/                   NOP;
.L_x_391:
	.section	.text.other,"ax",@progbits
other:
.text.other:
        /*0000*/                   EXIT ;
"""
INSTRUCTIONS = read_listing(LISTING)[SYMBOL]
KERNEL = Kernel(168, 0, 1024, INSTRUCTIONS)


def test_listings_are_read_by_kernel() -> None:
    assert read_listing(LISTING)["other"] == ["EXIT"]
    assert len(INSTRUCTIONS) == 18
    assert INSTRUCTIONS[5] == "@!P1 BRA `(@12)"
    assert machine_code.kernel_name(SYMBOL) == "PreprocessKernel.background"


def test_loops_hold_their_code_that_is_out_of_line() -> None:
    inner = 6 + 3 + 2
    assert loop_sizes(INSTRUCTIONS) == [inner + 3, inner]


def _changed(*replaced: tuple[str, str]) -> Kernel:
    text = LISTING
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    return dataclasses.replace(KERNEL, instructions=read_listing(text)[SYMBOL])


ADDED = ("FFMA R4, R4, R5, R6 ;", "FFMA R4, R4, R5, R6 ;\n /*0060*/  NOP ;")
BEFORE_LOOPS = ("LDC R1", "NOP ;\n /*0000*/  LDC R1")


@pytest.mark.parametrize(
    ("after", "verdict", "details", "allowed"),
    {
        "equal": (KERNEL, "equal", "", True),
        "other-labels": (_changed((".L_x_7", ".L_x_70")), "equal", "", True),
        "other-parameters": (_changed(("0x210", "0x220")), "moved", "", True),
        "other-registers": (_changed(("R4, R5, R6", "R4, R6, R5")), "same opcodes", "", True),
        "other-instruction": (_changed(("FADD", "FMUL")), "other", "", True),
        "fewer": (
            _changed(("        /*0060*/                   FFMA R4, R4, R5, R6 ;\n", "")),
            "fewer",
            "instructions 18 -> 17, loop 14 -> 13, loop 11 -> 10",
            True,
        ),
        "more": (_changed(*[BEFORE_LOOPS] * 10), "more", "instructions 18 -> 28", True),
        "too-many": (_changed(*[BEFORE_LOOPS] * 11), "more", "instructions 18 -> 29", False),
        "two-in-a-loop": (_changed(*[ADDED] * 2), "more", "instructions 18 -> 20, loop 14 -> 16, loop 11 -> 13", True),
        "three-in-a-loop": (_changed(*[ADDED] * 3), "more", "loop 14 -> 17", False),
        "no-loop": (_changed(("BRA `(.L_x_7)", "BRA `(.L_x_4)")), "same opcodes", "loops [14, 11] -> [", False),
        "registers": (dataclasses.replace(KERNEL, registers=167), "equal", "registers 168 -> 167", False),
        "spills": (dataclasses.replace(KERNEL, local_bytes=8), "equal", "local_bytes 0 -> 8", False),
    }.values(),
)
def test_verdicts(after: Kernel, verdict: str, details: str, allowed: bool) -> None:
    change = compare(KERNEL, after)
    assert (change.verdict, change.allowed) == (verdict, allowed)
    assert details in ", ".join(change.details)


def test_a_loop_may_grow_by_a_share_of_it() -> None:
    def kernel(size: int) -> Kernel:
        return dataclasses.replace(KERNEL, instructions=["NOP"] * size + ["@P0 BRA `(@0)", "EXIT"])

    assert compare(kernel(399), kernel(403)).allowed
    assert not compare(kernel(399), kernel(404)).allowed


def test_report_fails_beyond_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    spilled = dataclasses.replace(KERNEL, local_bytes=8)
    assert machine_code.report({"row": {"a": KERNEL}}, {"row": {"a": KERNEL}}) == 0
    assert machine_code.report({"row": {"a": KERNEL}}, {"row": {"a": spilled}}) == 1
    assert machine_code.report({"row": {"a": KERNEL}}, {"row": {"b": KERNEL}}) == 1
    assert machine_code.report({"row": {"a": KERNEL}}, {"another": {"a": KERNEL}}) == 1
    assert "1 equal" in capsys.readouterr().out


def test_kernels_pair_wherever_their_module_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that moved to another folder, and one that was renamed too, are neither gone nor new."""
    moved = SYMBOL.replace("sm90preprocess", "sm90backwardpreprocess")
    assert machine_code.kernel_name(moved) == machine_code.kernel_name(SYMBOL)
    listing = {"StatisticsKernel.later": dataclasses.asdict(KERNEL)}
    path = tmp_path / "row.json.gz"
    path.write_bytes(gzip.compress(json.dumps(listing).encode()))
    monkeypatch.setitem(machine_code.RENAMED, "StatisticsKernel.later", "PreprocessKernel.background")
    assert machine_code.load(path) == {"PreprocessKernel.background": KERNEL}
