# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What TMA loads: operands in global memory, and their copies to shared memory."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device.wgmma import tile_layout
from jax_fastattn.kernels.key import KernelSpec


class TmaRows(Protocol):
    """Which rows of an operand are loaded; a `Span` says that too."""

    def tma_rows(self, coordinates: cute.Tensor, head: Int32) -> Any:
        """Returns the rows of a head: `[rows, columns, heads, batch]` to `[rows, columns]`, from the first one on."""
        ...


class TmaOperand(NamedTuple):
    """An operand as kernels take it.

    Attributes:
        atom: the copy, with the descriptor.
        coordinates: `[rows, columns, heads, batch]`.
    """

    atom: cute.CopyAtom
    coordinates: cute.Tensor

    def copy(
        self, shared: cute.Tensor, head: Int32, span: TmaRows, *, term: int = 0
    ) -> Callable[[Int32, Any, cute.Pointer], None]:
        """Returns a function `(tile, stage, barrier)` by which a warp loads a tile of rows; TMA completes the barrier.

        Args:
            shared: `[rows, columns, stage]`.
            head: its index.
            span: the rows; tile 0 begins with the first one.
            term: which term of the operand, if rows have several side by side.
        """
        shape = tuple(cute.size(shared, mode=[i]) for i in range(2))
        tiles = cute.local_tile(span.tma_rows(self.coordinates, head), shape, (None, term))
        inner, outer = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

        def copy(tile: Int32, stage: Any, barrier: cute.Pointer) -> None:
            cute.copy(self.atom, outer[None, tile], inner[None, stage], tma_bar_ptr=barrier)

        return copy

    def copy_terms(
        self, shared: Sequence[cute.Tensor], head: Int32, span: TmaRows
    ) -> Callable[[Int32, Any, cute.Pointer], None]:
        """Returns what `copy` does, for all terms of the operand, each of which has tiles of its own."""
        copies = [self.copy(x, head, span, term=i) for i, x in enumerate(shared)]

        def copy(tile: Int32, stage: Any, barrier: cute.Pointer) -> None:
            for copy_term in copies:
                copy_term(tile, stage, barrier)

        return copy

    def copy_pages(self, shared: cute.Tensor, head: Int32) -> Callable[[Int32, Int32, Any, cute.Pointer], None]:
        """Returns a function `(page, box, stage, barrier)` by which a warp loads a box of rows of a page of a head.

        Args:
            shared: `[rows, columns, stage]`.
            head: its index. Pages take the place of the batch.
        """
        shape = tuple(cute.size(shared, mode=[i]) for i in range(2))
        boxes = cute.local_tile(self.coordinates[None, None, head, None], shape, (None, 0, None))
        inner, outer = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(boxes, 0, 2)
        )

        def copy(page: Int32, box: Int32, stage: Any, barrier: cute.Pointer) -> None:
            cute.copy(self.atom, outer[None, box, page], inner[None, stage], tma_bar_ptr=barrier)

        return copy

    def copy_matrix(self, shared: cute.Tensor, matrix: cute.Tensor) -> Callable[[Any, Any, Any, cute.Pointer], None]:
        """Returns a function `(row tile, column tile, stage, barrier)` that loads any tile of a matrix.

        Args:
            shared: `[rows, columns, stage]`.
            matrix: `[rows, columns]`, a part of the coordinates.
        """
        shape = tuple(cute.size(shared, mode=[i]) for i in range(2))
        tiles = cute.local_tile(matrix, shape, (None, None))
        inner, outer = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

        def copy(row: Any, column: Any, stage: Any, barrier: cute.Pointer) -> None:
            cute.copy(self.atom, outer[None, row, column], inner[None, stage], tma_bar_ptr=barrier)

        return copy

    def copy_block(self, shared: cute.Tensor, first: tuple[Int32, Int32], entry: Int32, barrier: cute.Pointer) -> None:
        """Loads a block of a matrix, which TMA reports to the barrier.

        Args:
            shared: `[rows, columns, 1]`.
            first: its first row and column.
            entry: which matrix: the index of the batch entry.
        """
        matrix = cute.domain_offset(first, self.coordinates[None, None, 0, entry])
        block = cute.local_tile(matrix, tuple(cute.size(shared, mode=[i]) for i in range(2)), (0, 0))
        inner, outer = cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(block, 0, 2)
        )
        cute.copy(self.atom, outer, inner[None, 0], tma_bar_ptr=barrier)


class Box(NamedTuple):
    """An operand `[batch, rows, heads, head_dim]`, contiguous, and the box of it that one copy loads.

    What lies outside of the operand is filled with zeros.

    Attributes:
        pointer: where it is.
        batch, rows, heads: its sizes.
        head_dim: its columns, of all terms, a multiple of 8; a device integer if there is one head.
        box_rows, box_columns: rows and columns of a copy, of one term; the columns are padded.
    """

    pointer: Any
    batch: Any
    rows: Any
    heads: Any
    head_dim: Any
    box_rows: int
    box_columns: int

    def operand(self) -> TmaOperand:
        """Returns the operand with its descriptor; call it from a `cute.jit` function."""
        row_stride = cute.assume(Int64(self.heads) * self.head_dim, divby=8)
        batch_stride = cute.assume(Int64(self.heads) * self.head_dim * Int64(self.rows), divby=8)
        heads, head_stride = self.heads, self.head_dim
        if not isinstance(self.head_dim, int):
            heads, head_stride = Int32(heads), cute.assume(Int64(head_stride), divby=8)
        layout = cute.make_layout(
            (self.rows, Int32(self.head_dim), heads, self.batch),
            stride=(row_stride, 1, head_stride, batch_stride),
        )
        tile = (self.box_rows, self.box_columns)
        return TmaOperand(
            *cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(),
                cute.make_tensor(self.pointer, layout),
                tile_layout(self.pointer.dtype, tile),
                tile,
            )
        )


class TmaMemory(Protocol):
    """Shared memory of a CTA whose operands TMA loads."""

    @property
    def config(self) -> Any:
        """The variant, which has the `threads` of a CTA."""
        ...

    @property
    def head_dim(self) -> int:
        """Columns of a term of Q and K, padded."""
        ...

    @property
    def v_head_dim(self) -> int:
        """Columns of a term of V and dO, padded."""
        ...

    @property
    def box_rows(self) -> tuple[int, int]:
        """Rows of a box of Q and of dO, and of one of K and of V."""
        ...

    @property
    def bias_box(self) -> tuple[int, int] | None:
        """Queries and keys of a box of a bias of pairs; None if there are no stages for it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes to ask for at launch."""
        ...


class Tma(NamedTuple):
    """What a kernel loads by TMA: boxes in a launch, operands with descriptors in the kernel.

    Backward kernels alone have dout, and kernels of tangents have those of operands that move. A bias of pairs is there
    if the kernel has stages for it.
    """

    query: Any
    key: Any
    value: Any
    dout: Any
    bias: Any = None
    query_tangent: Any = None
    key_tangent: Any = None
    value_tangent: Any = None

    @classmethod
    def boxes(
        cls,
        spec: KernelSpec,
        memory: TmaMemory,
        buffers: Buffers,
        scalars: Scalars,
    ) -> "Tma":
        """Returns the boxes of a launch.

        Args:
        """
        query_rows, key_rows = memory.box_rows
        batch = Int32(1) if spec.packed else scalars.batch
        queries = (batch, scalars.query_length, scalars.num_heads)
        keys = (batch, scalars.key_length, scalars.num_heads // spec.group)
        columns, v_columns = spec.row_columns
        boxes = {
            "query": (*queries, columns, query_rows, memory.head_dim),
            "key": (*keys, columns, key_rows, memory.head_dim),
            "value": (*keys, v_columns, key_rows, memory.v_head_dim),
            "dout": (*queries, v_columns, query_rows, memory.v_head_dim),
        }
        boxes |= {f"{name}_tangent": boxes[name] for name in ("query", "key", "value")}
        pointers = {name: getattr(buffers, name) for name in boxes}
        found = {name: None if x is None else Box(x, *boxes[name]) for name, x in pointers.items()}
        return cls(**found, bias=cls._bias(spec, memory, buffers, scalars))

    @staticmethod
    def _bias(spec: KernelSpec, memory: TmaMemory, buffers: Buffers, scalars: Scalars) -> Box | None:
        """Returns the box of a bias of pairs, whose planes are the batch entries of its array."""
        if not spec.matrix_bias or memory.bias_box is None:
            return None
        planes = scalars.bias_planes * spec.bias_terms
        return Box(buffers.bias, planes, scalars.query_length, 1, scalars.bias_pitch, *memory.bias_box)

    def operands(self) -> "Tma":
        """Returns the operands of these boxes; call it from a `cute.jit` function."""
        return Tma(*[box if box is None else box.operand() for box in self])

    def prefetch_descriptors(self) -> None:
        """Fetches the descriptors; one warp calls it."""
        for operand in self:
            if operand is not None:
                cpasync.prefetch_descriptor(operand.atom)
