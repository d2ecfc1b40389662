# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What `explain` says of a call whose rows a mesh splits: the calls of its steps, and what travels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_fastattn.ops.abstract import statistics_dtype
from jax_fastattn.ops.ring import plan
from jax_fastattn.ops.ring.blocks import Place, block_call
from jax_fastattn.ops.ring.padding import hide
from jax_fastattn.ops.ring.passes import EXCHANGED, TRAVELERS
from jax_fastattn.ops.sharding import Split, axes_along, own_letters, rows_whole
from jax_fastattn.spec import OPERANDS, AttentionSpec, Operands, Problem, Ring


def call(spec: AttentionSpec, operands: Operands, split_of: tuple[Any, Any]) -> tuple[Problem, str]:
    """Returns the problem that kernels are chosen for, and a note of what travels; the note may be empty.

    Args:
        spec, operands: the whole call, with abstract operands.
        split_of: the arguments for query and key, whose shardings count.
    """
    split, note = _split_of(*split_of)
    if split is None:
        return Problem.of(spec, operands), note
    local = local_call(spec, operands, split)
    return block_problem(*local), words(*local)


class Sent(NamedTuple):
    """The most that a device sends: collective permutes and bytes."""

    permutes: int
    bytes: int

    def with_exchanges(self, count: int, halves: int, size: int) -> Sent:
        """Returns these and exchanges of arrays of `size` bytes in all, of which so many halves are sent."""
        return Sent(self.permutes + count * halves, self.bytes + size * halves // 2)

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
    balanced = _balanced(spec, operands)
    step = plan.steps(balanced, operands)[-1]
    found: list[Problem] = []

    def trace(operands: Operands, device: jax.Array) -> None:
        size = step.fetched[1] - step.fetched[0]
        parts = {name: getattr(operands, name)[:, :size] for name in TRAVELERS if getattr(operands, name) is not None}
        place = Place(device, device, operands.query.shape[1], operands.key.shape[1], step.fetched[0])
        found.append(Problem.of(*block_call(balanced, operands._replace(**parts), step.blocks[-1], place)))

    jax.eval_shape(trace, operands, jax.ShapeDtypeStruct((), jnp.int32))
    return found[0]


def sent(spec: AttentionSpec, operands: Operands) -> tuple[Sent, Sent]:
    """Returns what a device sends in the forward pass, and in the backward pass of query, key and value."""
    later = plan.steps(_balanced(spec, operands), operands)[1:]
    ranges = [step.fetched[1] - step.fetched[0] for step in later]
    keys, rows = _bytes(operands.key, operands.value), operands.key.shape[1]
    of_keys, of_ids = keys // rows, _bytes(operands.key_value_segment_ids) // rows
    forward = Sent(len(later), sum(ranges) * (of_keys + of_ids))
    backward = Sent(2 * len(later), sum(ranges) * (2 * of_keys + of_ids))
    if plan.balances(spec, operands):
        given = _bytes(*(getattr(operands, name) for name in EXCHANGED))
        query, v_dim = operands.query, operands.value.shape[3]
        out = math.prod(query.shape[:3]) * v_dim * query.dtype.itemsize
        lse = math.prod(query.shape[:3]) * statistics_dtype(query.dtype).itemsize
        assert spec.ring is not None
        halves = 1 if spec.ring.size == 2 else 2  # of two devices, each keeps one half
        forward = forward.with_exchanges(2, halves, given + out + lse)
        backward = backward.with_exchanges(3, halves, given + 2 * out + lse + _bytes(query) + keys)
    return forward, backward


def words(spec: AttentionSpec, operands: Operands) -> str:
    """Returns the note of a device's call."""
    ring = spec.ring
    assert ring is not None
    where = f"the rows are split over {ring.size} devices of mesh axis {', '.join(ring.axes)}"
    if ring.lengths is not None:
        where += ", with padding at the end of {} queries and {} keys".format(*ring.lengths)
    if ring.whole_keys:
        return f"{where}, and the keys are whole: nothing is sent forward, and gradients of keys and values are summed"
    count = len(plan.steps(_balanced(spec, operands), operands))
    steps = f"{count} step{'s' * (count != 1)}"
    forward, backward = sent(spec, operands)
    order = ", balanced by an exchange into zigzag order" if plan.balances(spec, operands) else ""
    return (
        f"{where}: ring attention in {steps}{order}; a device sends at most {forward} forward, and {backward} "
        "backward; kernels are those of the last step"
    )


def _balanced(spec: AttentionSpec, operands: Operands) -> AttentionSpec:
    assert isinstance(spec.ring, Ring)
    if not plan.balances(spec, operands):
        return spec
    return dataclasses.replace(spec, ring=dataclasses.replace(spec.ring, layout="zigzag", balance=False))


def _bytes(*arrays: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays if x is not None)
