# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A launch before it is bound: its compile key, its operands as the kernel reads them, and the shapes of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from jax_fastattn import ffi
from jax_fastattn.kernels.arguments.present import present_buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.choose import prepass_configs
from jax_fastattn.kernels.decode.split import heads_side_by_side
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda.bias import bias_operands
from jax_fastattn.ops.cuda.dropout import dropout_numbers
from jax_fastattn.ops.cuda.launch import launch, launch_scalars, persistent_blocks
from jax_fastattn.ops.cuda.prepass import REPLACED, TileLists, kept_lists, tile_lists
from jax_fastattn.ops.cuda.records import tile_records
from jax_fastattn.ops.cuda.row_bits import RowBitsArrays, row_bits
from jax_fastattn.ops.cuda.score_planes import joined_shapes, with_score_planes
from jax_fastattn.ops.cuda.split import SPLIT, side_by_side
from jax_fastattn.spec import QKV, AttentionSpec, Operands, Problem


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """One custom call, with the buffers that `present_buffers` names.

    Attributes:
        problem: the problem that the kernel was chosen for, see `launched_problem`.
        operands: the operands by name; None is absent.
        shapes: the shapes of the results and of scratch, by name.
        lists: what the kernel has in place of the predicate, if it does. For a launch with lists of both sides, these
            are the lists of tiles of queries, whose `planes` hold for both.
    """

    kernel: KernelSpec
    problem: Problem
    operands: Mapping[str, jax.Array | None]
    shapes: Mapping[str, tuple[int, ...]]
    lists: TileLists | RowBitsArrays | None = None

    @classmethod
    def of(
        cls,
        kernel: KernelSpec,
        problem: Problem,
        operands: Operands,
        shapes: Mapping[str, tuple[int, ...]],
        kept: Sequence[TileLists] = (),
        **residuals: jax.Array | None,
    ) -> LaunchPlan:
        """Plans the launch of a call, with a bias, records and lists as the kernel reads them.

        Args:
            kernel, problem, shapes: as for the plan.
            operands: the call's, padded for kernels.
            kept: see `tile_lists`.
            residuals: what a backward pass takes in addition to the operands of the call, by name, `[B, T, ...]` each.
        """
        arrays: dict[str, jax.Array | None] = operands._asdict() | residuals
        if kernel.products == "bf16x3":
            arrays |= {name: side_by_side(x) for name in SPLIT if (x := arrays.get(name)) is not None}
        if operands.dropout is not None:
            arrays["dropout"] = dropout_numbers(operands)
        if operands.is_packed:
            rows = {name: arrays[name] for name in (*QKV, *residuals)}
            arrays |= {name: x if x is None else _joined(x) for name, x in rows.items()}
            arrays |= _records(kernel, operands) | {"sequences": None}
        arrays |= bias_operands(kernel, arrays.pop("bias"), problem.key_length, problem.spec.scale)
        batch, queries = operands.query.shape[:2]
        lengths = batch, queries, operands.key.shape[1]
        arrays = with_score_planes(kernel, arrays, lengths)
        found = _lists(kernel, problem.spec, operands, kept)
        if found:
            arrays = {name: x for name, x in arrays.items() if name not in REPLACED or getattr(kernel, name, False)}
        for lists in found:
            arrays |= lists.buffers()
        if not kernel.classifies_keys:
            arrays.pop("key_classes", None)
        return cls(kernel, problem, arrays, shapes, found[-1] if found else None)

    def bind(self) -> dict[str, jax.Array]:
        """Binds the custom call; returns results and scratch by name."""
        buffers = {name: buffer for name, buffer in present_buffers(self.kernel).items() if buffer is not None}
        names = [name for name, buffer in buffers.items() if buffer.role == "operand"]
        made = {name: buffer.dtype for name, buffer in buffers.items() if buffer.role != "operand"}
        given = {name for name, x in self.operands.items() if x is not None}
        assert given == set(names) and self.shapes.keys() == made.keys(), (self.kernel, given, set(self.shapes))
        scalars = self._scalars()
        found = launch(
            *(self.operands[name] for name in names),
            kernel=self.kernel,
            ints=scalars.of_dtype("int32"),
            floats=scalars.of_dtype("float32"),
            results=tuple((self.shapes[name], dtype) for name, dtype in made.items()),
        )
        return dict(zip(made, found, strict=True))

    def _scalars(self) -> Scalars:
        """Returns the scalars of the launch."""
        kernel, problem, multiprocessors, side_heads = self.kernel, self.problem, ffi.multiprocessors(), None
        if kernel.op == "decode":
            side_heads = heads_side_by_side(problem.num_kv_heads, multiprocessors)
        elif kernel.op == "forward":
            multiprocessors = persistent_blocks(problem, multiprocessors)
        visit = () if self.lists is None else (self.lists.planes,)
        parts = self.shapes["dbias"][0] if "dbias" in self.shapes else None
        scalars = launch_scalars(problem, multiprocessors, *visit, side_heads=side_heads, bias_parts=parts)
        # The range of keys begins at the offset.
        return scalars._replace(window_left=0) if kernel.row_bits else scalars


def launched_problem(spec: AttentionSpec, operands: Operands) -> Problem:
    """Returns the problem of a launch. Batch entries with packed sequences become one, see `_joined`."""
    problem = Problem.of(spec, operands)
    if not operands.is_packed:
        return problem
    return replace(
        problem,
        batch=1,
        query_length=problem.batch * problem.query_length,
        key_length=problem.batch * problem.key_length,
        num_sequences=problem.batch * problem.num_sequences,
        planes=joined_shapes(problem.planes),
    )


def _joined(x: jax.Array) -> jax.Array:
    """Returns an array `[B, T, ...]` as `[1, B T, ...]`."""
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def _records(kernel: KernelSpec, operands: Operands) -> dict[str, jax.Array]:
    """Returns the records of tiles of packed sequences by name."""
    assert operands.sequences is not None
    lengths, rows = (operands.query.shape[1], operands.key.shape[1]), kernel.config.slot_rows
    sides = {"query_tiles": False} | ({"key_tiles": True} if kernel.op == "backward" else {})
    return {name: tile_records(operands.sequences, lengths, rows, of_keys=side) for name, side in sides.items()}


def _lists(
    kernel: KernelSpec, spec: AttentionSpec, operands: Operands, kept: Sequence[TileLists]
) -> list[TileLists | RowBitsArrays]:
    """Returns the bits or lists that a launch has in place of the predicate; none if it has neither."""
    found: list[TileLists | RowBitsArrays] = [row_bits(spec, operands)] if kernel.row_bits else []
    kept = [*kept, *kept_lists(spec, operands)]
    if kernel.classifies_keys:  # lists that are kept have no classes
        kept = [lists for lists in kept if lists.config.transposed or lists.classes is not None]
    if kernel.listed or kernel.row_bits:
        found += [tile_lists(spec, operands, config, kept) for config in prepass_configs(kernel)]
    return found
