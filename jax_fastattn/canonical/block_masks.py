# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a `BlockMask` of the arguments of a call, and gives a call what a `BlockMask` holds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fastattn.canonical.arguments import check_qkv
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.canonical.programs import mask_planes
from jax_fastattn.ops.block_mask import HIDING, BlockMask, lists_of


def block_mask(mask_mod: Any, query: Any, key: Any, value: Any, **arguments: Any) -> BlockMask:
    """Makes the `BlockMask` of a call of `api.attention` with these arguments.

    Query, key and value may be shapes alone.
    """
    query, key, value = (_as_array(x) for x in (query, key, value))
    axes, _ = check_qkv(query, key, value, packed=False)
    program, planes = mask_planes(axes, query.dtype, mask_mod)
    if program is None:
        raise TypeError("`mask_mod` is None, expected a function of (b, h, q, k)")
    spec, operands = canonicalize(query, key, value, mask_mod=mask_mod, **arguments)
    kept, lists = lists_of(spec, operands)
    hiding = {name: x for name in HIDING if (x := getattr(operands, name)) is not None}
    sizes = axes["B"], axes["N"], axes["T"], axes["S"]
    return BlockMask(program, sizes, spec.is_causal, spec.window, kept, tuple(planes), hiding, lists)


def _as_array(x: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
