# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Describes a call whose rows a mesh splits, for `explain`: the calls of its steps, and what travels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_fastattn.ops.abstract import statistics_dtype
from jax_fastattn.ops.ring import helping, plan
from jax_fastattn.ops.ring.blocks import BlockPlace, block_call
from jax_fastattn.ops.ring.padding import hide
from jax_fastattn.ops.ring.passes import TRAVELERS
from jax_fastattn.ops.sharding import Split, axes_along, own_letters, rows_whole
from jax_fastattn.spec import OPERANDS, AttentionSpec, Operands, Problem


def call(spec: AttentionSpec, operands: Operands, split_of: tuple[Any, Any]) -> tuple[Problem, str]:
    """Returns the problem that kernels are chosen for, and a note of what travels; the note may be empty.

    Args:
        spec, operands: the whole call, with abstract operands.
        split_of: the arguments for query and key, whose shardings count.
    """
    split, note = _split_of(*split_of)
    if split is None or spec.needs_whole_rows:
        return Problem.of(spec, operands), note
    local = local_call(spec, operands, split)
    return block_problem(*local), words(*local)


class Sent(NamedTuple):
    """The most that a device sends: collective permutes and bytes."""

    permutes: int
    bytes: int

    def __str__(self) -> str:
        size, unit = (self.bytes, "bytes") if self.bytes < 2**20 else (round(self.bytes / 2**20, 1), "MiB")
        return f"{size} {unit} in {self.permutes} collective permute{'s' * (self.permutes != 1)}"


def _split_of(query: Any, key: Any) -> tuple[Split | None, str]:
    """Returns how a mesh splits arguments of a call; None and a note if it splits no queries or no mesh is known."""
    shapes, meshes = [], []
    for x in (query, key):
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, jax.sharding.Mesh):
            return None, ""
        missing = 4 - len(x.shape)
        spec = PartitionSpec(*(None,) * missing, *sharding.spec)
        shape = (1,) * missing + tuple(x.shape)
        shapes.append(jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(sharding.mesh, spec)))
        meshes.append(sharding.mesh)
    split = Split.of(meshes[0], "BTNH", *shapes)
    if split.ring is not None:
        return split, ""
    axes = ", ".join(axes_along(meshes[1], shapes[1], 1))
    gathered = f"the keys are split over mesh axis {axes}, and the query is whole: keys and values are gathered"
    return None, gathered if axes else ""


def local_call(spec: AttentionSpec, operands: Operands, split: Split) -> tuple[AttentionSpec, Operands]:
    """Returns the call of one device, from the abstract operands of the whole call."""

    def local(name: str, x: Any) -> Any:
        if x is None:
            return None
        letters = own_letters(rows_whole(OPERANDS[name].letters, True), x.shape, split.heads)
        shape = split.part_shape(letters, x.shape)
        axis = letters.find("K")
        if axis >= 0 and shape[axis] > 1 and split.sharers:
            shape = (*shape[:axis], split.read_heads, *shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    found = Operands(*(local(name, x) for name, x in zip(Operands._fields, operands, strict=True)))
    spec = dataclasses.replace(spec, ring=split.ring)
    found = jax.eval_shape(lambda x: hide(spec, x)[1], found)
    return dataclasses.replace(spec, present=found.present()), found


def block_problem(spec: AttentionSpec, operands: Operands) -> Problem:
    """Returns the problem of the last call of a device's steps. `operands` are abstract."""
    assert spec.ring is not None
    rows, keys = operands.query.shape[1], operands.key.shape[1]
    if helping.balances(spec, operands):
        block, fetched = helping.steps(spec.ring, rows)[-1].block, (0, keys)
    else:
        step = plan.steps(spec, operands)[-1]
        block, fetched = step.blocks[-1], step.fetched
    found: list[Problem] = []

    def trace(operands: Operands, device: jax.Array) -> None:
        size = fetched[1] - fetched[0]
        parts = {name: getattr(operands, name)[:, :size] for name in TRAVELERS if getattr(operands, name) is not None}
        place = BlockPlace(device, device, rows, keys, fetched[0])
        found.append(Problem.of(*block_call(spec, operands._replace(**parts), block, place)))

    jax.eval_shape(trace, operands, jax.ShapeDtypeStruct((), jnp.int32))
    return found[0]


def sent(spec: AttentionSpec, operands: Operands) -> tuple[Sent, Sent]:
    """Returns what a device sends in the forward pass, and in the backward pass of query, key and value."""
    keys, rows = _bytes(operands.key, operands.value), operands.key.shape[1]
    if helping.balances(spec, operands):
        return _sent_with_help(spec, operands, keys)
    later = plan.steps(spec, operands)[1:]
    ranges = [step.fetched[1] - step.fetched[0] for step in later]
    of_keys, of_ids = keys // rows, _bytes(operands.key_value_segment_ids) // rows
    forward = Sent(len(later), sum(ranges) * (of_keys + of_ids))
    return forward, Sent(2 * len(later), sum(ranges) * (2 * of_keys + of_ids))


def _sent_with_help(spec: AttentionSpec, operands: Operands, keys: int) -> tuple[Sent, Sent]:
    """Returns what the device sends that helps in each step: as many bytes as the larger of queries and keys have."""
    assert spec.ring is not None
    steps = helping.steps(spec.ring, operands.query.shape[1])
    size, dtype = math.prod(operands.query.shape[:3]), operands.query.dtype
    query, ids, key_ids = (
        _bytes(x) for x in (operands.query, operands.query_segment_ids, operands.key_value_segment_ids)
    )
    out, lse = size * operands.value.shape[3] * dtype.itemsize, size * statistics_dtype(dtype).itemsize
    forward = backward = 0
    for step in steps:
        parts = 2 if step.is_shared else 1
        forward += max((query + ids) // parts, keys + key_ids) + (out + lse) // parts
        backward += max((query + 2 * out + lse + ids) // parts, keys + key_ids) + max(query // parts, keys)
    return Sent(2 * len(steps), forward), Sent(2 * len(steps), backward)


def words(spec: AttentionSpec, operands: Operands) -> str:
    """Returns the note of a device's call."""
    ring = spec.ring
    assert ring is not None
    where = f"the rows are split over {ring.size} devices of mesh axis {', '.join(ring.axes)}"
    if ring.lengths is not None:
        where += ", with padding at the end of {} queries and {} keys".format(*ring.lengths)
    if ring.whole_keys:
        return f"{where}, and the keys are whole: nothing is sent forward, and gradients of keys and values are summed"
    helps = helping.balances(spec, operands)
    count = ring.size // 2 + 1 if helps else len(plan.steps(spec, operands))
    steps = f"{count} step{'s' * (count != 1)}"
    forward, backward = sent(spec, operands)
    balance = ", in which devices without work help others" if helps else ""
    return (
        f"{where}: ring attention in {steps}{balance}; a device sends at most {forward} forward, and {backward} "
        "backward; kernels are those of the last step"
    )


def _bytes(*arrays: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays if x is not None)
