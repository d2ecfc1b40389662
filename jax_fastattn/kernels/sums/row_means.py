# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The calls whose forward pass stores the mean key of each row, with which the main backward kernel sums a gradient.

The gradient of a head's number is the sum of dS times the derivative of its score, d = slope key + what depends on the
query. A row of dS adds up to 0, except for the roundings of the output that delta is made of, which count as many times
as d is large. So a row's mean is taken off, and only slope (key - mean key) is left, where they count as little as keys
with weights differ. Any other number in the place of the mean gives the same sum up to roundings: the XLA path stores
zeros. Pure Python, no import of the DSL.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.programs import analysis
from jax_fastattn.programs.code import Code, places
from jax_fastattn.spec import AttentionSpec

# A row of dS adds up to another number with these operands, or kernels sum another way.
_WITHOUT = frozenset(("bias", "sinks", "sequences", "dropout"))

# Up to this head dim one kernel of Hopper's computes dk, dv and dq. The portable kernels for the head dims between the
# others keep sums of up to 192 columns in registers, and would spill up to 40 bytes more.
_MAX_HEAD_DIM = 128
_SPILLING_HEAD_DIMS = range(161, 193)

# The bytes that have the mean key of a query in portable kernels, see `plane_products.factor_row`.
MEAN_NBYTES = 16


def mean_plane(call: AttentionSpec, dtype: str, moved: Collection[str]) -> int | None:
    """Returns `AttentionSpec.mean_plane` of a call whose operands in `moved` are differentiated.

    It is the one plane that is differentiated, if it has numbers of heads, scores are a product plus terms, and the
    derivative is linear in the key.
    """
    program, present = call.score_mod, {*call.present}
    if not isinstance(program, Code) or analysis.terms(program) is None or not _WITHOUT.isdisjoint(present):
        return None
    if call.logits_soft_cap is not None or call.is_part or call.ring is not None or call.implementation == "xla":
        return None
    wanted = [(i, place) for i, place in enumerate(places((program,))[0]) if place.operand in moved]
    if dtype not in ("bfloat16", "float16") or len(wanted) != 1 or wanted[0][1].plane.kind != "head":
        return None
    plane = wanted[0][0]
    return None if analysis.key_slope(program, program.results[2 + plane]) is None else plane


def with_means(kernel: KernelSpec, plane: int | None) -> KernelSpec:
    """Returns the compile key of a pass of a call whose spec has a `mean_plane`: with the means if its kernels do."""
    width = max(kernel.head_dim, kernel.v_head_dim)
    fits = width <= _MAX_HEAD_DIM if kernel.family == "sm90" else width not in _SPILLING_HEAD_DIMS
    has_kernels = fits and kernel.products == "native" and not kernel.dlse
    is_summed = plane is not None and (kernel.op == "forward" or (kernel.op == "backward" and kernel.dplane == plane))
    return replace(kernel, dplane=None, mean_plane=plane) if has_kernels and is_summed else kernel
