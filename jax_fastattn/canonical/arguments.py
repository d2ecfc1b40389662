# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the functions `canonicalize`: conversion and checks of arguments, offsets, and the spec of a call.

Each reshape is next to its inverse, and `restore` applies the inverses to the results.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import _compat
from jax_fastattn.canonical import validation
from jax_fastattn.kernels.arguments.precision import forbids_tf32
from jax_fastattn.layouts.paged import PagedOperands
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.programs.function import Program
from jax_fastattn.spec import OPERANDS, QKV, AttentionSpec, Operands, is_known

# A symbolic length counts as this where a window is compared with it. Twice this and an offset stay in UNBOUNDED.
LONGEST_SYMBOLIC = 1 << 27

AnyOperands = TypeVar("AnyOperands", bound=Operands | PagedOperands)


def resolve(
    operands: AnyOperands,
    *,
    scale: Any = None,
    is_causal: Any = False,
    local_window_size: Any = None,
    implementation: Any = None,
    logits_soft_cap: Any = None,
    deterministic: Any = False,
    precise_gradients: Any = False,
    score_mod: Program | None = None,
    mask_mod: Program | None = None,
    kept: tuple[Any, ...] = (),
) -> tuple[AttentionSpec, AnyOperands]:
    """Returns the static facts of a call with defaults filled in, and operands that agree with them."""
    head_dim = operands.query.shape[-1]
    if isinstance(scale, jax.Array):
        operands, scale = operands._replace(scale=_check_scale(scale, operands.query.dtype)), 1.0
    elif scale is None:
        scale = head_dim**-0.5 if head_dim else 1.0
    operands = unify_varying(operands)
    validation.check_implementation(implementation)
    if logits_soft_cap is not None:
        logits_soft_cap = validation.check_scalar("logits_soft_cap", logits_soft_cap, positive=True)
    spec = AttentionSpec(
        scale=validation.check_scalar("scale", scale),
        is_causal=validation.check_flag("is_causal", is_causal),
        window=validation.check_window(local_window_size),
        logits_soft_cap=logits_soft_cap,
        deterministic=validation.check_flag("deterministic", deterministic),
        implementation=implementation,
        precision=matmul_precision(operands.query.dtype),
        present=operands.present(),
        score_mod=score_mod,
        mask_mod=mask_mod,
        kept=kept,
        precise_gradients=validation.check_flag("precise_gradients", precise_gradients),
    )
    return spec, operands


def matmul_precision(dtype: Any) -> str:
    """Returns the precision of products that JAX is set to now, which is when a call is traced.

    The call may be lowered and differentiated under another setting. Products of 16-bit operands are exact at any
    precision, and a higher one would only slow them down.
    """
    if dtype != jnp.float32:
        return "default"
    setting: str | None = jax.config.jax_default_matmul_precision  # pyright: ignore (settings are made at run time)
    return "highest" if forbids_tf32() else setting or "default"


def checked(name: str, x: Any, kind: str) -> jax.Array:
    array = validation.as_array(name, x)
    validation.check_kind(name, array, kind)
    return array


def plane(axes: validation.Axes, name: str, x: Any, batched: bool) -> jax.Array | None:
    """Returns a bias or a mask with four axes, some of which may be of size 1."""
    if x is None:
        return None
    known = OPERANDS[name]
    x = checked(name, x, known.dtype)
    axes.bind_broadcast(name, x, letters(name, batched or x.ndim == 4), per_kv_head=known.per_kv_head)
    return expand_to_bnts(x)


def letters(name: str, batched: bool) -> str:
    """Returns the letters of an operand's axes as users pass it, with a batch axis or without."""
    return OPERANDS[name].letters[not batched :]


def check_qkv(query: Any, key: Any, value: Any, *, packed: bool) -> tuple[validation.Axes, list[jax.Array]]:
    """Returns query, key and value with a batch axis, and their sizes by name."""
    arrays = {name: validation.as_array(name, x) for name, x in zip(QKV, (query, key, value), strict=True)}
    validation.check_float_operands(**arrays)
    if not packed and arrays["query"].ndim not in (3, 4):
        raise ValueError(f"`query` has shape {arrays['query'].shape}, expected 4 dimensions (BTNH), or 3 (TNH)")
    batched = arrays["query"].ndim == 4 and not packed
    axes = validation.Axes()
    for name, x in arrays.items():
        axes.bind(name, x, letters(name, batched))
    if not batched:
        axes.set("B", 1, "`query`")
    validation.check_heads(axes)
    return axes, [add_batch(x, 4) for x in arrays.values()]


def check_sinks(axes: validation.Axes, sinks: Any, dtype: Any) -> jax.Array:
    """Returns sinks `[1, N]` in the dtype of the logits of operands of `dtype`."""
    sinks = checked("sinks", sinks, "float")
    axes.bind("sinks", sinks, letters("sinks", batched=False))
    return sinks.astype(np.promote_types(dtype, np.float32))[None]


def _check_scale(scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns scale `[1, 1]` in the dtype of the logits of operands of `dtype`."""
    validation.check_scalar_array("scale", scale)
    return scale.astype(np.promote_types(dtype, np.float32)).reshape(1, 1)


def is_batched(query: Any) -> bool:
    """Returns whether the query of a call has a batch axis; `jnp.ndim` takes no nested lists."""
    return validation.as_array("query", query).ndim == 4


def restore(results: tuple[jax.Array, jax.Array | None], *, batched: bool) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Inverts `canonicalize` on the results: drops an added batch axis, and a log-sum-exp that was not requested."""
    out, lse = results if batched else jax.tree.map(drop_batch, results)
    return out if lse is None else (out, lse)


def add_batch(x: jax.Array, batched_ndim: int) -> jax.Array:
    """Adds a leading batch axis of 1 if it is missing: `TNH` to `BTNH`."""
    return x[None] if x.ndim == batched_ndim - 1 else x


def drop_batch(x: jax.Array) -> jax.Array:
    """Inverts `add_batch`."""
    return jnp.squeeze(x, axis=0)


def expand_to_bnts(x: jax.Array) -> jax.Array:
    """Adds leading axes of 1 to a bias or mask until it has four; broadcast sizes stay 1."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def to_int32(x: jax.Array) -> jax.Array:
    """Converts integers to int32; a value that does not fit becomes the nearest one that does."""
    if x.dtype == jnp.int32:
        return x
    limits, own = jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    return jnp.clip(x, max(limits.min, own.min), min(limits.max, own.max)).astype(jnp.int32)


def offset_per_batch(query_offset: Any, batch: int) -> jax.Array | None:
    """Returns the offset of each batch entry, int32 `[B]`; None for the common 0, which then costs nothing."""
    if isinstance(query_offset, (int, np.integer)) and not isinstance(query_offset, bool):
        validation.check_int32("query_offset", int(query_offset))
        return jnp.full((batch,), query_offset, jnp.int32) if query_offset else None
    validation.check_offset(query_offset)
    offset = to_int32(validation.as_integers("query_offset", query_offset))
    if offset.shape not in ((), (batch,)):
        raise ValueError(f"`query_offset` has shape {offset.shape}, expected an int, or integers of shape ({batch},)")
    return offset if offset.ndim else jnp.full((batch,), offset)


def has_positions(static: dict[str, Any]) -> bool:
    """Returns whether it matters at which key a query stands."""
    is_causal = validation.check_flag("is_causal", static.get("is_causal", False))
    return validation.check_window(static.get("local_window_size")) != (None, None) or is_causal


def near_offset(
    axes: validation.Axes, offset: jax.Array | None, static: dict[str, Any]
) -> tuple[jax.Array | None, dict[str, Any]]:
    """Applies `fold_wide_window` to an offset and to the static arguments of its call."""
    if offset is None:
        return None, static
    left, right = validation.check_window(static.get("local_window_size"))
    right = 0 if validation.check_flag("is_causal", static.get("is_causal", False)) else right
    near, window = fold_wide_window(offset, (left, right), axes["T"], axes["S"])
    if near is offset:
        return offset, static
    return near, static | {"local_window_size": window, "is_causal": False}


def fold_wide_window(
    offset: jax.Array | None, window: tuple[int | None, int | None], query_length: int, key_length: int
) -> tuple[jax.Array | None, tuple[int | None, int | None]]:
    """Moves sides too wide for an offset that is clamped to UNBOUNDED into the offset. Queries see the same keys.

    Query i sees the keys from i + low to i + high, with low = offset - left and high = offset + right. Either may be
    clamped to [-T, S]. In a window this wide, at most one of them is inside that range, as T + S is smaller.
    """
    left, right = window
    query_length, key_length = (x if is_known(x) else LONGEST_SYMBOLIC for x in (query_length, key_length))
    if offset is None or max(left or 0, right or 0) <= UNBOUNDED - max(query_length, key_length):
        return offset, window
    below, above, reach = -query_length, key_length, query_length + key_length
    low = None if left is None else jnp.clip(_saturating_sum(offset, -left), below, above)
    high = None if right is None else jnp.clip(_saturating_sum(offset, right), below, above)
    if low is None or high is None:
        return (high, (None, 0)) if low is None else (low, (0, None))
    return jnp.where(low > below, low + reach, high - reach), (reach, reach)


def _saturating_sum(x: jax.Array, y: int) -> jax.Array:
    """Adds y to int32 x. A sum that int32 does not hold becomes one that is farther than any length."""
    limits = jnp.iinfo(jnp.int32)
    y = min(max(y, -2 * limits.max), 2 * limits.max)
    for part in (y // 2, y - y // 2):
        x = jnp.clip(x, limits.min - min(part, 0), limits.max - max(part, 0)) + part
    return x


def unify_varying(operands: AnyOperands, axes: frozenset[Any] = frozenset()) -> AnyOperands:
    """Marks every operand as varying over `axes` and the manual axes of a `shard_map` over which any operand varies."""
    axes = axes.union(*(_compat.varying_axes(x) for x in operands.arrays() if isinstance(x, jax.Array)))
    unified: list[Any] = [_compat.as_varying(x, axes) if isinstance(x, jax.Array) else x for x in operands]
    return type(operands)(*unified)
