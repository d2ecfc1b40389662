# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels that cases need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels.architectures import H100_MULTIPROCESSORS
from jax_fastattn.kernels.arguments.precision import head_dim_multiple
from jax_fastattn.kernels.choose import forward_spec, kernel_spec, prepass_configs, prepass_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.out_rests import with_kept_rests
from jax_fastattn.kernels.support import tangent_reasons
from jax_fastattn.layouts.packed_masks import problem_by_rows
from jax_fastattn.ops.cuda.bias_gradient import backward_spec
from jax_fastattn.spec import QKV, Problem


def kernel_specs(cases: Iterable[Case], arch: str) -> list[KernelSpec]:
    """Returns the distinct kernels that the cases need, forward and backward with prepasses, each to be compiled.

    Head dims are padded as a call pads them. Kernels for the gradient of a bias are for an H100's number of SMs.
    """
    found: dict[KernelSpec, None] = {}
    for case in cases:
        problem = problem_by_rows(_padded(case.problem()))
        saving = with_kept_rests(problem)
        forward, asked = forward_spec(problem, arch), {"dlse": case.dlse, "dsinks": case.sinks is not None}
        dbias = case.bias is not None and not case.constant_bias
        backward = backward_spec(saving, arch, **asked, dbias=dbias, multiprocessors=H100_MULTIPROCESSORS)
        configs = (*prepass_configs(forward), *prepass_configs(backward))
        prepasses = (prepass_spec(problem.spec, config, arch) for config in configs)
        found |= dict.fromkeys((forward, forward_spec(saving, arch), backward, *prepasses))
    return list(found)


def tangent_specs(cases: Iterable[Case], arch: str) -> list[KernelSpec]:
    """Returns the distinct kernels that tangents of query, key and value need, with prepasses, each to be compiled."""
    found: dict[KernelSpec, None] = {}
    for case in cases:
        problem = problem_by_rows(_padded(case.problem()))
        if not tangent_reasons(problem, arch):
            kernel = kernel_spec(problem, "tangent", arch, moved=QKV)
            prepasses = (prepass_spec(problem.spec, config, arch) for config in prepass_configs(kernel))
            found |= dict.fromkeys((kernel, *prepasses))
    return list(found)


def _padded(problem: Problem) -> Problem:
    head_dim, v_head_dim = (x + -x % head_dim_multiple(problem.dtype) for x in (problem.head_dim, problem.v_head_dim))
    return dataclasses.replace(problem, head_dim=head_dim, v_head_dim=v_head_dim)
