# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Runs calls with dropout in the emulators of both families: the masks that kernels draw, bit by bit, and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fastattn
from jax_fastattn import dropout
from jax_fastattn.canonical import batched, packed
from jax_fastattn.ops.cuda import passes
from jax_fastattn.spec import DIFFERENTIABLE, AttentionSpec, Operands
from jax_fastattn.xla import passes as xla

KEY = jax.random.key(5)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call with dropout.

    Attributes:
        lengths: T and S.
        options: arguments of `attention`, or of `attention_varlen`.
        packed: boundaries of packed queries and keys; none if nothing is packed.
        first: the first rows of a block of a ring in the whole sequence.
        rates: the rate of each head, as `jax.vmap` over rates makes them; none if all have `rate`.
        precision: the setting of `jax.default_matmul_precision`.
    """

    head_dim: int = 64
    lengths: tuple[int, int] = (77, 61)
    batch: int = 2
    kv_heads: int = 1
    group: int = 2
    rate: float = 0.3
    broadcast: bool = False
    dtype: str = "bfloat16"
    options: tuple[tuple[str, Any], ...] = ()
    packed: tuple[tuple[int, ...], tuple[int, ...]] | tuple[()] = ()
    first: tuple[int, int] = (0, 0)
    rates: tuple[float, ...] = ()
    precision: str = "default"

    def shape(self) -> tuple[int, int, int, int]:
        """The shape of all weights."""
        return self.batch, self.kv_heads * self.group, *self.lengths

    def canonical(self, query: Any, key: Any, value: Any) -> tuple[AttentionSpec, Operands]:
        """What the public function makes of it."""
        with jax.default_matmul_precision(self.precision):
            return self._canonical(query, key, value)

    def _canonical(self, query: Any, key: Any, value: Any) -> tuple[AttentionSpec, Operands]:
        given = {"dropout_rate": self.rate, "dropout_key": KEY, "broadcast_dropout": self.broadcast}
        options: dict[str, Any] = {**dict(self.options), **given}
        if self.packed:
            arrays = [x[0] for x in (query, key, value)]
            return packed.canonicalize(*arrays, *(jnp.array(x, jnp.int32) for x in self.packed), **options)
        spec, operands = batched.canonicalize(query, key, value, **options)
        assert operands.dropout is not None
        numbers = dropout.moved(operands.dropout, *self.first) if self.first != (0, 0) else operands.dropout
        if self.rates:
            keeps = dropout.STEPS - jnp.round(jnp.array(self.rates) * dropout.STEPS).astype(jnp.int32)
            numbers = numbers.at[..., dropout.KEEPS].set(keeps)
        return spec, operands._replace(dropout=numbers)

    def draw(self) -> list[jax.Array]:
        """Query, key, value and cotangent."""
        random, (t, s) = np.random.default_rng(0), self.lengths
        heads = self.kv_heads * self.group, self.kv_heads, self.kv_heads, self.kv_heads * self.group
        sizes = zip((t, s, s, t), heads, strict=True)
        return [jnp.asarray(random.standard_normal((self.batch, *x, self.head_dim)), self.dtype) for x in sizes]

    def mask(self) -> np.ndarray:
        """Which weights `dropout_mask` keeps, of pairs that may see each other by their sequence."""
        names = ("cu_seqlens_q", "cu_seqlens_k") if self.packed else ()
        given = {name: jnp.array(x) for name, x in zip(names, self.packed, strict=True)}
        batch, heads, *lengths = self.shape()
        rows, keys = (first + length for first, length in zip(self.first, lengths, strict=True))
        found = jax_fastattn.dropout_mask(KEY, self.rate, (batch, heads, rows, keys), broadcast=self.broadcast, **given)
        return np.broadcast_to(found[..., self.first[0] :, self.first[1] :], self.shape())


def check_mask(call: Call, arch: str) -> None:
    """Asserts that a forward kernel keeps what `dropout_mask` keeps: all weights of up to D keys are in the output.

    Rows of V are those of an identity matrix. Of more keys, each key/value head shows others.
    """
    query, key, _, _ = call.draw()
    keys, (width, heads) = np.arange(call.lengths[1]), (call.head_dim, call.kv_heads)
    columns = keys[:, None] - width * np.arange(heads)[None, :]
    value = (columns[..., None] == np.arange(width)).astype(np.float32)
    value = jnp.broadcast_to(jnp.asarray(value, call.dtype), (call.batch, *value.shape))
    spec, operands = call.canonical(0.1 * query, key, value)
    with pytest.MonkeyPatch.context() as patch:
        emulated_ops.emulate(patch, arch)
        out, _ = passes.forward(spec, operands)
    plain = dataclasses.replace(spec, present=tuple(x for x in spec.present if x != "dropout"))
    seen = xla.forward(plain, operands._replace(dropout=None))[0]
    out, seen = (np.asarray(x.astype(jnp.float32)).swapaxes(1, 2) for x in (out, seen))
    mask, wrong, kept = call.mask(), 0, 0
    for n in range(call.kv_heads * call.group):
        first = width * (n // call.group)
        inside = mask[:, n, :, first : first + width]
        count = inside.shape[2]
        wanted = inside & (seen[:, n, :, :count] != 0)
        wrong += int(((out[:, n, :, :count] != 0) != wanted).sum())
        kept += int(wanted.sum())
    assert kept > 100
    assert wrong == 0, f"{wrong} decisions are wrong"


def check_gradients(call: Call, arch: str, tolerance: float = 2**-6) -> None:
    """Asserts that output, log-sum-exp and gradients are those of the XLA path in float32."""
    *arrays, dout = call.draw()
    spec, operands = call.canonical(*arrays)
    names = [name for name in DIFFERENTIABLE if name in spec.present]
    dlse = jnp.asarray(np.random.default_rng(1).standard_normal(dout.shape[:3]), jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        emulated_ops.emulate(patch, arch)
        out, lse = passes.forward(spec, operands)
        found = passes.backward(spec, operands, out, lse, dout, dlse, names)
    spec = dataclasses.replace(spec, precision="default")
    single = operands._replace(**{x: getattr(operands, x).astype(jnp.float32) for x in names})
    wanted, wanted_lse = xla.forward(spec, single)
    expected = xla.backward(spec, single, wanted, wanted_lse, dout.astype(jnp.float32), dlse, names)
    # Logits have the rounding of their operands, which other products hardly have.
    of_lse = 1e-4 if call.precision == "default" else 2e-3
    np.testing.assert_allclose(lse, wanted_lse, atol=of_lse, rtol=of_lse)
    results = {"out": (out, wanted)} | {x: (getattr(found, x), getattr(expected, x)) for x in names}
    for name, (got, right) in results.items():
        got, right = (np.asarray(x.astype(jnp.float32)) for x in (got, right))
        np.testing.assert_allclose(got, right, atol=tolerance * np.abs(right).max() + 1e-6, err_msg=name)
