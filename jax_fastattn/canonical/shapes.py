# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The spec and the shapes of the operands of a call, computed before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np

from jax_fastattn.canonical import validation
from jax_fastattn.canonical.arguments import AnyOperands
from jax_fastattn.spec import AttentionSpec

# These arguments are Python values, fixed when a call is traced.
_STATIC = (
    "is_causal",
    "local_window_size",
    "implementation",
    "logits_soft_cap",
    "deterministic",
    "precise_gradients",
    "broadcast_dropout",
)
# These are Python values or arrays, which differ in what is checked.
_STATIC_OR_ARRAY = ("scale", "dropout_rate")


def shapes_of(
    canonicalize: Callable[..., tuple[AttentionSpec, AnyOperands]], **arguments: Any
) -> tuple[AttentionSpec, AnyOperands]:
    """Returns the spec and the abstract operands that `canonicalize` makes of arguments; nothing runs.

    Arrays may be abstract. Any other argument is passed on unchanged, so that it raises the error of the call.
    """
    static = {
        name: x
        for name, x in arguments.items()
        if name in _STATIC or (name in _STATIC_OR_ARRAY and not _is_abstract(x))
    }
    operands = {name: x for name, x in arguments.items() if name not in static}
    leaves, tree = jax.tree.flatten(operands, lambda x: x is not operands and not isinstance(x, (list, tuple)))
    found: list[tuple[AttentionSpec, AnyOperands]] = []

    def trace(shapes: dict[int, jax.Array]) -> None:
        given = jax.tree.unflatten(tree, [shapes.get(i, x) for i, x in enumerate(leaves)])
        spec, operands = canonicalize(**given, **static)
        found.append((spec, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)))

    jax.eval_shape(trace, {i: x for i, x in enumerate(leaves) if _has_shape_alone(x)})
    return found[0]


def _is_abstract(x: Any) -> bool:
    """Returns whether x is a JAX array, or stands for one."""
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct, jax.core.ShapedArray))


def _has_shape_alone(x: Any) -> bool:
    """Returns whether a call checks no value of x. It checks the values of integers on the host."""
    if isinstance(x, np.ndarray):  # JAX refuses some subclasses, such as masked arrays
        return type(x) is np.ndarray and x.dtype.isnative and x.dtype.name in ("bool", *validation.FLOATS)
    return _is_abstract(x)
