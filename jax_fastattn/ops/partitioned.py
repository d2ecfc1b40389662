# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Primitives that JAX transforms and XLA partitions, each with its share: what one device computes of it.

An `Op` is an outer primitive, which has the rules of differentiation and batching, and an inner one, `share`. Lowering
the outer one yields a `custom_partitioning` of the inner one. No rule of an outer primitive can be dropped, as JAX
drops the rules of a `custom_vjp` where it evaluates a scan partially.

`sharding.py` says which axes are split. The rules are where each op is defined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding

from jax_fastattn import _compat, ffi
from jax_fastattn._compat import Primitive
from jax_fastattn.ops import abstract
from jax_fastattn.ops.sharding import Split, own_letters, refuse_gather, rows_whole, shardy_rule
from jax_fastattn.ring import Ring

# An op keeps up to this many functions. A new one is made for every new spec, such as a new scale.
CACHED_FUNCTIONS = 256

# It is a device's part of a partitioned call, lowered with no mesh in sight. If the partitioner runs in a thread with
# an Explicit mesh, jax otherwise puts sharding constraints even into the reduction of a psum, and XLA refuses them.
part_p = Primitive("jax_fastattn_part")
part_p.multiple_results = True
part_p.def_abstract_eval(lambda *_, results, **__: results)


def _lower_part(ctx: mlir.LoweringRuleContext, *values: Any, function: Callable[..., Any], results: Any) -> Any:
    del results
    lowered = abstract.lower_on_one_device(function, ctx, *values)
    _compat.separate_channels(ctx)
    return lowered


mlir.register_lowering(part_p, _lower_part)


class Axes(NamedTuple):
    """Axis letters of each operand and of each result, as in `spec.py`; letters that an array lacks are ignored.

    Operands in `resident`, by index and name, are never gathered: a call that would have to gather one is refused.
    """

    operands: Sequence[str]
    results: Sequence[str]
    resident: Sequence[tuple[int, str]] = ()


class Op:
    """A primitive that JAX transforms, and its share.

    Attributes:
        primitive: the outer primitive, which has one parameter more than `share`: `needs_devices`.
        share: one device's part of the work, on any number of batch entries and heads.
        ring: the share of a device that has some of the rows, and meets the keys of other devices (`ring.Ring`); None
            if there is none.
    """

    def __init__(self, name: str, share: str, results: Callable[..., list[Any]], axes: Callable[..., Axes]) -> None:
        """Makes both primitives. The caller says how the share is lowered and run.

        Args:
            name, share: the names of the primitives.
            results: the abstract results, from abstract arrays and the parameters.
            axes: the axes of arrays and results, from the parameters. The `repr` of parameters tells calls apart in
                JAX's compilation cache.
        """
        self.primitive, self.share, self._axes, self._results = Primitive(name), Primitive(share), axes, results
        self.primitive.multiple_results = self.share.multiple_results = True
        self.share.def_abstract_eval(results)
        self.primitive.def_abstract_eval(lambda *arrays, needs_devices, **params: results(*arrays, **params))
        self.primitive.def_impl(self._run)
        mlir.register_lowering(self.primitive, self._lower)
        self.ring: Any = None
        self.partitioned = functools.lru_cache(CACHED_FUNCTIONS)(self._partitioned)
        self.jitted = functools.lru_cache(CACHED_FUNCTIONS)(self._jit)

    def define_ring(self, function: Callable[..., Any]) -> None:
        """Registers what a device computes with others, from its arrays and the parameters of the share."""
        self.ring = Primitive(f"{self.share.name}_ring")
        self.ring.multiple_results = True
        self.ring.def_abstract_eval(lambda *arrays, **params: self._results(*arrays, **params))

        def lower(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
            return mlir.lower_fun(functools.partial(function, **params))(ctx, *values)

        # It is not inlined: the layers of a model share one function.
        mlir.register_lowering(self.ring, lower, inline=False)

    def bind(self, *arrays: Any, **params: Any) -> list[jax.Array]:
        if params["spec"].ring is not None and self.ring is None:
            raise NotImplementedError(
                "A call whose sequence is split over devices inside `jax.shard_map` has no second derivative; use "
                "`jax_fastattn.attention` under `jax.jit`, or `all_to_all_attention`, for calls that need one."
            )
        return self.primitive.bind(*arrays, needs_devices=_needs_devices(), **params)

    def _run(self, *arrays: jax.Array, needs_devices: Any, **params: Any) -> list[jax.Array]:
        del needs_devices
        with jax.disable_jit(False):  # under `disable_jit` this would call itself for ever
            return self.jitted(tuple(params.items()))(*arrays)

    def _jit(self, params: tuple[tuple[str, Any], ...]) -> Callable[..., list[jax.Array]]:
        def run(*arrays: jax.Array) -> list[jax.Array]:
            # With `jax_debug_nans` or `jax_debug_infs`, JAX calls this function itself, after it has found such a value
            # in the results of its program. `bind` would then come back here for ever.
            if not any(isinstance(x, jax.core.Tracer) for x in arrays):
                raise FloatingPointError(f"invalid value (nan or inf) encountered in {self.primitive.name}")
            return self.bind(*arrays, **dict(params))

        return jax.jit(run)

    def _partitioned(self, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        given = dict(params)

        def on_ring(ring: Ring) -> Callable[..., Any]:
            spec = dataclasses.replace(given["spec"], ring=ring)
            return functools.partial(self.ring.bind, **given | {"spec": spec})

        local = functools.partial(self.share.bind, **given)
        has_ring = self.ring is not None and not given["spec"].needs_whole_rows
        return partitioned(local, self._axes(**given), on_ring if has_ring else None)

    def _lower(self, ctx: mlir.LoweringRuleContext, *values: Any, needs_devices: Any, **params: Any) -> Any:
        del needs_devices
        if params["spec"].ring is not None:
            return mlir.lower_fun(functools.partial(self.ring.bind, **params))(ctx, *values)
        # If a `shard_map` has only some axes of the mesh, XLA passes shardings that jax cannot read. XLA itself then
        # splits the call over the other axes.
        mesh = jax.sharding.get_abstract_mesh()
        if 0 < len(mesh.manual_axes) < len(mesh.axis_names):
            return mlir.lower_fun(functools.partial(self.share.bind, **params))(ctx, *values)
        is_split = _may_be_split(ctx.module_context.axis_context)
        identity = self.share.name, params, self._axes(**params)
        with _mark(identity) if is_split else contextlib.nullcontext():
            return mlir.lower_fun(self.partitioned(tuple(params.items())))(ctx, *values)


@functools.cache
def _needs_devices() -> Any:
    """Returns a jaxpr with a `custom_partitioning` in it, for a parameter of the primitives.

    JAX lowers a program without its devices, which a `custom_partitioning` needs, unless it finds one in the jaxpr or
    in a jaxpr among the parameters of its equations. It does not see what a lowering rule will trace.
    """
    function = custom_partitioning(lambda x: x)
    function.def_partition(partition=None, infer_sharding_from_operands=None, sharding_rule="i -> i")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((1,), jnp.float32))


def _mark(identity: object) -> contextlib.AbstractContextManager[None]:
    """Puts a digest of all that the partition callback reads into the operations that are traced inside.

    The lowered program names a Python callback of this process and says nothing of what the callback computes. Two
    calls with equal operands would look the same to JAX's compilation cache if it leaves the name out
    (`jax_remove_custom_partitioning_ptr_from_cache_key`).
    """
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
    local: Callable[..., Any], axes: Axes, on_ring: Callable[[Ring], Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """Returns a function that calls `local`, of which each device computes its share under a mesh.

    If queries are split by rows, then keys are split in the same way, and a device calls what `on_ring` returns. If it
    is None, the rows are gathered. If the devices do not divide the rows evenly, XLA pads them, and the ring hides the
    padding.

    Where query heads are split into more parts than key/value heads, a device slices the key/value heads that its query
    heads read. A result whose batch or head axis is of size 1 while that axis is split is a sum over it, and so is the
    gradient of a key/value head that several devices read: the devices' shares are added up.
    """
    operands, results = ([rows_whole(x, on_ring is not None) for x in group] for group in axes[:2])
    axes = Axes(operands, results, axes.resident)

    def infer(mesh: Mesh, arg_shapes: Sequence[Any], result_shapes: Sequence[Any]) -> list[NamedSharding]:
        split = Split.of(mesh, axes.operands[0], *arg_shapes[:2])
        return [
            split.sharding(own_letters(a, x.shape, split.heads), x.shape)
            for a, x in zip(axes.results, result_shapes, strict=True)
        ]

    def partition(mesh: Mesh, arg_shapes: Sequence[Any], result_shapes: Sequence[Any]) -> Any:
        split = Split.of(mesh, axes.operands[0], *arg_shapes[:2])
        letters = [own_letters(a, x.shape, split.heads) for a, x in zip(axes.operands, arg_shapes, strict=True)]
        args = tuple(split.sharding(a, x.shape) for a, x in zip(letters, arg_shapes, strict=True))
        for i, name in axes.resident:
            refuse_gather(name, arg_shapes[i], args[i])

        share = local if split.ring is None or on_ring is None else on_ring(split.ring)

        def part(*arrays: jax.Array) -> Any:
            filled = [split.fill(a, whole.shape, x) for a, whole, x in zip(letters, arg_shapes, arrays, strict=True)]
            results = share(*(split.take_heads(a, x) for a, x in zip(letters, filled, strict=True)))
            return [
                split.cut(a, whole.shape, split.sum_shares(a, whole.shape, x))
                for a, whole, x in zip(result_letters, result_shapes, results, strict=True)
            ]

        shardings = infer(mesh, arg_shapes, result_shapes)
        result_letters = [
            own_letters(a, x.shape, split.heads) for a, x in zip(axes.results, result_shapes, strict=True)
        ]
        results = tuple(
            jax.core.ShapedArray(split.part_shape(a, x.shape), x.dtype)
            for a, x in zip(result_letters, result_shapes, strict=True)
        )
        return split.mesh, functools.partial(part_p.bind, function=part, results=results), shardings, args

    def rule(mesh: Mesh, operand_types: Sequence[Any], result_types: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        return shardy_rule(
            mesh.size,
            [(a, tuple(t.shape)) for a, t in zip(axes.operands, operand_types, strict=True)],
            [(a, tuple(t.shape)) for a, t in zip(axes.results, result_types, strict=True)],
        )

    function = custom_partitioning(local)
    function.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule, decode_shardings=False
    )
    return function
