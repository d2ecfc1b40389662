# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Keys and values in pages: the operands of a paged call, and the dense operands that hold the same rows.

Two more letters name axes: P pages, and R rows of a page. A page table has M entries for each batch entry, so that S is
M * R. `ops/paged.py` is where a paged call is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp

from jax_fastattn.spec import AttentionSpec, Operand, Operands, Problem


class PagedOperands(NamedTuple):
    """The arrays of one paged call, in the order in which its primitive takes them; None is absent.

    Attributes:
        query: as in `Operands`.
        key_pages, value_pages: the pages of all batch entries. No axis but K may be split over a mesh.
        page_table: the page of each R keys of a batch entry. Any int32; entries past the last key are not read.
        key_value_seq_lengths: the keys of each batch entry, in `[0, M * R]`.
        query_offset, sinks, scale: as in `Operands`.
    """

    query: Annotated[jax.Array, Operand("BTNH", "query")]
    key_pages: Annotated[jax.Array, Operand("PRKH", "query")]
    value_pages: Annotated[jax.Array, Operand("PRKD", "query")]
    page_table: Annotated[jax.Array, Operand("BM", "int32")]
    key_value_seq_lengths: Annotated[jax.Array, Operand("B", "int32")]
    query_offset: Annotated[jax.Array | None, Operand("B", "int32")] = None
    sinks: Annotated[jax.Array | None, Operand("bN", "logits")] = None
    scale: Annotated[jax.Array | None, Operand("b1", "logits")] = None

    @classmethod
    def of(cls, spec: AttentionSpec, arrays: Sequence[Any]) -> PagedOperands:
        """Inverts `arrays`."""
        return cls(**dict(zip(spec.present, arrays, strict=True)))

    def present(self) -> tuple[str, ...]:
        """Returns the names of the operands that are not None, in order."""
        return tuple(name for name, x in zip(self._fields, self, strict=True) if x is not None)

    def arrays(self) -> list[jax.Array]:
        """Returns the operands that are not None, in order."""
        return [x for x in self if x is not None]

    def gathered(self) -> Operands:
        """Returns dense operands with copies of the pages: keys `[B, M * R, K, H]` and values `[B, M * R, K, D]`.

        Ids are clamped to the pages. Rows past the last page of a batch entry come from page 0: no id that might be
        anything is read, and the lengths hide these rows.
        """
        ids = page_ids(self)

        def rows(pages: jax.Array) -> jax.Array:
            found = pages.at[ids].get(mode="promise_in_bounds")
            return found.reshape(self._dense_shape(pages))

        return self._dense(rows)

    def dense_shapes(self) -> Operands:
        """Returns what `gathered` would, with abstract keys and values; nothing runs."""
        return self._dense(lambda pages: jax.ShapeDtypeStruct(self._dense_shape(pages), pages.dtype))

    def dense_spec(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the spec of the dense call that computes the same."""
        return dataclasses.replace(spec, present=self.dense_shapes().present())

    def problem(self, spec: AttentionSpec) -> Problem:
        """Returns the problem of the call; its spec is the dense call's."""
        pages, rows = self.key_pages.shape[:2]
        return dataclasses.replace(Problem.of(self.dense_spec(spec), self.dense_shapes()), page=rows, pages=pages)

    def _dense(self, rows: Callable[[jax.Array], Any]) -> Operands:
        return Operands(
            self.query,
            rows(self.key_pages),
            rows(self.value_pages),
            key_value_seq_lengths=self.key_value_seq_lengths,
            query_offset=self.query_offset,
            sinks=self.sinks,
            scale=self.scale,
        )

    def _dense_shape(self, pages: jax.Array) -> tuple[int, ...]:
        batch, entries = self.page_table.shape
        return (batch, entries * pages.shape[1], *pages.shape[2:])


PAGED_OPERANDS: dict[str, Operand] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(PagedOperands, include_extras=True).items()
}

# All batch entries share these operands.
PAGES = ("key_pages", "value_pages")


def page_ids(operands: PagedOperands) -> jax.Array:
    """Returns the page of each entry of the table, int32 `[B, M]` in `[0, P)`; 0 past a batch entry's last page."""
    pages, rows = operands.key_pages.shape[:2]
    first_keys = jnp.arange(operands.page_table.shape[1], dtype=jnp.int32) * rows
    is_used = first_keys[None, :] < operands.key_value_seq_lengths[:, None]
    return jnp.where(is_used, jnp.clip(operands.page_table, 0, pages - 1), 0).astype(jnp.int32)
