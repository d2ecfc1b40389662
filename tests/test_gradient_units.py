# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The units of gradients in the float16 kernels: what rows have a say, and a model of the kernels' roundings."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn.ops.cuda.gradient_units import gradient_units
from jax_fastattn.spec import Operands

F16 = np.float16


class Draw(NamedTuple):
    """Rows of one head with normal operands; the fields are as in `tests/xla/test_float16.py`."""

    keys: int
    sink: float | None = None
    cotangents: float = 1.0
    large_row: bool = False
    spread: float = 1.0


DRAWS = {
    "128": Draw(128),
    "4k": Draw(4096),
    "64k": Draw(65536),
    "128-sink": Draw(128, sink=12.0),
    "64k-sink": Draw(65536, sink=12.0),
    "small": Draw(512, cotangents=2.0**-10),
    "large": Draw(16384, cotangents=2.0**9),
    "large-row": Draw(16384, large_row=True),
    "large-row-sink": Draw(128, sink=12.0, large_row=True),
    "peaked-large": Draw(512, cotangents=2.0**13, spread=2.0),
}

_units = jax.jit(lambda *given: gradient_units(Operands(*given[:3], sinks=given[6]), *given[3:6], None)[0, 0])


def _half(x: np.ndarray) -> np.ndarray:
    return x.astype(F16).astype(np.float32)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_model_of_the_kernels_has_the_error_of_its_roundings(draw: Draw) -> None:
    """P, dS and the result are rounded once each: 1.8 times the rounding of a result. Nothing overflows."""
    random, rows, dim = np.random.default_rng(3), 16, 32
    scale = dim**-0.5
    query, dout = (random.standard_normal((rows, dim)) for _ in range(2))
    key, value = (random.standard_normal((draw.keys, dim)) for _ in range(2))
    dout[3] *= 1000 if draw.large_row else 1
    query, key, value, dout = (_half(x) for x in (query * draw.spread, key, value, dout * draw.cotangents))
    logits = scale * (query.astype(np.float64) @ key.T.astype(np.float64))
    sink = -np.inf if draw.sink is None else draw.sink
    lse = np.logaddexp(np.logaddexp.reduce(logits, axis=1), sink)[:, None]
    p = np.exp(logits - lse)
    dp = dout.astype(np.float64) @ value.T
    ds = p * (dp - (p * dp).sum(1, keepdims=True))
    exact = {"dq": ds @ key * scale, "dk": ds.T @ query * scale, "dv": p.T @ dout}

    four = [x.astype(F16)[None, :, None] for x in (query, key, value, p @ value)]
    sinks = None if draw.sink is None else np.full((1, 1), draw.sink, np.float32)
    units = _units(*four, lse.astype(np.float32)[None], dout.astype(F16)[None, :, None], sinks)
    dp_unit, over_dp, log2_p, over_p = (np.float32(x) for x in units)
    weights = _half(p * 2.0**log2_p)
    delta = (_half(p @ value) * dout).sum(1, keepdims=True) * dp_unit
    products = [dout @ _half(value * dp_unit).T, _half(dout * dp_unit) @ value.T]
    for product in products:
        rounded = _half(weights * (product - delta))
        assert np.isfinite(rounded).all()
        over_ds = np.float32(scale) * over_dp * over_p
        found = {"dq": rounded @ key * over_ds, "dk": rounded.T @ query * over_ds, "dv": weights.T @ dout * over_p}
        for name, x in found.items():
            rounding, error = (np.sqrt(((y - exact[name]) ** 2).mean()) for y in (_half(exact[name]), _half(x)))
            assert error < 2.3 * rounding, (name, error / rounding)


def _given(rows: int = 24, keys: int = 40, heads: int = 4, kv_heads: int = 2) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {"query": (2, rows, heads, 8), "key": (2, keys, kv_heads, 8), "value": (2, keys, kv_heads, 8)}
    shapes |= {"out": shapes["query"], "lse": (2, rows, heads), "dout": shapes["query"]}
    return {
        name: jnp.asarray(random.standard_normal(x), jnp.float32 if name == "lse" else jnp.float16)
        for name, x in shapes.items()
    }


def _of(
    given: dict[str, jax.Array], dlse: jax.Array | None = None, is_part: bool = False, **more: object
) -> np.ndarray:
    names = ("query", "key", "value")
    operands = Operands(*(given[name] for name in names), **more)  # pyright: ignore[reportArgumentType]
    results = (given[name] for name in ("out", "lse", "dout"))
    return np.asarray(gradient_units(operands, *results, dlse, is_part=is_part))


def test_each_head_and_batch_entry_has_units_of_its_own() -> None:
    given = _given()
    before, changed = _of(given), given["dout"].at[1, :, 2:].multiply(64)
    after = _of(given | {"dout": changed})
    assert before.shape == (2, 2, 4)
    over_ds = [x[..., 1] * x[..., 3] for x in (before, after)]
    np.testing.assert_array_equal(over_ds[1] / over_ds[0], [[1, 1], [1, 64]])
    np.testing.assert_array_equal(before[..., 0] * before[..., 1], 1)
    np.testing.assert_array_equal(np.exp2(before[..., 2]) * before[..., 3], 1)


def test_what_is_hidden_or_not_finite_changes_no_unit() -> None:
    given, lengths = _given(), jnp.array([40, 30], jnp.int32)
    given["lse"] = given["lse"].at[:, 20:].set(-jnp.inf)
    before = _of(given, key_value_seq_lengths=lengths)
    for poison in (jnp.nan, jnp.inf, 6e4):
        value, dout = given["value"].at[1, 30:].set(poison), given["dout"].at[:, 20:].set(poison)
        np.testing.assert_array_equal(
            _of(given | {"value": value, "dout": dout}, key_value_seq_lengths=lengths), before
        )
    np.testing.assert_array_equal(_of(given | {"value": given["value"].at[0, 3].set(jnp.nan)})[1], _of(given)[1])


def test_the_log_sum_exp_and_the_outputs_of_a_part_count() -> None:
    given = _given()
    before = _of(given)[..., 1] * _of(given)[..., 3]
    larger = _of(given, dlse=jnp.full(given["lse"].shape, 4096.0))
    assert (larger[..., 1] * larger[..., 3] > before).all()
    # The output of all keys may be greater than the values of a part of them.
    part = _of(given | {"out": given["out"] * 4096}, is_part=True)
    assert (part[..., 1] * part[..., 3] > before).all()


def test_packed_sequences_share_units() -> None:
    given = _given()
    starts = jnp.array([[[0] * 4, [0, 10, 0, 20], [10, 10, 20, 15], [20, 4, 35, 5]]] * 2, jnp.int32)
    units = _of(given, sequences=starts)
    assert units.shape == (1, 2, 4)
    poisoned = {"value": given["value"].at[:, 35:].set(6e4), "dout": given["dout"].at[:, 20:].set(6e4)}
    np.testing.assert_array_equal(_of(given | poisoned, sequences=starts), units)
