# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a `BlockMask` of the arguments of a call, and gives a call what a `BlockMask` holds."""

from __future__ import annotations

from typing import Any

import jax

from jax_fastattn.canonical.arguments import check_qkv
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.canonical.programs import mask_planes
from jax_fastattn.canonical.validation import Shape, as_array
from jax_fastattn.ops.block_mask import HIDING, BlockMask, lists_of
from jax_fastattn.spec import QKV


def block_mask(mask_mod: Any, query: Any, key: Any, value: Any, **arguments: Any) -> BlockMask:
    """Makes the `BlockMask` of a call of `api.attention` with these arguments.

    Query, key and value may be shapes alone. Nothing of their sizes is allocated.
    """
    query, key, value = (_without_values(name, x) for name, x in zip(QKV, (query, key, value), strict=True))
    axes, _ = check_qkv(query, key, value, packed=False)
    program, planes = mask_planes(axes, query.dtype, mask_mod)
    if program is None:
        raise TypeError("`mask_mod` is None, expected a function of (b, h, q, k)")
    spec, operands = canonicalize(query, key, value, mask_mod=mask_mod, **arguments)
    kept, lists = lists_of(spec, operands)
    hiding = {name: x for name in HIDING if (x := getattr(operands, name)) is not None}
    sizes = axes["B"], axes["N"], axes["T"], axes["S"]
    return BlockMask(program, sizes, spec.is_causal, spec.window, kept, tuple(planes), hiding, lists)


def _without_values(name: str, x: Any) -> Shape:
    x = x if isinstance(x, jax.ShapeDtypeStruct) else as_array(name, x)
    return Shape(x.shape, x.dtype)
