# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""How the rows of a call are split over devices: a fact of `spec.AttentionSpec`, which `ops/ring/` acts on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Ring:
    """The split of queries and keys over the devices of a mesh axis, and how these devices share one call.

    Attributes:
        axes: the mesh axes that split T and S, major first.
        size: the number of devices along them.
        layout: which rows a device has. "contiguous": device i has the i-th of `size` parts. "zigzag": it has the
            chunks i and 2 * size - 1 - i of 2 * size chunks.
        balance: whether devices with contiguous rows of a causal call help each other, see `ops/ring/helping.py`.
        shared_boundaries: whether packed queries and keys have the same boundaries and no offsets, so that a window
            hides keys of distant devices.
        mesh: names and sizes of all axes of the mesh.
        whole_keys: whether each device has all keys, so that only queries are split. Nothing is sent then, and the
            gradients of keys and values are a device's share.
        lengths: how many queries and keys the whole sequence has, if it does not fill the rows of all devices. The rest
            is padding of zeros at the end. None if there is none, or if the caller hides it.
    """

    axes: tuple[str, ...]
    size: int
    layout: Literal["contiguous", "zigzag"] = "contiguous"
    balance: bool = False
    shared_boundaries: bool = False
    mesh: tuple[tuple[str, int], ...] = ()
    whole_keys: bool = False
    lengths: tuple[int, int] | None = None
