# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The primitive that is one launch of a compile key: a custom call, on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_fastattn import ffi
from jax_fastattn._compat import Primitive

launch_p = Primitive("jax_fastattn_launch")
launch_p.multiple_results = True


@launch_p.def_abstract_eval
def _abstract(*_: Any, results: Any, **params: Any) -> list[jax.core.ShapedArray]:
    del params
    return [jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape, dtype in results]


def _lower(ctx, *operands, kernel, ints, floats, results):  # type: ignore[no-untyped-def]
    del results
    return ffi.custom_call(ctx, kernel, operands, ints, floats)


# Not inlined: identical calls, as those of a model's layers, share one function and carry their kernel once.
mlir.register_lowering(launch_p, _lower, platform="cuda", inline=False)
