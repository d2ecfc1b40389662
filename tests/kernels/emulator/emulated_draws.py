# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs random calls in the emulators: custom calls of both passes, of tangents and of prepasses, on poisoned operands.

A call is what `ops/cuda/passes.py` makes of canonical operands, on the GPU that a test names. What the public functions
do before that (arguments, batching) is left out: `jax.vmap` is a batch axis here. So is what they do after it, except
that the gradient of a bias gets the dtype of the bias. A third of the calls have dropout. Half of all have a random
`score_mod`, and the gradient of one of its planes, if kernels sum it. Half of those in float32 have products of
float16, and all of those run twice, with other poison.
"""

from __future__ import annotations

import dataclasses

import emulated_ops
import jax
import numpy as np
import pytest
from testing import combinations, compare, tangents
from testing.compare import Results
from testing.poison import poison
from testing.random_dropout import with_few_queries, with_random_dropout
from testing.random_functions import assert_planes_are_close, with_a_plane, with_random_score

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.sums.out_rests import keeps_rests
from jax_fastattn.kernels.support import tangent_reasons
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda import tangents as cuda_tangents
from jax_fastattn.spec import AttentionSpec, Operands, Problem

ARCHS = ("sm_90a", "sm_80")


def draws(seed: int, count: int, arch: str) -> list[Case]:
    """Returns random calls for the emulator of an architecture; those of two architectures differ."""
    return [*map(with_few_queries, combinations.emulated_draws(seed + 1000 * ARCHS.index(arch), count))]


def check(case: Case, arch: str, *, has_gradients: bool = True) -> None:
    """Asserts that the kernels of an architecture are right, by the rule of the GPU tests.

    Args:
        case: the call.
        arch: the architecture.
        has_gradients: whether the backward pass runs, too.
    """
    spec, operands, *cotangents = combinations.inputs(case)
    spec, operands = with_random_dropout(case, *with_random_score(case, spec, operands))
    if has_gradients:
        _check_tangents(spec, operands, arch)
    names = with_a_plane(Problem.of(spec, operands), combinations.wanted(case), case.draw or 0)
    expected = jax.tree.map(np.asarray, combinations.expected(case, spec, operands, *cotangents, names=names))
    if case.dtype == "float32" and case.precision == "default" and (case.draw or 0) // 2 % 2 == 0:
        case, spec = (dataclasses.replace(x, precision="tensorfloat32") for x in (case, spec))
    rounding, turn = combinations.rounding(case), case.draw or 0

    def run(turn: int) -> Results:
        poisoned, dout, dlse = poison(spec, operands, *cotangents, turn=turn)
        with pytest.MonkeyPatch.context() as patch:
            emulated_ops.emulate(patch, arch, emulated_ops.bind)
            keeps = has_gradients and keeps_rests(spec, case.dtype)
            out, lse, *rests = cuda.forward(dataclasses.replace(spec, keeps_rests=keeps), poisoned)
            if not has_gradients:
                return Results(out, lse)
            taken = poisoned._replace(out_rests=rests[0]) if keeps else poisoned
            saved = dataclasses.replace(spec, present=taken.present())
            gradients = cuda.backward(saved, taken, out, lse, dout, dlse, names)
        if gradients.bias is not None and poisoned.bias is not None:
            gradients = gradients._replace(bias=gradients.bias.astype(poisoned.bias.dtype))
        return Results.of(out, lse, gradients)

    found = run(turn)
    if not has_gradients:
        expected = tuple(Results(x.out, x.lse) for x in expected)
    compare.assert_within_budget(*assert_planes_are_close(found, *expected), rounding=rounding)
    if case.dtype == "float32":
        # CTAs of the emulator add to dq in one order.
        compare.assert_same_bits(found, run(turn + 1), set())


def _check_tangents(spec: AttentionSpec, operands: Operands, arch: str) -> None:
    """Does so with the tangents of a call, if a kernel computes them."""
    if tangent_reasons(Problem.of(spec, operands), arch):
        return
    moved = tangents.draw(operands)
    poisoned, moving = tangents.hidden(spec, operands, moved)
    with pytest.MonkeyPatch.context() as patch:
        emulated_ops.emulate(patch, arch, emulated_ops.bind)
        out, lse = cuda.forward(spec, poisoned)
        found = cuda_tangents.tangent(spec, poisoned, out, lse, moving)
    tangents.assert_within_budget(found, spec, operands, moved)
