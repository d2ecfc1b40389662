# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of user input. An error names the argument, what was found, what is expected, and the remedy.

Axes are bound by name once (`Axes.bind`), so that every message can say which argument fixed a size. Nothing here
computes on array values: lengths, offsets and ids are checked for shape and dtype only, and clamped by the kernels.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, cast

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_fastattn.spec import is_known

# These arguments may be arrays of shape ().
_SCALARS = ("scale", "dropout_rate", "rate")

_LARGEST_FLOAT32, _SMALLEST_FLOAT32 = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)

# The number of rows of a page is a multiple of this.
PAGE_ROWS = 16

FLOATS = ("bfloat16", "float16", "float32", "float64")


class Axes:
    """Sizes of named axes, with the argument that fixed each."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, str]] = {}

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis][0]

    def set(self, axis: str, size: int, source: str) -> None:
        """Fixes an axis that no array spells out; errors quote `source`, such as "`key` on all devices"."""
        self._sizes[axis] = (size, source)

    def source(self, axis: str) -> str:
        """Returns the argument that fixed the size of an axis, in backticks."""
        return self._sizes[axis][1]

    def bind(self, name: str, x: Any, axes: str) -> None:
        """Binds the axes of argument `name`, one letter each; raises ValueError where a size disagrees."""
        if x.ndim != len(axes):
            raise ValueError(f"`{name}` has shape {x.shape}, expected {_dimensions(len(axes))} ({axes})")
        for axis, size in zip(axes, x.shape, strict=True):
            known, source = self._sizes.setdefault(axis, (size, f"`{name}`"))
            if known != size:
                raise ValueError(
                    f"`{name}` has shape {x.shape} ({axes}) with {axis} = {size}, "
                    f"expected {axis} = {known} as in {source}"
                )

    def bind_broadcast(self, name: str, x: Any, axes: str, *, per_kv_head: bool = False) -> None:
        """Checks as `bind` does, except that missing dimensions and sizes of 1 broadcast.

        With `per_kv_head`, the axis N of an `x` that has all axes may also be of size K.
        """
        if x.ndim > len(axes):
            raise ValueError(f"`{name}` has shape {x.shape}, expected at most {len(axes)} dimensions ({axes})")
        for axis, size in zip(axes[len(axes) - x.ndim :], x.shape, strict=True):
            expected = {axis: self[axis]}
            if axis == "N" and per_kv_head and x.ndim == len(axes) and 1 < self["K"] < self["N"]:
                expected = {"K": self["K"]} | expected
            if size not in (1, *expected.values()):
                known = " or ".join(f"{a} = {n} as in {self.source(a)}" for a, n in expected.items())
                raise ValueError(
                    f"`{name}` has shape {x.shape} with {axis} = {size}, expected 1 or {known}; "
                    f"it must broadcast to {axes}{self._index_for_heads(name, x)}"
                )

    def _index_for_heads(self, name: str, x: Any) -> str:
        """Says how to add the missing axes if x is `[B, S]` or `[B, T, S]`, as many models keep their masks."""
        for axes, index in (("BS", ":, None, None, :"), ("BTS", ":, None, :, :")):
            if x.ndim == len(axes) and all(size in (1, self[axis]) for axis, size in zip(axes, x.shape, strict=True)):
                return f", so pass `{name}[{index}]` if it is [{', '.join(axes)}]"
        return ""


def _dimensions(count: int) -> str:
    return f"{count} dimension{'s' * (count != 1)}"


class Shape(jax.ShapeDtypeStruct):
    """Shape and dtype in the place of an array, which pass all checks of arrays."""

    def __getitem__(self, index: None) -> Shape:
        """Returns the shape with one more axis of size 1 in front."""
        return Shape((1, *self.shape), self.dtype)


def as_array(name: str, x: Any) -> jax.Array:
    """Returns `x` as a JAX array, or a `Shape` as it is.

    Raises:
        TypeError: `x` is no array; the error names the argument.
    """
    if isinstance(x, Shape):
        return cast(jax.Array, x)
    if isinstance(x, jax.Array):
        # `asarray` binds a conversion that does nothing. Linearizing three of them took JAX 0.12 as long as the rest of
        # an eager call (0.5 ms, 2026-11-26).
        return x
    try:
        return jnp.asarray(x)
    except OverflowError as error:
        raise ValueError(f"`{name}` is {x}, expected values that int32 holds") from error
    except (TypeError, ValueError) as error:
        if dtype := _foreign_byte_order(x):
            order = "big" if sys.byteorder == "little" else "little"
            native = np.dtype(dtype).newbyteorder("=")
            raise TypeError(
                f"`{name}` has dtype {dtype}, which is {order}-endian; JAX takes only the byte order of this machine, "
                f'so pass `{name}.astype("{native}")`'
            ) from error
        remedy = f"; pass `{name}.filled(...)`" if isinstance(x, np.ma.MaskedArray) else ""
        raise TypeError(f"`{name}` is {type(x).__name__}, expected an array{remedy}") from error


def _foreign_byte_order(x: Any) -> str | None:
    """Returns the dtype of the first NumPy array in x with the other byte order, such as ">f4"; None without any."""
    leaves = jax.tree.leaves(x, lambda x: not isinstance(x, (list, tuple)))
    dtypes = (leaf.dtype for leaf in leaves if isinstance(leaf, (np.ndarray, np.generic)))
    return next((dtype.str for dtype in dtypes if not dtype.isnative), None)


def as_integers(name: str, x: Any) -> jax.Array:
    """Returns `x` as a JAX array in its own integer dtype; raises a TypeError for any other dtype.

    Values that are known on the host must fit into int32: JAX would wrap them around without a warning. Values
    of a JAX array are not read, since that would wait for the device.
    """
    array = as_array(name, x)
    check_kind(name, array, "integer")
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
        values = np.asarray(x)
        for value in (values.min(), values.max()) if values.size else ():
            check_int32(name, int(value))
    return array


def check_float_operands(**arrays: jax.Array) -> None:
    """Raises TypeError unless all arrays have one and the same dtype of `FLOATS`."""
    (first, x), *rest = arrays.items()
    if x.dtype.name not in FLOATS:
        raise TypeError(f"`{first}` has dtype {x.dtype}, expected one of {', '.join(FLOATS)}; cast it first")
    for name, y in rest:
        if y.dtype != x.dtype:
            raise TypeError(f"`{name}` has dtype {y.dtype}, expected {x.dtype} as in `{first}`; cast one of them")


def check_kind(name: str, x: jax.Array, expected: str) -> None:
    """Raises TypeError unless x is of the kind `expected`: "bool", "integer" or "float"."""
    kinds = {"bool": np.bool_, "integer": np.integer, "float": np.floating}
    if not jnp.issubdtype(x.dtype, kinds[expected]):
        remedy = "cast it first"
        if name == "mask":
            remedy = "if it is of zeros and ones, pass `mask.astype(bool)`"
            remedy += "; pass an additive mask as `bias`" if jnp.issubdtype(x.dtype, np.floating) else ""
        if name == "bias" and x.dtype == np.bool_:
            remedy = "pass it as `mask`"
        raise TypeError(f"`{name}` has dtype {x.dtype}, expected {expected}; {remedy}")


def check_heads(axes: Axes) -> None:
    """Raises ValueError unless K divides N, and neither heads nor head dims are symbolic."""
    for axis in "NKHD":
        if not is_known(axes[axis]):
            raise ValueError(
                f"{axes.source(axis)} has the symbolic size {axis} = {axes[axis]}, expected a number; "
                "export one program for each, since only the batch and lengths may be symbolic"
            )
    num_heads, num_kv_heads = axes["N"], axes["K"]
    if (num_heads and not num_kv_heads) or (num_kv_heads and num_heads % num_kv_heads):
        raise ValueError(
            f"{axes.source('K')} has {num_kv_heads} heads, which does not divide the {num_heads} heads of `query`; "
            "grouped-query attention needs a multiple"
        )


def check_one_length(name: str, axes: Axes) -> None:
    """Raises ValueError if an argument that is one array would serve queries and keys of different lengths."""
    lengths = axes["T"], axes["S"]
    if all(map(is_known, lengths)) and lengths[0] != lengths[1]:
        raise ValueError(
            f"`{name}` is one array, expected a pair of arrays for T = {lengths[0]} as in {axes.source('T')} and "
            f"S = {lengths[1]} as in {axes.source('S')}; pass `{name}=(ids of queries, ids of keys)`"
        )


def check_boundaries(name: str, axes: Axes) -> None:
    """Raises ValueError if there are no boundaries (C). One alone bounds no sequence."""
    if is_known(axes["C"]) and axes["C"] == 0:
        raise ValueError(f"`{name}` has C = 0 entries, expected one more than there are sequences; pass [0] for none")


def check_offset(query_offset: Any) -> None:
    """Raises TypeError if the offset of a call is None or a word."""
    if query_offset is None or isinstance(query_offset, str):
        raise TypeError(
            f"`query_offset` is {query_offset!r}, expected an int or integers; pass the key position of the first "
            "query, such as 0, or S - T for bottom-right alignment"
        )


def check_chunks(layout: str, **rows: int) -> None:
    """Raises ValueError if a device has an odd number of rows in zigzag order."""
    for name, count in rows.items():
        if layout == "zigzag" and count % 2:
            raise ValueError(
                f"`{name}` has {count} rows on each device, expected an even number for zigzag order; pad the sequence "
                "to a multiple of twice the devices, and pass `query_seq_lengths` and `key_value_seq_lengths`"
            )


def check_pages(axes: Axes) -> None:
    """Raises ValueError unless there are pages (P), whose rows (R) are a multiple of `PAGE_ROWS`."""
    rows = axes["R"]
    if not is_known(rows):
        raise ValueError(
            f"`key_pages` has the symbolic size R = {rows}, expected a number; export one program for each page size"
        )
    if rows == 0 or rows % PAGE_ROWS:
        raise ValueError(
            f"`key_pages` has pages of R = {rows} rows, expected a multiple of {PAGE_ROWS}, such as 16, 64 or 256; "
            "make the pages of the cache larger"
        )
    if is_known(axes["P"]) and axes["P"] == 0:
        raise ValueError("`key_pages` has P = 0 pages, expected at least one; pass lengths of 0 for an empty cache")


def check_scalar(name: str, x: Any, *, positive: bool = False) -> float:
    """Returns `x` as a Python float; raises unless it is a finite number that is known when the call is traced."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"`{name}` is a traced value, expected a Python float; mark it static")
    is_scalar = np.isscalar(x) or (hasattr(x, "shape") and x.shape == ())
    expected = "expected a float; pass a number" + (", or a `jax.Array` of shape ()" if name in _SCALARS else "")
    if isinstance(x, (bool, np.bool_, str, bytes)) or not is_scalar or np.iscomplexobj(x):
        raise TypeError(f"`{name}` is {type(x).__name__}, {expected}")
    try:
        value = float(x)  # pyright: ignore[reportArgumentType] (numpy.isscalar narrows to more than numbers)
    except OverflowError:
        value = math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` is {type(x).__name__}, {expected}") from error
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"`{name}` is {value}, expected a finite{' positive' if positive else ''} number")
    if abs(value) > _LARGEST_FLOAT32 or (positive and value < _SMALLEST_FLOAT32):
        raise ValueError(f"`{name}` is {value}, expected a{' positive' if positive else ''} number that float32 holds")
    return value


def check_rate(name: str, x: Any) -> float | jax.Array:
    """Returns a share of the weights as a Python float, or as an array of shape (), whose value is not checked."""
    if isinstance(x, jax.Array):
        check_scalar_array(name, x)
        return x
    rate = check_scalar(name, x)
    if not 0 <= rate <= 1:
        raise ValueError(f"`{name}` is {rate}, expected a number from 0 to 1; pass the share of weights to drop")
    return rate


def check_scalar_array(name: str, x: jax.Array) -> None:
    """Raises unless x is one real number. Its value is on a device and is not checked."""
    if not jnp.issubdtype(x.dtype, jnp.integer) and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`{name}` has dtype {x.dtype}, expected a floating or integer dtype; cast it first")
    if x.ndim:
        raise ValueError(f"`{name}` has shape {x.shape}, expected a float or an array of shape (); vmap over its axes")


def check_int32(name: str, x: int) -> None:
    """Raises ValueError if int32 does not hold x."""
    if not -(2**31) <= x < 2**31:
        raise ValueError(f"`{name}` is {x}, expected a value that int32 holds")


def check_integer(name: str, x: Any) -> int:
    """Returns `x` as a Python int; raises unless it is an integer that int32 holds, known when the call is traced."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"`{name}` is a traced value, expected a Python int; mark it static under jit")
    try:
        value = None if isinstance(x, (bool, np.bool_)) else operator.index(x)
    except TypeError:
        value = None
    if value is None:
        raise TypeError(f"`{name}` is {type(x).__name__}, expected an int; pass a number")
    check_int32(name, value)
    return value


def check_rows(name: str, x: Any) -> Any:
    """Returns how many rows a device has as a Python int, or unchanged if it is symbolic; raises if it is negative."""
    if jax.export.is_symbolic_dim(x):
        return x
    rows = check_integer(name, x)
    if rows < 0:
        raise ValueError(f"`{name}` is {rows}, expected at least 0; pass the rows of this device")
    return rows


def check_flag(name: str, x: Any) -> bool:
    """Returns `x` as a Python bool; raises unless it is a bool, 0 or 1, of Python, NumPy or JAX, and not traced."""
    if isinstance(x, bool):
        return x
    known = _on_host(name, x, "a Python bool")
    if not isinstance(known, int):
        raise TypeError(f"`{name}` is {type(x).__name__}, expected a bool; pass True or False")
    if known not in (0, 1):
        raise ValueError(f"`{name}` is {known}, expected a bool; pass True or False")
    return bool(known)


def check_window(window: Any) -> tuple[int | None, int | None]:
    """Returns the window as `(left, right)`, each None (unlimited) or >= 0; raises if it is no window."""
    if window is None:
        return None, None
    name, expected = "local_window_size", "Python integers"
    sides = _on_host(name, window, expected)
    sides = (sides, sides) if isinstance(sides, int) else sides
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"`{name}` is {window!r}, expected an int or a pair (left, right)")
    left, right = (None if side is None else _on_host(name, side, expected) for side in sides)
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"`{name}` is {window!r}, expected ints or None in (left, right)")
        if side is not None and side < 0:
            raise ValueError(f"`{name}` is {window!r}, expected sides >= 0; pass None for an unlimited side")
    return left, right


def check_layout(layout: Any) -> None:
    """Raises unless `layout` is an order of rows over devices."""
    if not isinstance(layout, str):
        raise TypeError(f'`layout` is {type(layout).__name__}, expected "contiguous" or "zigzag"; pass a string')
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f'`layout` is {layout!r}, expected "contiguous" or "zigzag"; `zigzag` says what they are')


def _on_host(name: str, x: Any, expected: str) -> Any:
    """Returns an array of bools or integers as Python's, and anything else unchanged; raises for a traced value.

    It waits for an array on a device: the value is part of the program.
    """
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"`{name}` is a traced value, expected {expected}; mark it static under jit")
    is_array = isinstance(x, (np.ndarray, np.generic, jax.Array))
    if is_array and (x.dtype == np.bool_ or jnp.issubdtype(x.dtype, np.integer)):
        return np.asarray(x).tolist()
    return x


def check_implementation(implementation: Any) -> None:
    """Raises unless `implementation` is None, "cuda" or "xla"."""
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f'`implementation` is {type(implementation).__name__}, expected None, "cuda" or "xla"')
    if implementation not in (None, "cuda", "xla"):
        remedy = "; cuDNN is reached through jax.nn.dot_product_attention" if implementation == "cudnn" else ""
        raise ValueError(f'`implementation` is {implementation!r}, expected None, "cuda" or "xla"{remedy}')
