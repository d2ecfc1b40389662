# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The lists of tiles that kernels make of a mask function, made once for many calls."""

from __future__ import annotations

from typing import Any, Unpack

from jax_fastattn import keywords
from jax_fastattn.api.batched import attention
from jax_fastattn.api.options import BlockMaskOptions, MaskMod
from jax_fastattn.canonical import block_masks
from jax_fastattn.keywords import explained
from jax_fastattn.ops.block_mask import BlockMask


@explained
def block_mask(mask_mod: MaskMod, query: Any, key: Any, value: Any, **options: Unpack[BlockMaskOptions]) -> BlockMask:
    """Returns the lists of tiles that kernels make of a function, for calls that share it.

    Pass the result as `mask_mod` of `attention`. It is a pytree of arrays without the function, which may leave a
    jitted function, enter another one and be carried by a scan; `jax.vmap` cannot map its lists. Where `explain` names
    kernels, it has lists for them. Elsewhere, and for kernels with other tiles, calls make their own.

    Args:
        mask_mod: as for `attention`.
        query, key, value: arrays of the calls, or `jax.ShapeDtypeStruct`s, with a batch axis or without.
        options: the other arguments of the calls, as for `attention`. The result holds those that hide pairs: `mask`,
            `segment_ids`, lengths, `query_offset`, `is_causal` and `local_window_size`. Calls with the result do not
            take them. The others choose the tiles.

    Raises:
        ValueError, TypeError: `attention` would raise the same error.
    """
    if text := keywords.unknown("block_mask", options, of=attention.__name__):
        raise TypeError(text)
    return block_masks.block_mask(mask_mod, query, key, value, **options)
