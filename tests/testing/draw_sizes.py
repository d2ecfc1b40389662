# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The features and the sizes of the random calls that `combinations.py` draws."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from testing import draws

FEATURES = (
    "causal",
    "window",
    "offset",
    "lengths",
    "cap",
    "sinks",
    "mask",
    "bias",
    "ids",
    "precision",
    "function",
    "packing",
    "value head dim",
    "grouped heads",
    "deterministic",
    "residual",
    "vmap",
)


@dataclass(frozen=True)
class Sizes:
    """The choices for kinds of calls.

    Attributes:
        dtypes, head_dims: the choices; head dims of calls whose values have the same one.
        value_head_dims: pairs `(H, D)` of calls whose values have a head dim of their own; kernels pad 68 to 72.
        rows: the least and the largest number of queries, and of keys.
        edges: lengths that are drawn more often than others, such as the sizes of tiles.
        windows: the choices; every one has a bound. Some end where chunks or tiles of 16, 64 and 128 keys do.
        precisions: the choices of `jax.default_matmul_precision` of calls that set it. In float32, kernels take these,
            and in 16 bits any.
        widening: a factor on the head dims of dtypes of 16 bits. The largest error of the baseline is small by chance
            if a result has few elements: with head dims of 4, two of some 500 right calls failed.
    """

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    value_head_dims: tuple[tuple[int, int], ...]
    rows: tuple[int, int]
    edges: tuple[int, ...]
    windows: tuple[tuple[int | None, int | None], ...]
    precisions: tuple[str, ...]
    widening: int = 1


# These sizes are for the XLA path on a CPU.
SMALL = Sizes(
    dtypes=("float32", "float32", "float32", "bfloat16"),
    head_dims=(8, 4),
    value_head_dims=((8, 12), (8, 4)),
    rows=(19, 41),
    edges=(0, 1, 15, 16, 17),
    windows=((7, 4), (11, None), (None, 5), (3, 0), (0, 0), (30, 9), (16, None), (15, 16)),
    precisions=("highest", "high", "tensorfloat32", "float32"),
    widening=8,
)
# These sizes are for kernels on a GPU.
LARGE = Sizes(
    dtypes=("bfloat16", "float16", "float32"),
    head_dims=(64, 128, 96, 256, 40),
    value_head_dims=((192, 128), (128, 64), (40, 68), (64, 256)),
    rows=(420, 1100),
    edges=draws.EDGES,
    windows=((128, None), (7, 0), (None, 64), (63, 200), (127, 0)),
    precisions=("BF16_BF16_F32_X3", "high", "TF32_TF32_F32"),
)
# These sizes are for kernels in the emulators, which take seconds for a tile.
EMULATED = dataclasses.replace(
    LARGE,
    dtypes=("bfloat16", "float32", "float16"),
    head_dims=(64,),
    value_head_dims=((40, 68),),
    rows=(97, 200),
)
