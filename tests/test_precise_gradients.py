# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`precise_gradients`: which calls keep what rounding takes from the output, through JAX's transformations.

The emulated kernels are in `kernels/test_rests.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fastattn import attention, attention_varlen, explain, target_arch
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels.choose import forward_spec, kernel_spec
from jax_fastattn.kernels.sums.out_rests import keeps_rests
from jax_fastattn.spec import AttentionSpec, Problem

KEYS = jax.random.split(jax.random.key(0), 3)
X = tuple(jax.random.normal(key, (2, 24, heads, 40), jnp.bfloat16) for key, heads in zip(KEYS, (4, 2, 2), strict=True))
RESTS = "i8[2,24,4,40]"


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def _attend(*arrays: jax.Array, **options: Any) -> jax.Array:
    return attention(*arrays, is_causal=True, precise_gradients=True, **options)


def _loss(*arrays: jax.Array, **options: Any) -> jax.Array:
    return (_attend(*arrays, **options).astype(jnp.float32) ** 2).sum()


def _varlen_loss(*arrays: jax.Array) -> jax.Array:
    bounds = jnp.array([0, 10, 24])
    query, key, value = (x[0] for x in arrays)
    return attention_varlen(query, key, value, bounds, bounds, precise_gradients=True).astype(jnp.float32).sum()


def _gradients(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.grad(loss, (0, 1, 2))


def _assert_same(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_a_differentiated_call_keeps_a_byte_an_element() -> None:
    assert RESTS in str(jax.make_jaxpr(_gradients(_loss))(*X))
    assert "i8[1,24,4,40]" in str(jax.make_jaxpr(_gradients(_varlen_loss))(*X))
    assert "i8[" not in str(jax.make_jaxpr(_loss)(*X))

    def plain(*arrays: jax.Array) -> jax.Array:
        return attention(*arrays, is_causal=True).astype(jnp.float32).sum()

    assert "i8[" not in str(jax.make_jaxpr(_gradients(plain))(*X))


def test_calls_without_rests() -> None:
    asks = AttentionSpec(1.0, precise_gradients=True)
    assert keeps_rests(asks, "bfloat16") and keeps_rests(asks, "float16")
    assert not keeps_rests(asks, "float32") and not keeps_rests(AttentionSpec(1.0), "bfloat16")
    assert not keeps_rests(replace(asks, implementation="xla"), "bfloat16")
    assert not keeps_rests(replace(asks, is_part=True), "bfloat16")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernels_of_a_call(arch: str) -> None:
    """A differentiated call of few queries takes the forward kernel, which writes what the backward pass reads."""
    query, key, value = X[0][:, :1], *(jnp.tile(x, (1, 40, 1, 1)) for x in X[1:])
    spec, operands = canonicalize(query, key, value, precise_gradients=True)
    plain = Problem.of(spec, operands)
    saved = jnp.zeros(query.shape, jnp.int8)
    kept = AttentionSpec(1.0, precise_gradients=True, keeps_rests=True, present=(*spec.present, "out_rests"))
    problem = Problem.of(kept, operands._replace(out_rests=saved))
    assert (forward_spec(plain, arch).op, forward_spec(problem, arch).op) == ("decode", "forward")
    assert forward_spec(problem, arch).out_rests and kernel_spec(problem, "backward", arch).out_rests
    assert not kernel_spec(plain, "forward", arch).out_rests and not kernel_spec(plain, "backward", arch).out_rests


def test_lowered_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One custom call gives the bytes and one takes them, with nothing between them."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    text = jax.jit(_gradients(_loss)).trace(*X).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @jax_fastattn\w*\(.*-> .*tensor<2x24x4x40xi8>", text)) == 1
    assert len(re.findall(r"custom_call @jax_fastattn\w*\(.*tensor<2x24x4x40xi8>.*\) ->", text)) == 1


def test_transformations_pass_them_on() -> None:
    """The XLA path reads none, so all gradients are equal; the bytes must follow the output."""
    expected = _gradients(lambda *x: (attention(*x, is_causal=True).astype(jnp.float32) ** 2).sum())(*X)
    _assert_same(_gradients(_loss)(*X), expected)
    _assert_same(jax.jit(_gradients(jax.checkpoint(_loss)))(*X), expected)
    policy = jax.checkpoint_policies.save_only_these_names("jax_fastattn_out", "jax_fastattn_lse")
    saving = jax.make_jaxpr(_gradients(jax.checkpoint(_loss, policy=policy)))(*X)
    assert RESTS in str(saving) and str(saving).count("jax_fastattn_attend") == 1
    stacked = [jnp.stack([x, 2 * x]) for x in X]
    _assert_same([x[0] for x in jax.vmap(_gradients(_loss))(*stacked)], expected)
    # The mapped axis becomes query heads, of which the bytes have as many.
    _assert_same([x[0] for x in jax.vmap(_gradients(_loss), (0, None, None))(stacked[0], *X[1:])], expected)

    def layers(query: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (_attend(x, *X[1:]), None), query, None, length=2)[0].astype(jnp.float32).sum()

    assert "i8[2,2,24,4,40]" in str(jax.make_jaxpr(jax.grad(layers))(X[0]))
    assert np.isfinite(np.asarray(jax.grad(layers)(X[0]), np.float32)).all()


def test_mean_keys_of_rows_come_first() -> None:
    """Both are kept if slopes of a score function are differentiated, too."""

    def loss(slopes: jax.Array, *arrays: jax.Array, precise: bool) -> jax.Array:
        out = attention(*arrays, score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k), precise_gradients=precise)
        return (out.astype(jnp.float32) ** 2).sum()

    slopes = jnp.array([0.3, -0.2, 0.1, 0.0])
    precise, plain = (jax.grad(functools.partial(loss, precise=x), (0, 1, 2, 3)) for x in (True, False))
    assert RESTS in (text := str(jax.make_jaxpr(precise)(slopes, *X))) and "'row_means', 'out_rests'" in text
    _assert_same(precise(slopes, *X), plain(slopes, *X))


def test_forward_mode_and_second_derivatives() -> None:
    def plain(*arrays: jax.Array) -> jax.Array:
        return (attention(*arrays, is_causal=True).astype(jnp.float32) ** 2).sum()

    for derivative in (
        lambda loss: jax.jvp(loss, X, X),
        lambda loss: jax.jvp(_gradients(loss), X, X)[1],
        lambda loss: jax.grad(lambda *x: sum(y.astype(jnp.float32).sum() for y in _gradients(loss)(*x)), (0, 1, 2))(*X),
    ):
        _assert_same(derivative(_loss), derivative(plain))


@pytest.mark.parametrize("split", [("data", None, "model"), (None, "data")], ids=["batch-heads", "rows"])
def test_a_mesh(split: tuple[str | None, ...]) -> None:
    """Where rows are split, nothing is kept, and the gradients are those of the ring."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    arrays = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*split))) for x in X]
    found = jax.jit(_gradients(_loss))(*arrays)
    with target_arch("sm_90a"):
        assert ("changes nothing" in explain(*arrays, precise_gradients=True).note) == (split[0] is None)
    assert [x.sharding.spec[: len(split)] for x in found] == [x.sharding.spec[: len(split)] for x in arrays]
    for x, y in zip(found, _gradients(_loss)(*X), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2**-6, atol=0.04)


def test_explain_and_errors() -> None:
    with target_arch("sm_90a"):
        note = explain(*X, precise_gradients=True).note
        assert "keeps 8 more bits of the output" in note
        assert "8 more bits" not in explain(*X).note
        single = [x.astype(jnp.float32) for x in X]
        assert "changes nothing in float32" in explain(*single, precise_gradients=True).note
    with pytest.raises(TypeError, match="precise_gradients"):
        attention(*X, precise_gradients="yes")  # pyright: ignore[reportArgumentType]
