# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Says which of the arguments in `buffers.py` and `scalars.py` the launch of a compile key has. Imports no DSL."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

from jax_fastattn.kernels.arguments.buffers import Buffer, Buffers
from jax_fastattn.kernels.arguments.prepass import PrepassBuffers
from jax_fastattn.kernels.arguments.scalars import BIAS_SCALARS, VISIT_SCALARS
from jax_fastattn.kernels.key import KernelSpec


def absent_scalars(spec: KernelSpec) -> tuple[str, ...]:
    """Returns the scalars that are None in launches of a compile key, which then takes no such parameter."""
    visit = () if spec.listed or spec.row_bits else VISIT_SCALARS
    side = () if spec.op == "decode" else ("side_heads",)
    pages = () if spec.page else ("pages",)
    bias = (() if spec.bias else BIAS_SCALARS) + (() if spec.sums_dbias else ("bias_parts",))
    return visit + side + pages + bias


def buffers_type(spec: KernelSpec) -> type[Buffers | PrepassBuffers]:
    """Returns the type of the buffers of a compile key's launch."""
    return PrepassBuffers if spec.op == "prepass" else Buffers


def present_buffers(spec: KernelSpec) -> dict[str, Buffer | None]:
    """Returns the buffers of a launch by name, in order, each with its dtype; None if the compile key lacks it."""
    found: dict[str, Buffer | None] = {}
    for name, buffers in _definitions(buffers_type(spec)).items():
        if name == "added":
            found |= added_buffers(spec)
        for buffer in buffers:
            if not buffer.is_of(spec.op, spec.family):
                continue
            if buffer.needs is None or operator.attrgetter(buffer.needs)(spec):
                found[name] = replace(
                    buffer, dtype=buffer.dtype or getattr(spec, buffer.dtype_of or f"{buffer.role}_dtype")
                )
            else:
                found[name] = None
    return found


def added_buffers(spec: KernelSpec) -> dict[str, Buffer]:
    """Returns the operands that features add to a launch, by name."""
    return {name: Buffer("operand", dtype) for code in spec.features for name, dtype in code.operands}


def named_buffers(spec: KernelSpec, values: Mapping[str, Any]) -> Buffers | PrepassBuffers:
    """Returns the buffers of a launch, given what `present_buffers` names; an absent one may be left out or None."""
    names, added = buffers_type(spec), tuple(added_buffers(spec))
    # A launch that has sinks by a feature has them in one place.
    members = {name: None if name in added else values.get(name) for name in names._fields}
    if added:
        members["added"] = NamedTuple("Added", [(name, Any) for name in added])(*[values[name] for name in added])
    return names(**members)


def launch_buffers(spec: KernelSpec) -> dict[str, str | None]:
    """Returns the dtype of each buffer of a launch by name, in order, see `present_buffers`; None if it is left out."""
    return {name: buffer and buffer.dtype for name, buffer in present_buffers(spec).items()}


@functools.cache
def _definitions(buffers: type[Buffers | PrepassBuffers]) -> Mapping[str, tuple[Buffer, ...]]:
    """Returns what the rows of a launch's buffers say, by name; nothing for the one of what features add."""
    hints = get_type_hints(buffers, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
