# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Registers the passes of a ring with the ops: what a device computes if its spec has a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jax_fastattn.ops import forward
from jax_fastattn.ops.backward import gradient_op
from jax_fastattn.ops.linear import Names
from jax_fastattn.ops.ring import gradient, passes
from jax_fastattn.ops.tangents import tangent_op
from jax_fastattn.spec import AttentionSpec, Operands


def _forward(*arrays: jax.Array, **params: Any) -> Any:
    def run(spec: AttentionSpec, operands: Operands) -> Any:
        plain = replace(spec, mean_plane=None, keeps_rests=False)
        return forward.with_zeros(spec, *passes.forward(plain, operands))

    return forward.results(run, arrays, **params)


def _gradient(*arrays: jax.Array, spec: AttentionSpec, with_dlse: bool, wanted: Names) -> list[jax.Array]:
    del with_dlse
    count = len(spec.present)
    found = gradient.gradient(*_without_further(spec, arrays[:count]), arrays[count:], wanted)
    return [found[name] for name in wanted]


def _tangent(*arrays: jax.Array, spec: AttentionSpec, moved: Names) -> list[jax.Array]:
    count = len(spec.present)
    tangents = dict(zip(moved, arrays[count + 2 :], strict=True))
    return passes.tangent(*_without_further(spec, arrays[:count]), tangents)


def _without_further(spec: AttentionSpec, arrays: Sequence[jax.Array]) -> tuple[AttentionSpec, Operands]:
    """Returns a call without what `AttentionSpec.further` names: no pass of a ring takes it."""
    operands = spec.operands(arrays)._replace(row_means=None, out_rests=None)
    return replace(spec, present=operands.present(), mean_plane=None, keeps_rests=False), operands


def define() -> None:
    """Registers the passes; until then no op takes a ring."""
    forward.attend_op.define_ring(_forward)
    gradient_op.define_ring(_gradient)
    tangent_op.define_ring(_tangent)
