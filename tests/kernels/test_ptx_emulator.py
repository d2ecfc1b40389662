# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What emulators make of launches that begin early: PTX written by hand, of which an order is wrong."""

from __future__ import annotations

from collections.abc import Callable

import hopper_emulator
import numpy as np
import pytest
import warp_emulator
from ptx_emulator import Memory

WAIT, BEGIN = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
# The first word is written; the second one gets what is in it.
WRITE, READ = "st.global.b32 [%rd1], %r2;", "ld.global.b32 %r3, [%rd1]; st.global.b32 [%rd1+4], %r3;"
COUNT = "atom.release.gpu.global.add.s32 %r4, [%rd1+8], %r2;"
ACQUIRE = "ld.acquire.gpu.global.s32 %r4, [%rd1+8]; setp.eq.s32 done, %r4, %r5;"
UNORDERED, UNFINISHED = "has not waited for it", "exits without waiting for the launches before it"

EMULATORS = {"warp": warp_emulator.launch, "hopper": hopper_emulator.launch}


def _ptx(body: str) -> str:
    return f"""
.visible .entry kernel(.param .u64 kernel_param_0)
.reqntid 32, 1, 1
{{
ld.param.b64 %rd1, [kernel_param_0];
mov.b32 %r2, 7;
mov.b32 %r5, {32 * 7};
{body.replace("; ", chr(59) + chr(10))}
ret;
}}
"""


def _run(launch: Callable[..., None], *launches: tuple[str, bool]) -> int:
    """Runs launches of a warp, given instructions and whether each begins early, and returns the second word."""
    memory = Memory()
    words = memory.add(np.zeros(3, np.int32))
    for body, early in launches:
        launch(_ptx(body), [words], memory, 1, 16, begins_early=early)
    return int(memory.read(words, (3,), np.int32)[1])


# By name: launches, and whether each begins early.
ORDERED: dict[str, list[tuple[str, bool]]] = {
    "late": [(WRITE, False), (READ, False)],
    "waits": [(f"{BEGIN} {WRITE}", False), (f"{WAIT} {READ}", True)],
    "relies-on-the-wait-of-the-launch-before": [
        (f"{BEGIN} {WRITE}", False),
        (f"{WAIT} {BEGIN}", True),
        (f"{READ} {WAIT}", True),
    ],
    "acquires-a-count": [(f"{BEGIN} {WRITE} {COUNT}", False), (f"{ACQUIRE} {READ} {WAIT}", True)],
    "waits-for-the-call-before": [(f"{WAIT} {WRITE} {READ}", True)],
}
UNORDERED_LAUNCHES: dict[str, tuple[list[tuple[str, bool]], str]] = {
    "reads-before-it-waits": ([(f"{BEGIN} {WRITE}", False), (f"{READ} {WAIT}", True)], UNORDERED),
    "does-not-wait": ([(f"{BEGIN} {WRITE}", False), (READ, True)], UNORDERED),
    "ends-before-the-launch-before": ([(f"{BEGIN} {WRITE}", False), (WRITE, True)], UNFINISHED),
    "relies-on-a-launch-that-has-not-waited": (
        [(f"{BEGIN} {WRITE}", False), (f"{BEGIN} {WAIT}", True), (f"{READ} {WAIT}", True)],
        UNORDERED,
    ),
    "reads-a-count-that-is-not-released": (
        [(f"{BEGIN} {WRITE} {COUNT.replace('release', 'relaxed')}", False), (f"{ACQUIRE} {READ} {WAIT}", True)],
        UNORDERED,
    ),
    "reads-a-count-without-acquiring-it": (
        [(f"{BEGIN} {WRITE} {COUNT}", False), (f"{ACQUIRE.replace('acquire', 'relaxed')} {READ} {WAIT}", True)],
        UNORDERED,
    ),
    "writes-after-the-count": ([(f"{BEGIN} {COUNT} {WRITE}", False), (f"{ACQUIRE} {READ} {WAIT}", True)], UNORDERED),
    "reads-operands-of-the-call-before": ([(f"{READ} {WAIT}", True)], UNORDERED),
}


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_launches(name: str) -> None:
    assert _run(warp_emulator.launch, *ORDERED[name]) == 7


@pytest.mark.parametrize("emulator", EMULATORS)
@pytest.mark.parametrize("name", UNORDERED_LAUNCHES)
def test_a_launch_that_begins_early(name: str, emulator: str) -> None:
    launches, message = UNORDERED_LAUNCHES[name]
    with pytest.raises(RuntimeError, match=message):
        _run(EMULATORS[emulator], *launches)
