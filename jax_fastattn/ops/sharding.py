# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The axes that a mesh may split: batch, heads and rows; every other axis is whole on each device.

Rows are the axes of queries and keys, T and S. They are split together, and only for ops that have a ring (`ops/ring`).
Within a program XLA may split rows that devices do not divide evenly. It gives all devices as many rows as the first
one. The last rows of the last devices are then padding.

One description serves Shardy (`sharding_rule`), GSPMD (`infer_sharding_from_operands`) and the partition callback, all
of `partitioned.py`: a string of axis letters for each array, as in spec.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fastattn.ops import abstract
from jax_fastattn.ring import Ring

# A mesh may split these axes; V is an axis that `vmap` put ahead of others.
SPLITTABLE = "VBTSNK"


def rows_whole(letters: str, has_ring: bool) -> str:
    """Returns the letters of an array with the letters of rows that stay whole in lower case.

    All rows stay whole if the op has no ring. Otherwise only the columns of a bias or a mask with queries and keys do,
    and planes of functions.
    """
    has_ring = has_ring and "P" not in letters
    if not has_ring:
        letters = letters.replace("T", "t")
    return letters.replace("S", "s") if "T" in letters or not has_ring else letters


def shardy_rule(
    num_devices: int, operands: Sequence[tuple[str, tuple[int, ...]]], results: Sequence[tuple[str, tuple[int, ...]]]
) -> tuple[str, dict[str, Any]]:
    """Returns the einsum-like rule that says which axes are the same; all but batch, heads and rows stay whole.

    Queries and keys have one factor if there are as many of both, so that a split of one carries over to the other.

    Query heads are key/value heads times the group, `(k g)`. If a mesh can split the query heads into more parts
    than the key/value heads, both have a factor of their own: Shardy would divide a mesh axis between k and g, which no
    `NamedSharding` can express. An axis of size 1 that broadcasts has a factor of its own, too.
    """
    _, keys, kv_heads, _ = operands[1][1]
    sizes = dict(zip(*operands[0], strict=True)) | {"K": kv_heads, "S": keys}
    num_heads, num_kv_heads = sizes["N"], sizes["K"]
    is_grouped = num_heads > num_kv_heads > 1 and num_kv_heads % math.gcd(num_heads, num_devices) == 0
    factors_of = {"N": "(k g)" if is_grouped else "k" if num_heads == num_kv_heads else "n", "K": "k"}
    factors_of["S"] = "t" if sizes.get("T") == keys else "s"
    fresh = itertools.count()

    def term(letters: str, shape: tuple[int, ...]) -> str:
        factors, letters = [], own_letters(letters, shape, (num_heads, num_kv_heads))
        for letter, size in zip(letters, shape, strict=False):
            alone = letter not in SPLITTABLE or size != sizes[letter]
            factors.append(f"i{next(fresh)}" if alone else factors_of.get(letter, letter.lower()))
        return " ".join(factors) if factors else ""

    arrows = [", ".join(term(*x) for x in group) for group in (operands, results)]
    options = {"g": num_heads // num_kv_heads} if is_grouped else {}
    return " -> ".join(arrows), options


def own_letters(letters: str, shape: Sequence[int], heads: tuple[int, int]) -> str:
    """Returns the letters of an array's axes; the head axis of a mask or bias is K if it has K rows and not N."""
    num_heads, num_kv_heads = heads
    return "".join(
        "K" if letter == "N" and 1 < size == num_kv_heads < num_heads else letter
        for letter, size in zip(letters, shape, strict=False)
    )


@dataclass(frozen=True)
class Split:
    """The split of one call over a mesh, by batch, heads and rows as its query is.

    Batch and heads are split as far as that divides evenly. Rows may have padding.

    Attributes:
        names: mesh axes that split each axis letter of SPLITTABLE. "K" has the first ones of "N". "S" has the same as
            "T", or none if the keys are whole.
        heads: N and K of the whole call.
        lengths: T and S of the whole call.
    """

    mesh: Mesh
    names: dict[str, tuple[str, ...]]
    heads: tuple[int, int]
    lengths: tuple[int, int]

    @classmethod
    def of(cls, mesh: Mesh, letters: str, query: Any, key: Any) -> Split:
        mesh = _finest_mesh(query) if mesh.empty else mesh
        names: dict[str, tuple[str, ...]] = {"T": ()}
        sizes = dict(zip(letters, query.shape, strict=False))
        for axis, (letter, size) in enumerate(sizes.items()):
            if letter in SPLITTABLE:
                found = axes_along(mesh, query, axis) if size > 1 else ()
                names[letter] = found if letter == "T" else _dividing(mesh, found, size)
        _, keys, kv_heads, _ = key.shape
        names["K"] = _dividing(mesh, names["N"], kv_heads)
        names["S"] = names["T"] if keys > 1 and axes_along(mesh, key, 1) else ()
        return cls(mesh, names, (sizes["N"], kv_heads), (query.shape[letters.upper().index("T")], keys))

    def names_of(self, letters: str, shape: Sequence[int]) -> list[tuple[str, ...]]:
        """Returns the mesh axes that split each axis of an array."""
        return [self.names.get(x, ()) if size > 1 else () for x, size in zip(letters, shape, strict=False)]

    def sharding(self, letters: str, shape: Sequence[int]) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*(x or None for x in self.names_of(letters, shape))))

    def part_shape(self, letters: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a device's part of an array, padding included."""
        names = self.names_of(letters, shape)
        return tuple(-(-size // _size(self.mesh, x)) for x, size in zip(names, shape, strict=True))

    @property
    def ring(self) -> Ring | None:
        """Returns the devices that share the rows; None if each has all of them."""
        names, keys = self.names["T"], self.names["S"]
        if not names:
            return None
        count = _size(self.mesh, names)
        has_padding = self.lengths[0] % count or (keys and self.lengths[1] % count)
        lengths = self.lengths if has_padding else None
        mesh = tuple(self.mesh.shape.items())
        return Ring(names, count, balance=True, mesh=mesh, whole_keys=not keys, lengths=lengths)

    @property
    def sharers(self) -> tuple[str, ...]:
        """Returns the mesh axes whose devices hold the same key/value heads and different query heads."""
        return self.names["N"][len(self.names["K"]) :]

    @property
    def read_heads(self) -> int:
        """Returns how many key/value heads a device takes if it shares them."""
        heads, kv_heads = self.heads
        count = heads // _size(self.mesh, self.names["N"])
        return count // math.gcd(count, heads // kv_heads)

    def _kv_heads(self) -> jax.Array:
        """Returns which of this device's key/value heads its query heads read, one for each run that shares a head.

        All runs have the greatest length that fits every device: with 6 query heads, 3 key/value heads and 2 devices it
        is 1, and the query heads 0, 1, 2 | 3, 4, 5 read the heads 0, 0, 1 | 1, 2, 2.
        """
        heads, kv_heads = self.heads
        count, group = heads // _size(self.mesh, self.names["N"]), heads // kv_heads
        starts = jnp.arange(0, count, math.gcd(count, group), dtype=jnp.int32)
        return (jax.lax.axis_index(self.sharers) * count + starts) // group

    def take_heads(self, letters: str, x: jax.Array) -> jax.Array:
        """Takes those key/value heads of an operand that this device's query heads read."""
        axis = letters.find("K")
        if axis < 0 or x.shape[axis] == 1 or not self.sharers:
            return x
        return jnp.take(x, self._kv_heads(), axis, mode="clip")

    def fill(self, letters: str, whole: Sequence[int], x: jax.Array) -> jax.Array:
        """Makes the padding of a device's rows zero, as XLA leaves it undefined, and pads columns of keys with zeros.

        `whole` is the shape of `x` in the whole call.
        """
        for axis, (letter, names, size) in enumerate(zip(letters, self.names_of(letters, whole), whole, strict=True)):
            if letter in "TS" and size % _size(self.mesh, names):
                first, shape = jax.lax.axis_index(names) * x.shape[axis], (-1, *(1,) * (x.ndim - axis - 1))
                rows = (first + jnp.arange(x.shape[axis])).reshape(shape)
                x = jnp.where(rows < size, x, jnp.zeros((), x.dtype))
            if missing := self._missing_columns(letter, size):
                x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, missing * (i == axis), 0) for i in range(x.ndim)])
        return x

    def cut(self, letters: str, whole: Sequence[int], x: jax.Array) -> jax.Array:
        """Removes the columns that `fill` adds."""
        for axis, (letter, size) in enumerate(zip(letters, whole, strict=True)):
            x = jax.lax.slice_in_dim(x, 0, size, axis=axis) if self._missing_columns(letter, size) else x
        return x

    def _missing_columns(self, letter: str, size: int) -> int:
        """Returns how many columns a bias or a mask lacks for the keys of all devices, padding included."""
        return -size % _size(self.mesh, self.names["S"]) if letter == "s" and size > 1 else 0

    def sum_shares(self, letters: str, whole: Sequence[int], x: jax.Array) -> jax.Array:
        """Adds up the devices' shares of a result, of which `whole` is the shape in the whole call."""
        if "K" in letters and self.sharers:
            axis = letters.index("K")
            heads = jnp.arange(self.heads[1] // _size(self.mesh, self.names["K"]), dtype=jnp.int32)
            is_of_head = (heads[:, None] == self._kv_heads()[None, :]).reshape(
                heads.size, -1, *[1] * (x.ndim - axis - 1)
            )
            shares = jnp.expand_dims(x.astype(abstract.statistics_dtype(x.dtype)), axis)
            placed = jnp.sum(shares, axis + 1, where=jnp.expand_dims(is_of_head, range(axis)))
            x = jax.lax.psum(placed, self.sharers).astype(x.dtype)
        unsplit = (a for a, size in zip(letters, whole, strict=True) if size == 1)
        summed = tuple(name for a in unsplit for name in self.names.get(a, ()))
        if "T" not in letters and not ("S" in letters and self.names["S"]):
            summed += self.names["T"]
        wide = x.astype(abstract.statistics_dtype(x.dtype))
        return jax.lax.psum(wide, summed).astype(x.dtype) if summed else x


def refuse_gather(name: str, x: Any, needed: NamedSharding) -> None:
    """Raises ValueError if a device lacks a part of `x` that it needs; XLA would gather it."""
    if x.sharding is None:
        return
    held, wanted = (sharding.devices_indices_map(x.shape) for sharding in (x.sharding, needed))

    def holds(device: Any) -> bool:
        pairs = zip(held[device], wanted[device], x.shape, strict=True)
        limits = [(*a.indices(size)[:2], *b.indices(size)[:2]) for a, b, size in pairs]
        return all(start <= first and last <= end for start, end, first, last in limits)

    if not all(holds(device) for device in wanted):
        refuse_split(name, x.sharding)


def refuse_split(name: str, sharding: Any) -> NoReturn:
    """Raises ValueError for an array in pages that is split in a way which a call would have to undo."""
    raise ValueError(
        f"`{name}` is split over a mesh as {sharding}, expected pages that are whole on each device, except that their "
        "head axis may be split as that of `query`; replicate the pages, or call inside `jax.shard_map` if each device "
        "has pages of its own"
    )


def _dividing(mesh: Mesh, names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Returns as many of the first names as divide `size` evenly together."""
    while size % _size(mesh, names):
        names = names[:-1]
    return names


def _finest_mesh(x: Any) -> Mesh:
    """Returns a mesh whose axes have prime sizes and express how `x` is split.

    jax passes an empty mesh if no argument or result of the jitted function has a `NamedSharding`, even under
    `jax.set_mesh`. The sharding of `x` names the devices in the order of jax's mesh, but not the sizes of its axes.
    These are tried from the minor axis on. GSPMD gives no sharding if nothing is split; the mesh is then empty.
    """
    if x.sharding is None:
        return Mesh(np.empty((), object), ())
    starts_of = _starts(x)
    starts = np.array(list(starts_of.values()))
    sizes: list[int] = []
    while len(starts) > 1:
        primes = _prime_factors(len(starts))
        # Devices along one mesh axis start at regular distances. Two always do, so the largest prime comes first.
        size = next((p for p in reversed(primes) if not np.diff(starts[:p], 2, axis=0).any()), primes[0])
        sizes.insert(0, size)
        starts = starts[::size]
    return Mesh(np.array(list(starts_of)).reshape(sizes), [f"axis{i}" for i in range(len(sizes))])


def _starts(x: Any) -> dict[Any, list[int]]:
    """Returns where each device's part of `x` starts on each axis, as if the devices divided all axes evenly.

    jax cannot say where the parts of another array start. Their order is the same.
    """
    count = len(x.sharding.device_set)
    shape = tuple(-(-size // count) * count for size in x.shape)
    indices = x.sharding.devices_indices_map(shape)
    return {device: [part.start or 0 for part in index] for device, index in indices.items()}


def _prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a number above 1, smallest first."""
    smallest = next(p for p in range(2, number + 1) if number % p == 0)
    return [smallest, *(_prime_factors(number // smallest) if number > smallest else [])]


def axes_along(mesh: Mesh, x: Any, axis: int) -> tuple[str, ...]:
    """Returns the mesh axes that split an axis of `x`, major first, or none if no order of whole mesh axes does."""
    if x.sharding is None:
        return ()
    starts_of = _starts(x)
    starts = np.vectorize(lambda device: starts_of[device][axis], otypes=[np.int64])(mesh.devices)
    places = np.indices(starts.shape)
    strides = [starts.take(1, i).flat[0] - starts.flat[0] if size > 1 else 0 for i, size in enumerate(starts.shape)]
    if not np.array_equal(starts, np.tensordot(strides, places, 1)):
        return ()
    return tuple(name for stride, name in sorted(zip(strides, mesh.axis_names, strict=True), reverse=True) if stride)


def _size(mesh: Mesh, names: tuple[str, ...]) -> int:
    size = 1
    for name in names:
        size *= mesh.shape[name]
    return size
