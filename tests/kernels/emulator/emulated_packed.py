# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences for emulated kernels: each drawn, poisoned and computed by itself, then put into one array."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import emulated_hopper
import jax
import numpy as np
from emulated_backward import Sizes, compare_dsinks_terms, draw_operands, draw_units, dsinks_buffer, with_sinks
from emulated_launch import compile_kernel, launch_scalars, place, start
from testing.draws import moved
from testing.poison import full

from jax_fastattn.cases.case import Case
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.arguments.present import launch_buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm80.backward.config import backward_scratch
from jax_fastattn.kernels.sm80.backward.dkdv_dq import HeadOrder
from jax_fastattn.kernels.sm80.backward.launches import BackwardKernel
from jax_fastattn.kernels.sm80.forward.kernel import ForwardKernel
from jax_fastattn.kernels.sm90.backward.config import backward_scratch as hopper_scratch
from jax_fastattn.kernels.sm90.backward.launches import BackwardKernel as HopperBackwardKernel
from jax_fastattn.kernels.sm90.backward.launches import HeadOrders
from jax_fastattn.kernels.sm90.forward.config import forward_scratch
from jax_fastattn.kernels.sm90.forward.kernel import ForwardKernel as HopperForwardKernel
from jax_fastattn.layouts import packed
from jax_fastattn.ops.cuda.records import tile_records

# JAX compiles each operation by itself otherwise, for each shape.
_sequences = jax.jit(packed.sequences, static_argnums=2)
_tile_records = jax.jit(tile_records, static_argnums=(1, 2), static_argnames="of_keys")

QUERY_SIDE = ("query", "out", "lse", "dout", "dlse", "dq", "delta", "dsinks_terms")


@dataclass(frozen=True)
class Pack:
    """Sequences with other rows, which are padding, before, between and after them.

    Attributes:
        queries, keys: lengths.
        padding: rows before the first and after the last sequence, of queries and of keys.
        offsets: of queries, where the compile key has offsets.
        sizes: bounds, scale and cap.
        boundaries: those of queries and of keys, if they are to be moved to what the lengths and the padding say.
        broken: a sequence whose queries, keys, values and cotangents are all NaN; nobody looks at its own results.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    padding: tuple[tuple[int, int], tuple[int, int]] = ((3, 5), (7, 2))
    offsets: tuple[int, ...] = ()
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    boundaries: tuple[Any, ...] = ()
    broken: int | None = None

    @classmethod
    def of(cls, case: Case) -> Pack:
        """Returns the sequences of a random call."""
        bounded = moved(case)
        assert bounded.packed is not None
        queries, keys = bounded.packed
        totals = case.query_length, case.key_length
        ends = [total - sum(x) - first for total, x, first in zip(totals, bounded.packed, bounded.first, strict=True)]
        offsets: Any = case.query_offset or ()
        if offsets == "bottom_right":
            offsets = tuple(key - query for query, key in zip(queries, keys, strict=True))
        spec = case.spec()
        left, right = (x or 0 for x in spec.bounds)
        cap = case.logits_soft_cap or 0.0
        sizes = Sizes(kv_heads=case.num_kv_heads, left=left, right=right, cap=cap, scale=spec.scale)
        padding = (bounded.first[0], ends[0]), (bounded.first[1], ends[1])
        return cls(queries, keys, padding, offsets, sizes, case.boundaries())

    def total(self, side: int) -> int:
        """Rows of all."""
        return sum((self.queries, self.keys)[side]) + sum(self.padding[side])

    def whole(self, side: int) -> np.ndarray:
        """Which rows do not belong to the broken sequence, bool `[rows]`."""
        found, first = np.ones(self.total(side), bool), self.padding[side][0]
        if self.broken is not None:
            lengths = (self.queries, self.keys)[side]
            found[first + sum(lengths[: self.broken]) :][: lengths[self.broken]] = False
        return found

    def sequences(self) -> np.ndarray:
        """The operand of `kernels/tiles/records.py`, `[1, M, 4 or 5]`."""
        boundaries = self.boundaries or [
            self.padding[side][0] + np.cumsum([0, *lengths]) for side, lengths in enumerate((self.queries, self.keys))
        ]
        found = np.asarray(_sequences(*map(np.asarray, boundaries), (self.total(0), self.total(1))))
        if self.offsets:
            found = np.concatenate([found, np.array([0, *self.offsets, 0])[:, None]], axis=1)
        return found[None].astype(np.int32)

    def records(self, rows: tuple[int, int], *, of_keys: bool) -> np.ndarray:
        """Records of the tiles of so many queries and keys."""
        totals = self.total(0), self.total(1)
        return np.asarray(_tile_records(self.sequences(), totals, rows, of_keys=of_keys))

    def launch_sizes(self) -> Sizes:
        """Those of the launch, whose batch is the number of sequences."""
        sequences, totals = self.sequences().shape[1], (self.total(0), self.total(1))
        return dataclasses.replace(self.sizes, batch=sequences, queries=totals[0], keys=totals[1])


def draw(spec: KernelSpec, pack: Pack) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Draws operands of all sequences, poisoned, with poison as padding; and their results."""
    alone = dataclasses.replace(spec, packed=False)
    parts, results = [], []
    for b, (queries, keys) in enumerate(zip(pack.queries, pack.keys, strict=True)):
        offsets = (pack.offsets[b],) if pack.offsets else ()
        sizes = dataclasses.replace(pack.sizes, batch=1, queries=queries, keys=keys, offsets=offsets)
        arrays, wanted = draw_operands(alone, sizes, seed=b)
        if codes.SINKS in spec.features:
            arrays["sinks"], wanted["out"], wanted["lse"] = with_sinks(alone, sizes, wanted)
        if b == pack.broken:
            names = ("query", "key", "value", "out", "lse", "dout", "dlse")
            arrays |= {name: np.full_like(arrays[name], np.nan) for name in names}
        parts.append(arrays)
        results.append(wanted)
    names = ("query", "key", "value", "out", "lse", "dout", "dlse")
    fill = {"lse": -np.inf}
    arrays = {name: _join(pack, name, parts, fill.get(name) if spec.dsinks else None) for name in names}
    wanted = {name: _join(pack, name, results, fill.get(name, 0.0)) for name in results[0]}
    if codes.SINKS in spec.features or spec.dsinks:
        arrays["sinks"] = parts[0]["sinks"]
    return arrays | draw_units(spec, arrays), wanted


def _join(pack: Pack, name: str, parts: list[dict[str, np.ndarray]], fill: float | None) -> np.ndarray:
    """Returns the rows of all sequences, with a number, or poison, as padding."""
    first, dtype = parts[0][name], parts[0][name].dtype
    shapes = [(1, length, *first.shape[2:]) for length in pack.padding[0 if name in QUERY_SIDE else 1]]
    before, after = (full(shape, dtype) if fill is None else np.full(shape, fill, dtype) for shape in shapes)
    return np.concatenate([before, *(part[name] for part in parts), after], axis=1)


def check_forward(spec: KernelSpec, pack: Pack) -> None:
    """Runs the kernel of its family into buffers of NaN, and compares output and log-sum-exp."""
    arrays, wanted = draw(spec, pack)
    found = run_forward(spec, pack, arrays)
    out, whole = wanted["out"][:, pack.whole(0)], pack.whole(0)
    tolerance = 2**-7 if spec.operand_dtype == "bfloat16" else 2**-10
    got = found["out"].astype(np.float64)[:, whole]
    np.testing.assert_allclose(got, out, atol=tolerance * np.abs(wanted["out"]).max(), rtol=tolerance)
    np.testing.assert_allclose(found["lse"][:, whole], wanted["lse"][:, whole], atol=1e-4, rtol=1e-5)


def run_forward(spec: KernelSpec, pack: Pack, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the output and the log-sum-exp that the kernel of its family makes of operands."""
    on_hopper = spec.family == "sm90"
    kernel = (HopperForwardKernel if on_hopper else ForwardKernel)(spec)
    texts = compile_kernel(kernel, spec)
    rows, v_head_dim = arrays["query"].shape[:3], arrays["value"].shape[3]
    results = {
        "out": np.full((*rows, v_head_dim), np.nan, arrays["query"].dtype),
        "lse": np.full(rows, np.nan, np.float32),
    }
    arrays = arrays | results | {"query_tiles": pack.records(spec.config.slot_rows, of_keys=False)}
    arrays |= {name: np.full(shape, -1, np.int32) for name, shape in forward_scratch(spec).items()}
    memory, buffers = place(spec, arrays)
    for launch in kernel.launches(buffers, launch_scalars(spec, pack.launch_sizes())):
        if on_hopper:
            emulated_hopper.start(launch, texts, memory)
        else:
            start(launch, texts, memory, schedule="random", finds_races=True)
    return {name: memory.read(getattr(buffers, name), x.shape, x.dtype) for name, x in results.items()}


def check_backward(spec: KernelSpec, pack: Pack) -> None:
    """Runs the kernels of its family into buffers of NaN, and compares every gradient."""
    arrays, wanted = draw(spec, pack)
    found = run_backward(spec, pack, arrays)
    tolerance = 2**-6 if spec.operand_dtype == "bfloat16" else 2**-9
    for name in ("dq", "dk", "dv"):
        whole = pack.whole(0 if name in QUERY_SIDE else 1)
        got, expected = found[name].astype(np.float64)[:, whole], wanted[name][:, whole]
        atol = tolerance * np.abs(wanted[name]).max() + 1e-5
        np.testing.assert_allclose(got, expected, atol=atol, rtol=0, err_msg=name)
    if spec.dsinks:
        whole = pack.whole(0)
        compare_dsinks_terms(found["dsinks_terms"][:, :, whole], wanted["dsinks_terms"][:, whole], tolerance)


def run_backward(spec: KernelSpec, pack: Pack, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what the kernels make of operands: the gradients, and what rows add to that of their sink."""
    on_hopper = spec.family == "sm90"
    kernel = (HopperBackwardKernel if on_hopper else BackwardKernel)(spec)
    texts = compile_kernel(kernel, spec)
    operands = {"dq": "query", "dk": "key", "dv": "value"}
    arrays = arrays | {name: np.full(arrays[x].shape, np.nan, arrays[x].dtype) for name, x in operands.items()}
    arrays |= {f"{name}_tiles": pack.records(spec.config.slot_rows, of_keys=name == "key") for name in ("query", "key")}
    sizes = pack.launch_sizes()
    results = dsinks_buffer(spec, dataclasses.replace(sizes, batch=1))
    arrays |= results
    scratch = hopper_scratch if on_hopper else backward_scratch
    for name, shape in scratch(spec, sizes.batch, sizes.queries, sizes.kv_heads * spec.group).items():
        dtype = launch_buffers(spec)[name]
        arrays[name] = np.full(shape, np.nan if dtype == "float32" else -1, dtype)
    memory, buffers = place(spec, arrays)
    scalars = launch_scalars(spec, sizes)
    if on_hopper:
        for launch in kernel.launches(buffers, scalars, few_slots(kernel, scalars)):
            emulated_hopper.start(launch, texts, memory)
    else:
        for launch in kernel.launches(buffers, scalars, HeadOrder(group=2)):
            start(launch, texts, memory)
    names = (*operands, *results)
    return {name: memory.read(getattr(buffers, name), arrays[name].shape, arrays[name].dtype) for name in names}


def few_slots(kernel: HopperBackwardKernel, scalars: Scalars) -> HeadOrders:
    """Returns the orders of a launch, in which `PreprocessKernel.background` prepares all slots except the first one.

    Kernels that add to dq in any order leave none.
    """
    orders = kernel.orders(scalars)
    if not kernel.spec.ordered:
        return orders
    return orders._replace(keys=orders.keys._replace(prologue=1))
