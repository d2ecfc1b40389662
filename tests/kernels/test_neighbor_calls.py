# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The bits of a row in whole calls of both passes, on emulated GPUs: a sequence alone, and next to others in a batch.

A deterministic call is what `ops/cuda/passes.py` makes of it, with the choice of kernels and the lists of a prepass.
`test_neighbors.py` has single kernels, and calls of few queries. Nothing is promised for the XLA path: one test says
what holds on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops

from jax_fastattn import attention
from jax_fastattn.cases.case import Case
from jax_fastattn.layouts import packed
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.spec import QKV, Operands

ROWS = Case("bfloat16", 2, 80, 101, num_kv_heads=1, group=2, is_causal=True, deterministic=True)
CASES = {
    "causal": ROWS,
    "mask": dataclasses.replace(ROWS, mask="bts", is_causal=False),
    "ids": dataclasses.replace(ROWS, segments=3),
    "lengths": dataclasses.replace(ROWS, query_seq_lengths=(80, 37), key_value_seq_lengths=(101, 70)),
    "offsets-and-a-window": dataclasses.replace(ROWS, query_offset=(3, 21), window=(40, 0), is_causal=False),
    "d192": dataclasses.replace(ROWS, head_dim=192),
    "float16": dataclasses.replace(ROWS, dtype="float16"),
    "float32": dataclasses.replace(ROWS, dtype="float32"),
}
# One case of each family at every commit.
FIRST = {("sm_80", "mask"), ("sm_90a", "lengths")}
BOTH = [
    pytest.param(arch, name, id=f"{arch}-{name}", marks=[] if (arch, name) in FIRST else pytest.mark.slow)
    for arch in ("sm_80", "sm_90a")
    for name in CASES
]


def run(case: Case, operands: Operands, dout: jax.Array) -> dict[str, np.ndarray]:
    """Returns the results of both passes."""
    spec = case.spec()
    out, lse = cuda.forward(spec, operands)
    gradients = cuda.backward(spec, operands, out, lse, dout, None, QKV)
    found = {"out": out, "lse": lse, **{name: getattr(gradients, name) for name in QKV}}
    return {name: np.asarray(x) for name, x in found.items()}


def rows(operands: Operands, b: int) -> Operands:
    """Returns the operands of one batch entry."""
    given = {name: x[b : b + 1] for name, x in operands._asdict().items() if x is not None}
    return Operands(**given)


@pytest.mark.parametrize(("arch", "name"), BOTH)
def test_an_entry_has_the_bits_that_it_has_alone(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_ops.emulate(monkeypatch, arch)
    case = CASES[name]
    operands, (dout, _) = case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    together = run(case, operands, dout)
    alone = run(dataclasses.replace(case, batch=1), rows(operands, 1), dout[1:])
    for result, x in together.items():
        np.testing.assert_array_equal(alone[result], x[1:], err_msg=result)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, pytest.param(192, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_packed_sequence_has_the_bits_that_it_has_alone(
    arch: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both passes, at a place that is no multiple of a tile."""
    emulated_ops.emulate(monkeypatch, arch)
    lengths = (37, 70, 30)
    case = dataclasses.replace(ROWS, batch=1, query_length=137, key_length=137, head_dim=head_dim)
    case = dataclasses.replace(case, packed=(lengths, lengths))
    operands, (dout, _) = case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    together = run(case, operands, dout)
    place = slice(37, 107)
    bounds = jnp.array([0, 70], jnp.int32)
    cut: Any = {name: getattr(operands, name)[:, place] for name in QKV}
    single = dataclasses.replace(case, query_length=70, key_length=70, packed=((70,), (70,)))
    alone = run(single, Operands(**cut, sequences=packed.sequences(bounds, bounds, (70, 70))[None]), dout[:, place])
    for result, x in together.items():
        np.testing.assert_array_equal(alone[result], x[:, place], err_msg=result)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_an_entry_of_the_xla_path_is_as_accurate_as_alone(dtype: Any) -> None:
    """Its bits may change with the batch, so they are compared at the rounding of the dtype."""
    draws = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(x, (5, 40, 2, 16), dtype) for x in draws]

    def total(*arrays: jax.Array) -> jax.Array:
        return attention(*arrays, is_causal=True, deterministic=True, implementation="xla").astype(jnp.float32).sum()

    together = jax.grad(total, (0, 1, 2))(*arrays)
    alone = jax.grad(total, (0, 1, 2))(*(x[3:4] for x in arrays))
    for whole, x in zip(together, alone, strict=True):
        wanted = np.asarray(whole[3:4].astype(jnp.float32))
        tolerance = 2 * float(jnp.finfo(dtype).eps) * np.abs(wanted).max()
        np.testing.assert_allclose(np.asarray(x.astype(jnp.float32)), wanted, atol=tolerance, rtol=0)
