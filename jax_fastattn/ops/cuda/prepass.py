# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The prepass as part of a launch: lists of tiles and bits of scores for a mask or segment ids.

It is a custom call of its own without state, so that XLA merges equal ones: the prepasses of a model's layers, or the
ones that a scan over layers hoists. Its results depend on the tiles of the kernel that reads them, and so on the
architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax

from jax_fastattn import ffi
from jax_fastattn.kernels.arguments.prepass import PrepassScalars
from jax_fastattn.kernels.arguments.present import present_buffers
from jax_fastattn.kernels.choose import is_one_row, list_sizes, prepass_spec
from jax_fastattn.kernels.tiles import lists as layout
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.ops.cuda.compared import ComparedRowsArrays, compared_rows, narrow_ids
from jax_fastattn.ops.cuda.launch import launch
from jax_fastattn.programs.code import places
from jax_fastattn.spec import KEPT_LISTS, PLANES, AttentionSpec, Operands, Problem

# Lists stand for these operands.
PREDICATE = (
    "mask",
    "query_segment_ids",
    "key_value_segment_ids",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_offset",
    *PLANES,
)

# A launch with lists takes none of these as they are.
REPLACED = (*(name for name in PREDICATE if name not in PLANES), *KEPT_LISTS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileLists:
    """The results of the prepass, for kernels with the same tiles.

    A later call with the same predicate and sizes can take them instead of a prepass of its own: see `tile_lists`. They
    may leave a jitted function and enter another one.

    Attributes:
        config: sizes of the tiles.
        planes: the scalars of `kernels.lists.Planes`: where batch entries, query heads, key/value heads and tiles of
            queries have theirs.
        lists, bits: see `kernels/tiles/lists.py`.
        counts: how many tiles of keys visit each query tile; None for lists of tiles of queries.
        rows: what edge tiles compare; None if they have bits.
        classes: the classes of all pairs of tiles; None for lists of tiles of keys.
    """

    config: PrepassConfig = field(metadata={"static": True})
    planes: tuple[int, int, int, int] = field(metadata={"static": True})
    lists: jax.Array
    bits: jax.Array
    counts: jax.Array | None = None
    rows: ComparedRowsArrays | None = None
    classes: jax.Array | None = None

    def buffers(self) -> dict[str, jax.Array | None]:
        """Returns the operands of the launch that reads them, by name."""
        own, visited = ("key", "query") if self.config.transposed else ("query", "key")
        found: dict[str, jax.Array | None] = {f"{visited}_lists": self.lists, f"{visited}_bits": self.bits}
        if self.config.transposed:
            found["key_tile_counts"] = self.counts
        else:
            found["key_classes"] = self.classes
        if self.rows is not None:
            found |= {f"{own}_records": self.rows.records, f"{visited}_ids": self.rows.ids}
        return found


def tile_lists(
    spec: AttentionSpec, operands: Operands, config: PrepassConfig, kept: Sequence[TileLists] = ()
) -> TileLists:
    """Returns the lists of a call: the ones in `kept` that have its tiles, else new ones from one custom call.

    Args:
        operands: the call's arrays, of which only the ones in `PREDICATE` are read.
        config: sizes of the tiles of the kernel that reads them.
        kept: lists of calls with the same predicate: equal mask, ids, lengths, offset and window.

    Raises:
        ValueError: the lists in `kept` with these tiles belong to a call with other sizes.
    """
    kernel = prepass_spec(spec, config, ffi.arch())
    problem = Problem.of(spec, operands)
    sizes = list_sizes(problem, config)
    buffers = {name: buffer for name, buffer in present_buffers(kernel).items() if buffer is not None}
    results = {name: buffer.dtype for name, buffer in buffers.items() if buffer.role != "operand"}
    arrays = _arrays(operands)
    shapes = layout.shapes(config, sizes)
    planes = planes_of(problem, config)
    for lists in kept:
        if lists.config == config:
            return _checked(lists, shapes, planes)
    found = launch(
        *(arrays[name] for name, buffer in buffers.items() if buffer.role == "operand"),
        kernel=kernel,
        ints=_scalars(spec, operands, sizes).present(),
        floats=(),
        results=tuple((shapes[name], dtype) for name, dtype in results.items()),
    )
    named = dict(zip(results, found, strict=True))
    rows = None if config.bits else compared_rows(spec, operands, config, sizes)
    classes = None if config.transposed else named["classes"]
    return TileLists(config, planes, named["lists"], named["bits"], named.get("counts"), rows, classes)


def _checked(lists: TileLists, shapes: Mapping[str, tuple[int, ...]], planes: tuple[int, int, int, int]) -> TileLists:
    """Returns lists that have these shapes and planes. Kernels would read past the end of smaller ones."""
    found = {name: x.shape for name in ("lists", "bits", "counts") if (x := getattr(lists, name)) is not None}
    expected = {name: shapes[name] for name in found}
    if (found, lists.planes) != (expected, planes):
        raise ValueError(
            f"the kept lists for tiles of {lists.config.rows} queries and {lists.config.keys} keys have the shapes "
            f"{found} and the planes {lists.planes}; this call needs {expected} and {planes}. Keep the lists of a call "
            "with the same sizes and the same shape of mask, or keep none."
        )
    return lists


def kept_lists(spec: AttentionSpec, operands: Operands) -> list[TileLists]:
    """Returns the lists among the operands that have the sizes of a call, which may be one device's share."""
    problem, found = Problem.of(spec, operands), list[TileLists]()
    for config, planes, names in spec.kept:
        shapes = layout.shapes(config, list_sizes(problem, config))
        expected = [shapes[name] for name in ("lists", "bits", "counts") if name in shapes]
        arrays = [getattr(operands, name) for name in names]
        fits = all(x.size == math.prod(shape) for x, shape in zip(arrays, expected, strict=True))
        if fits and planes == planes_of(problem, config):
            shaped = (x.reshape(shape) for x, shape in zip(arrays, expected, strict=True))
            found.append(TileLists(config, planes, *shaped))
    return found


def planes_of(problem: Problem, config: PrepassConfig) -> tuple[int, int, int, int]:
    """Returns the scalars of `visits.lists.Planes`, see `TileLists`."""
    sizes = list_sizes(problem, config)
    per_head, each_query_head = sizes.heads > 1, sizes.heads == problem.num_heads
    return (
        sizes.heads if sizes.batch > 1 else 0,
        int(per_head and each_query_head),
        int(per_head and not each_query_head),
        int(not is_one_row(problem, config)),
    )


def _scalars(spec: AttentionSpec, operands: Operands, sizes: layout.Sizes) -> PrepassScalars:
    left, right = spec.bounds
    entries, heads, rows, keys = (1, 1, 1, 1) if operands.mask is None else operands.mask.shape
    return PrepassScalars(
        **sizes._asdict(),
        mask_batch=heads if entries > 1 else 0,
        mask_rows=rows,
        mask_keys=keys,
        window_left=UNBOUNDED if left is None else min(left, UNBOUNDED),
        window_right=UNBOUNDED if right is None else min(right, UNBOUNDED),
        **_mask_mod_scalars(spec, operands, sizes.heads // heads),
    )


def _mask_mod_scalars(spec: AttentionSpec, operands: Operands, mask_members: int) -> dict[str, int]:
    """Returns the scalars that only a mask function needs, by name; none without one."""
    if spec.mask_mod is None:
        return {}
    names = sorted({place.operand for place in places((spec.score_mod, spec.mask_mod))[1]})
    shapes = [getattr(operands, name).shape for name in names]
    batches, heads = (sum((shape[axis] > 1) << i for i, shape in enumerate(shapes)) for axis in (0, 1))
    return {"mask_members": mask_members, "plane_batches": batches, "plane_heads": heads}


def _arrays(operands: Operands) -> dict[str, jax.Array | None]:
    """Returns the predicate's operands by name, segment ids in int32."""
    found = {name: getattr(operands, name) for name in PREDICATE}
    queries, keys = operands.query_segment_ids, operands.key_value_segment_ids
    if queries is not None and keys is not None:
        found["query_segment_ids"], found["key_value_segment_ids"] = narrow_ids(queries, keys)
    return found
