# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Folds a vmapped axis V into the batch, `[V, B, ...] <-> [V * B, ...]`, or into the groups of query heads.

If a mesh with Explicit axes splits the B of the query alone, B comes first: `[V, B, ...] <-> [B * V, ...]`.

In the forward pass V becomes query heads if keys and values are not mapped, so that they are not repeated: query head g
of example v shares its key/value head with the G query heads of every example, `K * G <-> K * V * G`.

If each example has one head of queries and of keys, and all share a mask or the like, V becomes the head axis of both:
callers map over heads, as equinox does. What is shared then keeps its size in a vmap around this one, over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_fastattn.spec import OPERANDS, is_known

REFUSED = (
    "`block_mask` and the lists of a BlockMask cannot be mapped by `jax.vmap`; make one BlockMask for all examples "
    "outside of it, or pass the function as `mask_mod`"
)

# If V becomes query heads, these operands may be mapped. Their head axes are here.
HEAD_AXIS = {name: x.axes.upper().index("N") for name, x in OPERANDS.items() if "N" in x.axes.upper()}


def axes_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes of operands as `spec.Operand` has them."""
    return tuple(OPERANDS[name].axes for name in names)


@dataclass(frozen=True)
class Fold:
    """The way in which V and B become one axis.

    Attributes:
        size: size of V.
        batch: size of B.
        names: Explicit mesh axes that split V and B of the query, each as an entry of a `PartitionSpec`.
    """

    size: int
    batch: int
    names: tuple[Any, Any]

    @classmethod
    def of(cls, query: jax.Array, is_mapped: bool, size: int, batch_axis: int) -> Fold:
        spec = jax.typeof(query).sharding.spec
        return cls(size, query.shape[batch_axis], (spec[0] if is_mapped else None, spec[batch_axis]))

    @property
    def _is_batch_major(self) -> bool:
        """Returns whether B comes first: the major part of the folded axis is the one that may be split alone."""
        return self.names[0] is None and self.names[1] is not None

    def fold(self, x: jax.Array, is_mapped: bool, axes: str = "B", *, may_broadcast: bool = False) -> jax.Array:
        """Folds one operand, `[V, B, ...]` or not mapped `[B, ...]`, to `[V * B, ...]`.

        An operand that is the same for all of V and B keeps its size of 1 if it `may_broadcast` and its `axes`, as
        `spec.Operand` has them, let it.
        """
        if axes == "L":  # lists that are kept have no batch axis
            if is_mapped:
                raise NotImplementedError(REFUSED)
            return x
        if not is_mapped:
            if may_broadcast and axes[0] == "b" and x.shape[0] == 1:
                return x
            x = jnp.broadcast_to(x[None], (self.size, *x.shape))
        if x.shape[1] != self.batch:
            x = jnp.broadcast_to(x, (self.size, self.batch, *x.shape[2:]))
        spec = jax.typeof(x).sharding.spec
        if tuple(spec[:2]) != self.names:
            taken = _mesh_axes(self.names[0]) | _mesh_axes(self.names[1])
            rest = (None if _mesh_axes(entry) & taken else entry for entry in spec[2:])
            x = jax.reshard(x, PartitionSpec(*self.names, *rest))
        x = jnp.swapaxes(x, 0, 1) if self._is_batch_major else x
        return self._reshape(x, (self.size * self.batch, *x.shape[2:]), *jax.typeof(x).sharding.spec[2:])

    def unfold(self, x: jax.Array, axes: str = "B") -> jax.Array:
        """Inverts `fold` on a result: `[V * B, ...]` to `[V, B, ...]`."""
        del axes
        if self._is_batch_major:
            return jnp.swapaxes(x.reshape((self.batch, self.size, *x.shape[1:])), 0, 1)
        return self._reshape(x, (self.size, self.batch, *x.shape[1:]), *jax.typeof(x).sharding.spec[1:])

    def _reshape(self, x: jax.Array, shape: tuple[int, ...], *rest: Any) -> jax.Array:
        """Reshapes `[V, B, ...]` to `[V * B, ...]` or back. jax 0.9 has to be told how, if a mesh splits V and B."""
        if None in self.names:
            return x.reshape(shape)
        folded = tuple(axis for entry in self.names for axis in (entry if isinstance(entry, tuple) else (entry,)))
        ahead = (folded,) if len(shape) < x.ndim else self.names
        return x.reshape(shape, out_sharding=NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*ahead, *rest)))


@dataclass(frozen=True)
class IntoHeads:
    """The way in which V becomes the head axis of examples with one head each.

    Attributes:
        size: size of V.
    """

    size: int

    @staticmethod
    def fits(axes: Sequence[str], operands: int, mapped: Sequence[bool], arrays: Sequence[jax.Array]) -> bool:
        """Returns whether V should become heads: all share a mask, a bias or ids, which the batch might have to repeat.

        Args:
            axes: the axes of each array as `spec.Operand` has them; the first three are query, key and value.
            operands: how many of the arrays are operands, and neither residuals nor tangents.
            mapped: whether V comes first in an array.
            arrays: all of them.
        """
        has_heads = [_head_axis(x) is not None for x in axes]
        if not all(mapped[:3]) or any(m and not has for m, has in zip(mapped, has_heads, strict=True)):
            return False
        if any(x.shape[3] != 1 for x in arrays[:2]):
            return False
        if not is_known(arrays[0].shape[0]) or arrays[0].shape[0] == 0:
            return False
        others = zip(mapped[3:operands], axes[3:operands], strict=True)
        return any(not is_mapped and set("TSM") & set(x.upper()) for is_mapped, x in others)

    def fold(self, x: jax.Array, is_mapped: bool, axes: str, *, may_broadcast: bool = False) -> jax.Array:
        """Folds one operand, `[V, ..., 1, ...]` or not mapped `[..., 1, ...]`, to `[..., V, ...]`.

        An operand that is the same for all heads stays as it is if it `may_broadcast` and its `axes` let it.
        """
        axis = _head_axis(axes)
        if axis is None or (may_broadcast and not is_mapped and axes[axis] == "n"):
            return x
        if not is_mapped:
            return jnp.broadcast_to(x, (*x.shape[:axis], self.size, *x.shape[axis + 1 :]))
        return jnp.squeeze(jnp.moveaxis(x, 0, axis), axis + 1)

    def unfold(self, x: jax.Array, axes: str) -> jax.Array:
        """Inverts `fold` on a result: `[..., V, ...]` to `[V, ..., 1, ...]`."""
        axis = _head_axis(axes)
        assert axis is not None, axes
        return jnp.expand_dims(jnp.moveaxis(x, axis, 0), axis + 1)


def _head_axis(axes: str) -> int | None:
    """Returns which of an array's axes is the head axis, if there is one."""
    return next((i for i, letter in enumerate(axes) if letter in "nNK"), None)


def _mesh_axes(entry: Any) -> set[Any]:
    """Returns the mesh axes of an entry of a `PartitionSpec`."""
    return set(entry) if isinstance(entry, tuple) else {entry} - {None}


def leading(arrays: Sequence[jax.Array], dims: Sequence[int | None]) -> tuple[int, tuple[bool, ...], list[jax.Array]]:
    """Returns the size of the mapped axis, which arrays have it, and the arrays with that axis first."""
    mapped = tuple(dim is not None for dim in dims)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    return next(x.shape[0] for x, is_mapped in zip(moved, mapped, strict=True) if is_mapped), mapped, moved


def inner_batch(x: jax.Array, is_mapped: bool) -> int:
    """Returns B of an array with or without a leading vmapped axis."""
    return x.shape[1 if is_mapped else 0]


def becomes_heads(names: Sequence[str], mapped: Sequence[bool], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether the mapped axis, which comes first in each mapped shape, should become query heads.

    It should not if that repeats a bias or mask which the batch would not repeat: these can be larger than keys and
    values.
    """
    if not mapped[0] or any(m and name not in HEAD_AXIS for name, m in zip(names, mapped, strict=True)):
        return False
    _, batch, _, heads, _ = shapes[0]
    kv_heads = shapes[1][2]

    def is_repeated(size: int, whole: int, is_mapped: bool) -> bool:
        return size != whole if is_mapped else size != 1  # not `<`: a symbolic batch cannot be compared

    for name, shape, is_mapped in zip(names, shapes, mapped, strict=True):
        if "n" in OPERANDS[name].axes:
            b, n = shape[is_mapped : is_mapped + 2]
            serves_all = OPERANDS[name].per_kv_head and not is_mapped and n == kv_heads
            if is_repeated(n, heads, is_mapped) and not serves_all and not is_repeated(b, batch, is_mapped):
                return False
    return True


def fold_heads(names: Sequence[str], mapped: Sequence[bool], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Folds all operands, `[V, ..., K * G, ...]` or not mapped, to `[..., K * V * G, ...]` where they have heads.

    A mask with one row for each key/value head serves the larger groups as it is, unless it is mapped.
    """
    size, heads, kv_heads = arrays[0].shape[0], arrays[0].shape[3], arrays[1].shape[2]

    def fold_one(name: str, x: jax.Array, is_mapped: bool) -> jax.Array:
        known, axis = OPERANDS[name], HEAD_AXIS.get(name)
        if axis is None or (not is_mapped and x.shape[axis] == 1 and known.axes[axis] == "n"):
            return x
        if not is_mapped and known.per_kv_head and x.shape[axis] == kv_heads:
            return x
        if not is_mapped:
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        if 1 < x.shape[axis + 1] < heads:
            x = jnp.repeat(x, heads // x.shape[axis + 1], axis=axis + 1)
        before, after = x.shape[1 : axis + 1], x.shape[axis + 2 :]
        x = jnp.broadcast_to(x, (size, *before, heads, *after))
        x = jnp.moveaxis(x.reshape((size, *before, kv_heads, heads // max(kv_heads, 1), *after)), 0, axis + 1)
        return x.reshape((*before, size * heads, *after))

    return [fold_one(*x) for x in zip(names, arrays, mapped, strict=True)]


def unfold_heads(x: jax.Array, size: int, heads: int, kv_heads: int) -> jax.Array:
    """Inverts `fold_heads` on a result: `[B, T, K * V * G, ...]` to `[V, B, T, K * G, ...]`; `heads` is K * G."""
    rows, rest = x.shape[:2], x.shape[3:]
    x = x.reshape((*rows, kv_heads, size, heads // max(kv_heads, 1), *rest))
    return jnp.moveaxis(x, 3, 0).reshape((size, *rows, heads, *rest))
