# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The calls whose forward pass stores what rounding takes from the output, with which the backward pass makes delta.

delta = sum(out * dout) is what dS subtracts from dP. Where weights are peaked, the difference is small, and the
rounding of the output decides the errors of dq and dk. So a differentiated call may keep 8 more bits of each number of
the output (`device/rests.py`). Only kernels with 16-bit operands write and read them. On the XLA path, which makes
delta of P and dP, they are zeros that nothing reads. Pure Python, no import of the DSL.
"""

from __future__ import annotations

from dataclasses import replace

from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.spec import AttentionSpec, Problem

_DTYPES = ("bfloat16", "float16")


def keeps_rests(call: AttentionSpec, dtype: str) -> bool:
    """Returns `AttentionSpec.keeps_rests` of a call that is differentiated."""
    has_kernels = call.ring is None and not call.is_part and call.implementation != "xla"
    return call.precise_gradients and has_kernels and dtype in _DTYPES


def with_kept_rests(problem: Problem) -> Problem:
    """Returns the problem of a call that is differentiated, as both of its passes have it."""
    if not keeps_rests(problem.spec, problem.dtype):
        return problem
    present = (*problem.spec.present, "out_rests")
    return replace(problem, spec=replace(problem.spec, keeps_rests=True, present=present))


def with_rests(kernel: KernelSpec, call: AttentionSpec) -> KernelSpec:
    """Returns the compile key of a pass of a call: with rests if its kernels have them."""
    taken = {"forward": call.keeps_rests, "backward": "out_rests" in call.present}
    has_rests = kernel.products == "native" and taken.get(kernel.op, False)
    return replace(kernel, out_rests=True) if has_rests else kernel


def describe_rests(call: AttentionSpec, dtype: str) -> str:
    """Says what `precise_gradients` does to a call that runs the kernels; an empty string without it."""
    if not call.precise_gradients:
        return ""
    if call.ring is not None or call.is_part:
        return "`precise_gradients` changes nothing where a mesh splits the rows"
    if dtype not in _DTYPES:
        return f"`precise_gradients` changes nothing in {dtype}, whose output is not rounded to 16 bits"
    return "a forward pass that is differentiated keeps 8 more bits of the output, one byte an element, for dq and dk"
