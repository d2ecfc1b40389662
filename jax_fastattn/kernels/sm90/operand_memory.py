# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What the shared memories of kernels with resident operands have in common. Pure Python, no import of the DSL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from jax_fastattn.kernels.device.regions import Row, SharedTable
from jax_fastattn.kernels.sm90.geometry import SHARED_MEMORY

Config = TypeVar("Config")


@dataclass(frozen=True)
class OperandMemory(Generic[Config]):
    """Lays out shared memory of a CTA that holds tiles of Q, K, V and dO.

    Attributes:
        head_dim: columns of Q and K in shared memory, padded.
        v_head_dim: columns of V and dO in shared memory, padded.
        feature_rows: rows that features add to the rows of the kernel.
    """

    config: Config
    head_dim: int
    v_head_dim: int
    feature_rows: tuple[Row, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """Returns the kernel's own regions and barriers."""
        raise NotImplementedError

    @cached_property
    def table(self) -> SharedTable:
        """Returns all regions and barriers."""
        return SharedTable(self.rows).with_rows(*self.feature_rows)

    @property
    def bias_box(self) -> tuple[int, int] | None:
        """Returns the queries and keys of a box of a bias of pairs; None if there are no stages for it."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Returns how many bytes to ask for at launch."""
        return self.table.nbytes

    @property
    def fits(self) -> bool:
        """Returns whether a CTA fits an SM."""
        return self.nbytes <= SHARED_MEMORY
