# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A mask function with the lists of tiles that kernels make of it, kept as arrays from call to call.

The op of this file computes lists: by the prepass if it is lowered for CUDA, else by XLA, with the same results. So
lists are right wherever they are made and read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import batching as jax_batching
from jax.interpreters import mlir

from jax_fastattn import ffi
from jax_fastattn._compat import Primitive
from jax_fastattn.kernels.choose import forward_spec, kernel_spec, list_sizes, prepass_configs
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.kernels.tiles import lists as layout
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.ops import abstract
from jax_fastattn.ops.batching import REFUSED
from jax_fastattn.ops.cuda import prepass
from jax_fastattn.programs.function import Program
from jax_fastattn.spec import PLANES, QKV, AttentionSpec, Operands, Problem
from jax_fastattn.xla.chunks import Span
from jax_fastattn.xla.lists import tile_lists as xla_lists
from jax_fastattn.xla.predicate import Predicate

# A block mask holds these operands of its calls.
HIDING = tuple(name for name in prepass.PREDICATE if name not in PLANES)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMask:
    """What `block_mask` returns: a pytree that holds no function, equal in structure for equal functions.

    Attributes:
        program: the code of the function.
        sizes: B, N, T and S of the calls that it is for.
        is_causal, window: of these calls.
        planes: the arrays that the code reads.
        operands: the arrays of the call that hide pairs too, by name.
        kept: which lists there are: the tiles of the kernels that read them, and the planes of entries and heads.
        lists: the lists, by name.
    """

    program: Program = field(metadata={"static": True})
    sizes: tuple[int, int, int, int] = field(metadata={"static": True})
    is_causal: bool = field(metadata={"static": True})
    window: tuple[int | None, int | None] = field(metadata={"static": True})
    kept: tuple[Any, ...] = field(metadata={"static": True})
    planes: tuple[jax.Array, ...]
    operands: dict[str, jax.Array]
    lists: dict[str, jax.Array]


def lists_of(spec: AttentionSpec, operands: Operands) -> tuple[tuple[Any, ...], dict[str, jax.Array]]:
    """Returns the lists of a call for the kernels that would run it, and which they are; none if no kernel would.

    A call makes lists without bits anew: XLA, which makes lists on other platforms, would compute all pairs for them.
    """
    problem = Problem.of(spec, operands)
    arch = _arch()
    if arch is None or problem.is_empty or unsupported_reasons(problem, arch):
        return (), {}
    arrays = {name: x for name in prepass.PREDICATE if (x := getattr(operands, name)) is not None}
    shapes = tuple((name, x.shape, str(x.dtype)) for name, x in zip(QKV, operands[:3], strict=True))
    kept: list[Any] = []
    found: dict[str, jax.Array] = {}
    for kernel in (forward_spec(problem, arch), kernel_spec(problem, "backward", arch)):
        for config in prepass_configs(kernel):
            if not config.bits:
                continue
            names = _ROLES[kernel.op, config.transposed]
            results = lists_p.bind(*arrays.values(), names=tuple(arrays), shapes=shapes, spec=spec, config=config)
            found |= dict(zip(names, results, strict=True))
            kept.append((config, prepass.planes_of(problem, config), names))
    return tuple(kept), found


# The operands that hold the lists of a prepass, by the pass and by whether tiles of keys have the lists.
_ROLES = {
    ("forward", False): ("forward_lists", "forward_bits"),
    ("backward", True): ("backward_lists", "backward_bits", "backward_counts"),
    ("backward", False): ("dq_lists", "dq_bits"),
}


def _arch() -> str | None:
    """Returns the architecture that `explain` would name; None if calls would run no kernel."""
    if ffi.named_arch() is None and jax.default_backend() not in ("gpu", "cuda"):
        return None
    return None if ffi.missing_parts() else ffi.arch()


# Its results are lists, bits and, of tiles of keys, counts, with one axis each.
lists_p = Primitive("jax_fastattn_lists")
lists_p.multiple_results = True


def _call(arrays: Sequence[Any], names: tuple[str, ...], shapes: Any, spec: AttentionSpec) -> Operands:
    """Returns the operands of a call, query, key and value as shapes alone."""
    del spec
    given: dict[str, Any] = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes}
    return Operands(**given | dict(zip(names, arrays, strict=True)))


@lists_p.def_abstract_eval
def _abstract(*arrays: Any, config: PrepassConfig, **call: Any) -> list[Any]:
    problem = Problem.of(call["spec"], _call(arrays, **call))
    shapes = layout.shapes(config, list_sizes(problem, config))
    sizes = [math.prod(shapes[name]) for name in ("lists", "bits", "counts") if name in shapes]
    if not arrays:
        return [jax.core.ShapedArray((size,), jnp.dtype("int32")) for size in sizes]
    return [abstract.like(arrays[0], (size,), jnp.dtype("int32")) for size in sizes]


@lists_p.def_impl
def _run(*arrays: Any, **params: Any) -> list[jax.Array]:
    return _jitted(tuple(params.items()))(*arrays)


@functools.lru_cache(256)
def _jitted(params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda *arrays: lists_p.bind(*arrays, **dict(params)))


def _by_prepass(*arrays: Any, config: PrepassConfig, **call: Any) -> list[jax.Array]:
    found = prepass.tile_lists(call["spec"], _call(arrays, **call), config)
    return [x.reshape(-1) for x in (found.lists, found.bits, found.counts) if x is not None]


def by_xla(*arrays: Any, config: PrepassConfig, **call: Any) -> list[jax.Array]:
    """Returns lists, bits and counts, as the prepass does."""
    spec, operands = call["spec"], _call(arrays, **call)
    queries, (_, keys, kv_heads, _) = operands.query.shape[1], operands.key.shape
    shown = Predicate.of(spec, operands._replace(query_seq_lengths=None)).visible(Span(0, queries), Span(0, keys))
    assert shown is not None, spec
    sizes = list_sizes(Problem.of(spec, operands), config)
    if sizes.heads > 1:
        shown = jnp.broadcast_to(shown, (shown.shape[0], kv_heads, sizes.heads // kv_heads, *shown.shape[3:]))
    shown = shown.reshape(shown.shape[0], -1, *shown.shape[3:])
    return [x.reshape(-1) for x in xla_lists(config, sizes, shown, operands.query_seq_lengths).values()]


def _lower(function: Any) -> Any:
    def rule(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
        return abstract.lower_on_one_device(functools.partial(function, **params), ctx, *values)

    return rule


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(REFUSED)


mlir.register_lowering(lists_p, _lower(_by_prepass), platform="cuda", inline=False)
mlir.register_lowering(lists_p, _lower(by_xla), inline=False)
jax_batching.primitive_batchers[lists_p] = _refuse
