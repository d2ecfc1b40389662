# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Partitions calls under a mesh: batch and heads are split, every other axis is whole on each device.

One description serves Shardy (`sharding_rule`), GSPMD (`infer_sharding_from_operands`) and the partition callback:
a string of axis letters for each array, as in spec.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fastattn import ffi
from jax_fastattn._compat import Primitive
from jax_fastattn.ops import abstract

# Axes that a mesh may split; V is an axis that `vmap` put ahead of others.
SPLITTABLE = "VBNK"

# A device's part of a partitioned call, lowered with no mesh in sight. If the partitioner runs in a thread with an
# Explicit mesh, jax otherwise puts sharding constraints even into the reduction of a psum, and XLA refuses them.
part_p = Primitive("jax_fastattn_part")
part_p.multiple_results = True
part_p.def_abstract_eval(lambda *_, results, **__: results)
mlir.register_lowering(
    part_p,
    lambda ctx, *values, function, results: abstract.lower_on_one_device(function, ctx, *values),
)

# A call that XLA may partition. The lowered program names a Python callback of this process and says nothing of what
# the callback computes, so that two calls with equal operands look the same to JAX's compilation cache if it leaves the
# name out (`jax_remove_custom_partitioning_ptr_from_cache_key`). Hence the lowering marks the call with a digest.
partitioned_p = Primitive("jax_fastattn_partitioned")
partitioned_p.multiple_results = True
partitioned_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
partitioned_p.def_impl(lambda *arrays, function, **_: function(*arrays))


def _lower_partitioned(
    ctx: mlir.LoweringRuleContext, *values: Any, function: Callable[..., Any], identity: str, jaxpr: Any
) -> Any:
    del jaxpr  # jax looks into it, and hands the devices to a lowering that meets a `custom_partitioning`
    marked = _mark(identity) if _may_be_split(ctx.module_context.axis_context) else contextlib.nullcontext()
    with marked:
        return mlir.lower_fun(function)(ctx, *values)


mlir.register_lowering(partitioned_p, _lower_partitioned)


def _mark(identity: str) -> contextlib.AbstractContextManager[None]:
    """Puts a digest of all that the partition callback reads into the operations that are traced inside."""
    facts = repr((identity, jax.config.jax_enable_x64, ffi.process_fingerprint()))  # pyright: ignore[reportAttributeAccessIssue]
    return set_xla_metadata(jax_fastattn=hashlib.sha256(facts.encode()).hexdigest())


def _may_be_split(axis_context: Any) -> bool:
    """Returns whether XLA partitions a program that is lowered in this context.

    It does not for one device, nor inside `shard_map`.

    A context of an unknown kind counts as one that may be split: a mark that is not needed changes no result.
    """
    if hasattr(axis_context, "manual_axes"):
        return set(axis_context.manual_axes) != set(axis_context.mesh.axis_names)
    return getattr(axis_context, "num_devices", 2) > 1


def partitioned(
    primitive: Any, params: Mapping[str, Any], operand_axes: Sequence[str], result_axes: Sequence[str]
) -> Callable[..., Any]:
    """Returns a function that binds `primitive`, of which each device computes its share under a mesh.

    Where query heads are split further than key/value heads, a device slices the key/value heads that its query heads
    read. A result whose batch or head axis is of size 1 while that axis is split is a sum over it, and so is the
    gradient of a key/value head that several devices read: the devices' shares are added up.

    Args:
        primitive: one device's share of the work, on any number of batch entries and heads.
        params: its parameters. Their `repr` tells calls apart in JAX's compilation cache.
        operand_axes, result_axes: axis letters of each array; trailing letters that an array lacks are ignored.
    """
    local = functools.partial(primitive.bind, **params)

    def infer(mesh: Mesh, arg_shapes: Sequence[Any], result_shapes: Sequence[Any]) -> list[NamedSharding]:
        split = _Split.of(mesh, operand_axes[0], *arg_shapes[:2])
        return [split.sharding(a, x.shape) for a, x in zip(result_axes, result_shapes, strict=True)]

    def partition(mesh: Mesh, arg_shapes: Sequence[Any], result_shapes: Sequence[Any]) -> Any:
        split = _Split.of(mesh, operand_axes[0], *arg_shapes[:2])
        axes = [own_letters(a, x.shape, split.heads) for a, x in zip(operand_axes, arg_shapes, strict=True)]
        args = tuple(split.sharding(a, x.shape) for a, x in zip(axes, arg_shapes, strict=True))

        def part(*arrays: jax.Array) -> Any:
            results = local(*(split.take_heads(a, x) for a, x in zip(axes, arrays, strict=True)))
            return [
                split.sum_shares(a, whole.shape, x)
                for a, whole, x in zip(result_axes, result_shapes, results, strict=True)
            ]

        shardings = infer(mesh, arg_shapes, result_shapes)
        results = tuple(
            jax.core.ShapedArray(sharding.shard_shape(x.shape), x.dtype)
            for sharding, x in zip(shardings, result_shapes, strict=True)
        )
        return split.mesh, functools.partial(part_p.bind, function=part, results=results), shardings, args

    def rule(mesh: Mesh, operand_types: Sequence[Any], result_types: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        return shardy_rule(
            mesh.size,
            [(a, tuple(t.shape)) for a, t in zip(operand_axes, operand_types, strict=True)],
            [(a, tuple(t.shape)) for a, t in zip(result_axes, result_types, strict=True)],
        )

    function = custom_partitioning(local)
    function.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule, decode_shardings=False
    )
    identity = repr((primitive.name, params, operand_axes, result_axes))

    def call(*arrays: jax.Array) -> Any:
        # If a `shard_map` has only some axes of the mesh, XLA passes shardings that jax cannot read. XLA itself then
        # splits the call over the other axes.
        mesh = jax.sharding.get_abstract_mesh()
        is_partly_manual = 0 < len(mesh.manual_axes) < len(mesh.axis_names)
        if is_partly_manual:
            return local(*arrays)
        jaxpr = jax.make_jaxpr(function)(*arrays)
        return partitioned_p.bind(*arrays, function=function, identity=identity, jaxpr=jaxpr)

    return call


def shardy_rule(
    num_devices: int, operands: Sequence[tuple[str, tuple[int, ...]]], results: Sequence[tuple[str, tuple[int, ...]]]
) -> tuple[str, dict[str, Any]]:
    """Returns the einsum-like rule that says which axes are the same; all but batch and heads stay whole.

    Query heads are key/value heads times the group, `(k g)`. If a mesh can split the query heads further than the
    key/value heads, both have a factor of their own: Shardy would divide a mesh axis between k and g, which no
    `NamedSharding` can express. An axis of size 1 that broadcasts has a factor of its own, too.
    """
    sizes = dict(zip(*operands[0], strict=True)) | {"K": operands[1][1][2]}
    num_heads, num_kv_heads = sizes["N"], sizes["K"]
    is_grouped = num_heads > num_kv_heads > 1 and num_kv_heads % math.gcd(num_heads, num_devices) == 0
    heads = {"N": "(k g)" if is_grouped else "k" if num_heads == num_kv_heads else "n", "K": "k"}
    fresh = itertools.count()

    def term(letters: str, shape: tuple[int, ...]) -> str:
        factors, letters = [], own_letters(letters, shape, (num_heads, num_kv_heads))
        for letter, size in zip(letters, shape, strict=False):
            alone = letter not in SPLITTABLE or size != sizes[letter]
            factors.append(f"i{next(fresh)}" if alone else heads.get(letter, letter.lower()))
        return " ".join(factors) if factors else ""

    arrows = [", ".join(term(*x) for x in group) for group in (operands, results)]
    options = {"g": num_heads // num_kv_heads} if is_grouped else {}
    return " -> ".join(arrows), options


def own_letters(letters: str, shape: Sequence[int], heads: tuple[int, int]) -> str:
    """Returns the letters of an array's axes, where that of a mask's heads is K if it has K rows and not N."""
    num_heads, num_kv_heads = heads
    return "".join(
        "K" if letter == "N" and 1 < size == num_kv_heads < num_heads else letter
        for letter, size in zip(letters, shape, strict=False)
    )


@dataclass(frozen=True)
class _Split:
    """The split of one call over a mesh: by batch and heads as its query is, as far as that divides evenly.

    Attributes:
        names: mesh axes that split each axis letter of SPLITTABLE. Those of "K" are the first ones of "N".
        heads: N and K of the whole call.
    """

    mesh: Mesh
    names: dict[str, tuple[str, ...]]
    heads: tuple[int, int]

    @classmethod
    def of(cls, mesh: Mesh, letters: str, query: Any, key: Any) -> _Split:
        mesh = _finest_mesh(query) if mesh.empty else mesh
        names = {
            letter: _dividing(mesh, _names(mesh, query, axis), query.shape[axis])
            for axis, letter in enumerate(letters)
            if letter in SPLITTABLE
        }
        kv_heads = key.shape[2]
        names["K"] = _dividing(mesh, names["N"], kv_heads)
        return cls(mesh, names, (query.shape[letters.index("N")], kv_heads))

    def sharding(self, letters: str, shape: Sequence[int]) -> NamedSharding:
        names = [self.names.get(x, ()) if size > 1 else () for x, size in zip(letters, shape, strict=False)]
        return NamedSharding(self.mesh, PartitionSpec(*(x or None for x in names)))

    @property
    def sharers(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold the same key/value heads and different query heads."""
        return self.names["N"][len(self.names["K"]) :]

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
            return jax.lax.psum(placed, self.sharers).astype(x.dtype)
        unsplit = (a for a, size in zip(letters, whole, strict=True) if size == 1)
        summed = tuple(name for a in unsplit for name in self.names.get(a, ()))
        return jax.lax.psum(x, summed) if summed else x


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
    indices = x.sharding.devices_indices_map(x.shape)
    starts = np.array([[part.start or 0 for part in index] for index in indices.values()])
    sizes: list[int] = []
    while len(starts) > 1:
        primes = _prime_factors(len(starts))
        # Devices along one mesh axis start at regular distances. Two always do, so the largest prime comes first.
        size = next((p for p in reversed(primes) if not np.diff(starts[:p], 2, axis=0).any()), primes[0])
        sizes.insert(0, size)
        starts = starts[::size]
    return Mesh(np.array(list(indices)).reshape(sizes), [f"axis{i}" for i in range(len(sizes))])


def _prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a number above 1, smallest first."""
    smallest = next(p for p in range(2, number + 1) if number % p == 0)
    return [smallest, *(_prime_factors(number // smallest) if number > smallest else [])]


def _names(mesh: Mesh, x: Any, axis: int) -> tuple[str, ...]:
    """Returns the mesh axes that split an axis of `x`, major first, or none if no order of whole mesh axes does."""
    if x.sharding is None:
        return ()
    indices = x.sharding.devices_indices_map(x.shape)
    starts = np.vectorize(lambda device: indices[device][axis].start or 0, otypes=[np.int64])(mesh.devices)
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
