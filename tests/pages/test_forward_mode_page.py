# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The code of docs/forward_mode.md runs as it stands, its calls are those of programs, its figures those of records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "forward_mode.md").read_text()
LAYERS = 2


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the code of the page defines."""
    found: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), found)
    return found


def _by_jax_nn(*x: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.nn.dot_product_attention(*x, is_causal=True)


def test_derivatives_are_those_of_jax_nn(names: dict[str, Any]) -> None:
    x, u = names["x"], names["u"]
    out, dout = jax.jit(lambda x, u: jax.jvp(_by_jax_nn, x, u))(x, u)
    np.testing.assert_allclose(names["out"], out, atol=1e-5)
    np.testing.assert_allclose(names["dout"], dout, atol=1e-4)
    gradient = jax.grad(lambda *x: jnp.sum(jnp.sin(_by_jax_nn(*x))), (0, 1, 2))
    expected = jax.jit(lambda x, u: jax.jvp(gradient, x, u)[1])(x, u)
    for ours, theirs in zip(names["product"], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    for _ in range(LAYERS):
        q = attention(q, k, v)
    return q


def _sum(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.sum(_attend(q, k, v).astype(jnp.float32) ** 2)


def _mean_flow(names: dict[str, Any]) -> Any:
    def gradient(x: Any, u: Any) -> Any:
        def model(params: Any, z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
            q, k, v = (z * param for param in params)
            return _attend(q, k, v) + t - r

        times = jnp.zeros((2, 1, 1, 1), jnp.bfloat16), jnp.ones((2, 1, 1, 1), jnp.bfloat16)
        return jax.grad(names["loss"])(x, model, u[0], u[1], *times)

    return gradient


def test_calls_of_a_layer(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    functions = {
        "`grad`": lambda x, u: jax.grad(_sum, (0, 1, 2))(*x),
        "`jvp`": lambda x, u: jax.jvp(_attend, x, u),
        "`grad` of a loss with a stopped tangent": _mean_flow(names),
        "Hessian-vector product": lambda x, u: jax.jvp(jax.grad(_sum, (0, 1, 2)), x, u)[1],
    }
    rows = dict(re.findall(r"^\| (.*?) \| (.*? \|.*?) \|$", PAGE.partition("## Cost")[0], re.MULTILINE))
    words = {"forward_tangent": "tangent", "backward_tangent": "second derivative"}
    arrays = tuple(jnp.zeros((2, 256, 4, 64), jnp.bfloat16) for _ in range(3))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), pytest.warns(match="tangents"):
        texts = {name: calls.cuda_text(function, arrays, arrays) for name, function in functions.items()}
    for name, text in texts.items():
        main = text[: text.index("func.func private")]
        found = [words.get(x, x) for x in re.findall(r"call @jax_fastattn_([a-z_]+?)(?:_\d+)?\(", main)]
        expected = [x for x in re.split(r" \| *|, ", rows[name]) if x] * LAYERS
        if name.startswith("Hessian"):
            expected.remove("backward")  # the first layer needs one
        assert sorted(found) == sorted(expected), name


def _cell(record: dict[str, Any]) -> str:
    figures = zip(record["cpu_ms"].values(), record["temporaries_mib"].values(), strict=True)
    ours, theirs = ((f"{ms:.3g}" if ms < 100 else f"{ms:.0f}", f"{mib:.0f}") for ms, mib in figures)
    return f"{ours[0]} / {theirs[0]} ({ours[1]} / {theirs[1]} MiB)"


def test_costs_are_those_of_the_record() -> None:
    (name,) = re.findall(r"Record: \[(.*?)\]", PAGE)
    records = [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text().splitlines()]
    modes = list(dict.fromkeys(x["mode"] for x in records))
    lines = ["| case | " + " | ".join(modes) + " |", "|---|" + "---:|" * len(modes)]
    for row in dict.fromkeys(x["row"] for x in records):
        cells = [_cell(x) for x in records if x["row"] == row]
        _, mask, length, dtype = row.split("-")
        lines.append(f"| {dtype}, {length}, {mask} | " + " | ".join(cells) + " |")
    table = PAGE.partition("<!-- cost: begin -->")[2].partition("<!-- cost: end -->")[0]
    assert table.strip() == "\n".join(lines)
