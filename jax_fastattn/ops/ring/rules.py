# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Registers the passes of a ring with the ops: what a device computes if its spec has a ring."""

from __future__ import annotations

from typing import Any

import jax

from jax_fastattn.ops import forward
from jax_fastattn.ops.backward import gradient_op
from jax_fastattn.ops.linear import Names
from jax_fastattn.ops.ring import gradient, passes
from jax_fastattn.ops.tangents import tangent_op
from jax_fastattn.spec import AttentionSpec


def _forward(*arrays: jax.Array, **params: Any) -> Any:
    return forward.results(passes.forward, arrays, **params)


def _gradient(*arrays: jax.Array, spec: AttentionSpec, with_dlse: bool, wanted: Names) -> list[jax.Array]:
    del with_dlse
    count = len(spec.present)
    found = gradient.gradient(spec, spec.operands(arrays[:count]), arrays[count:], wanted)
    return [found[name] for name in wanted]


def _tangent(*arrays: jax.Array, spec: AttentionSpec, moved: Names) -> list[jax.Array]:
    count = len(spec.present)
    tangents = dict(zip(moved, arrays[count + 2 :], strict=True))
    return passes.tangent(spec, spec.operands(arrays[:count]), tangents)


def define() -> None:
    """Registers the passes; until then no op takes a ring."""
    forward.attend_op.define_ring(_forward)
    gradient_op.define_ring(_gradient)
    tangent_op.define_ring(_tangent)
