# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""JAX spellings that differ between versions, or that cost less than the public one. This module imports only jax."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax.interpreters import mlir

# It is `jax.extend.core.Primitive`, whose package loads Pallas in jax 0.12: 42 ms that every import would pay.
Primitive: Any = type(jax.lax.add_p)


def runs_at_once() -> bool:
    """Returns whether an operation runs when it is called, so that nothing is traced; False where jax does not say.

    Also False under `debug_nans` and `debug_infs`, which look at each operation, and under `debug_key_reuse`: jax 0.8
    does not trace a program anew for it.
    """
    is_clean = getattr(jax_core, "trace_state_clean", None)
    config: Any = jax.config
    looks = config.jax_debug_nans or config.jax_debug_infs or config.jax_debug_key_reuse
    return is_clean is not None and is_clean() and not looks


def separate_channels(ctx: mlir.LoweringRuleContext) -> None:
    """Gives each collective of the module that is being lowered a channel of its own.

    jax gives all of them channel 1. XLA of jax 0.8 then loses the order of operations in what a partition callback
    returns, if it permutes and also adds up ("Could not find mapping for"). When XLA takes the module in, it numbers
    the channels anew.
    """
    if jax.__version_info__ >= (0, 9):
        return
    ir: Any = mlir.ir
    numbers = itertools.count(1)

    def visit(operation: Any) -> Any:
        if "channel_handle" in operation.attributes:
            text = f"#stablehlo.channel_handle<handle = {next(numbers)}, type = 1>"  # 1: from device to device
            operation.attributes["channel_handle"] = ir.Attribute.parse(text)
        return ir.WalkResult.ADVANCE

    ctx.module_context.module.operation.walk(visit)


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the manual mesh axes (of an enclosing `shard_map`) over which `x` varies."""
    aval = jax.typeof(x)
    return aval.vma if hasattr(aval, "vma") else aval.mat.varying


def zeros_like(x: jax.Array) -> jax.Array:
    """Returns zeros that vary over the manual mesh axes over which `x` varies."""
    return as_varying(jnp.zeros_like(x), varying_axes(x))


def as_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """Returns `x` marked as varying over `axes` too; the transpose sums over the axes that were added.

    Where a `shard_map` does not check such marks, there are none. jax 0.8 would sum in the transpose even so, and
    gradients of a ring would be wrong.
    """
    added = tuple(axes - varying_axes(x))
    checks = getattr(jax_config, "_check_vma", None)
    if not added or (checks is not None and not checks.value):
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, added, to="varying")
    return jax.lax.pvary(x, added)  # pyright: ignore[reportAttributeAccessIssue] (gone from newer jax)


def bind(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds a primitive with the parameters that an equation of a jaxpr has."""
    found = primitive.get_bind_params(params)
    if isinstance(found, tuple):  # until jax 0.11
        functions, params = found
        return primitive.bind(*functions, *args, **params)
    return primitive.bind(*args, **found)
