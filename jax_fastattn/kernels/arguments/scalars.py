# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of a launch by name, with their order and dtypes. Imports no DSL.

They are device integers while a kernel is traced, and Python numbers in an emulator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints


class Scalars(NamedTuple):
    """Numbers that a launch takes after its buffers, so that a new size compiles nothing. Integers come first.

    Attributes:
        batch: B; it and the lengths are positive.
        query_length: T.
        key_length: S.
        num_heads: N.
        window_left: keys to the left of its own position that a query sees; `UNBOUNDED`, and not read, if the compile
            key lacks the bound.
        window_right: keys to the right of its own position, as `window_left`.
        sinks_stride: elements from one row of sinks to the next; 0 if all batch entries share one.
        multiprocessors: of the GPU, or how many CTAs a forward launch counts on, see `ops.launch.persistent_blocks`;
            decides about speed alone.
        visit_batch, visit_head, visit_kv_head, visit_tile: see `lists.Planes`, and of a decoding launch
            `RowPlanes`; None, which is no parameter, if the compile key has neither.
        side_heads: how many key/value heads a decoding launch reads side by side, see `decode/split.py`; None, which is
            no parameter, in other launches.
        pages: how many pages there are; None, which is no parameter, if keys are not in pages.
        bias_batch, bias_head, bias_kv_head, bias_planes: see `bias_shapes.BiasPlanes`; None, which is no parameter,
            without a bias.
        bias_pitch: for a matrix, its columns; else elements from one plane to the next. Queries past the end
            of a plane of rows share its last element.
        bias_parts: how many parts `dbias` has; None, which is no parameter, if no kernel writes it.
        scale: factor on q . k, of any sign.
        logits_soft_cap: the cap; 0, and not read, if the compile key has none.
    """

    batch: Annotated[Any, "int32"]
    query_length: Annotated[Any, "int32"]
    key_length: Annotated[Any, "int32"]
    num_heads: Annotated[Any, "int32"]
    window_left: Annotated[Any, "int32"]
    window_right: Annotated[Any, "int32"]
    sinks_stride: Annotated[Any, "int32"]
    multiprocessors: Annotated[Any, "int32"]
    visit_batch: Annotated[Any, "int32"]
    visit_head: Annotated[Any, "int32"]
    visit_kv_head: Annotated[Any, "int32"]
    visit_tile: Annotated[Any, "int32"]
    side_heads: Annotated[Any, "int32"]
    pages: Annotated[Any, "int32"]
    bias_batch: Annotated[Any, "int32"]
    bias_head: Annotated[Any, "int32"]
    bias_kv_head: Annotated[Any, "int32"]
    bias_planes: Annotated[Any, "int32"]
    bias_pitch: Annotated[Any, "int32"]
    bias_parts: Annotated[Any, "int32"]
    scale: Annotated[Any, "float32"]
    logits_soft_cap: Annotated[Any, "float32"]

    def of_dtype(self, dtype: str) -> tuple[Any, ...]:
        """Returns the scalars of one dtype, in order, without absent ones."""
        values = self._asdict()
        return tuple(values[name] for name, x in SCALAR_DTYPES.items() if x == dtype and values[name] is not None)


class Sizes(NamedTuple):
    """The scalars in the order in which the backward kernels with products take them from their host function.

    ptxas loads two neighbors at once if the first one is aligned to 8 bytes. These kernels have more instructions if T
    and S, or both bounds of a window, are not such a pair.

    Attributes:
        query_length, key_length, num_heads, batch, window_left, window_right, scale, logits_soft_cap: see `Scalars`.
        visit_batch, visit_head, visit_kv_head, visit_tile: see `Scalars`.
        bias_batch, bias_head, bias_kv_head, bias_planes, bias_pitch, bias_parts: see `Scalars`.
    """

    query_length: Any
    key_length: Any
    num_heads: Any
    batch: Any
    window_left: Any
    window_right: Any
    visit_batch: Any
    visit_head: Any
    visit_kv_head: Any
    visit_tile: Any
    bias_batch: Any
    bias_head: Any
    bias_kv_head: Any
    bias_planes: Any
    bias_pitch: Any
    bias_parts: Any
    scale: Any
    logits_soft_cap: Any

    @classmethod
    def of(cls, scalars: Scalars) -> Sizes:
        """Returns the sizes of a launch."""
        return cls(**{name: getattr(scalars, name) for name in cls._fields})


# Only launches with lists or with bits of rows have these scalars.
VISIT_SCALARS = ("visit_batch", "visit_head", "visit_kv_head", "visit_tile")
# Only launches with a bias have these scalars.
BIAS_SCALARS = ("bias_batch", "bias_head", "bias_kv_head", "bias_planes", "bias_pitch")

SCALAR_DTYPES: Mapping[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Scalars, include_extras=True).items()
}
