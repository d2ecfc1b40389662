# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The code of docs/programs.md runs as it stands, and means what the page says."""

import re
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the code of the page defines."""
    found: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), found)
    return found


def with_bias(names: dict[str, Any], bias: Any = None, **options: Any) -> jax.Array:
    return names["attention"](*(names[x] for x in "qkv"), bias, **options)


def with_query(names: dict[str, Any], query: Any, **options: Any) -> jax.Array:
    return names["attention"](query, names["k"], names["v"], **options)


def test_alibi_is_a_bias(names: dict[str, Any]) -> None:
    slopes, positions = names["slopes"], jnp.arange(names["T"], dtype=jnp.float32)

    def biased(slopes: jax.Array) -> jax.Array:
        bias = -slopes[:, None, None] * (positions[:, None] - positions[None, :])[None]
        return with_bias(names, bias, is_causal=True)

    np.testing.assert_allclose(names["out"], biased(slopes), atol=1e-5)
    np.testing.assert_allclose(names["decoded"][:, 0], biased(slopes)[:, 70], atol=1e-5)
    np.testing.assert_allclose(names["dslopes"], jax.grad(lambda x: biased(x).sum())(slopes), atol=1e-3)


def test_the_table_of_t5_is_a_bias(names: dict[str, Any]) -> None:
    positions = np.arange(names["T"])
    distance = positions[None, :] - positions[:, None]
    far = np.log(np.maximum(np.abs(distance), 1) / np.float32(8)) / np.log(np.float32(8)) * 8
    bucket = np.where(np.abs(distance) < 8, np.abs(distance), np.minimum(8 + far.astype(int), 15)) + 16 * (distance > 0)

    def biased(table: jax.Array) -> jax.Array:
        return with_bias(names, jnp.moveaxis(table[bucket], 2, 0))

    np.testing.assert_allclose(names["with_t5"], biased(names["table"]), atol=1e-5)
    np.testing.assert_allclose(names["dtable"], jax.grad(lambda x: biased(x).sum())(names["table"]), atol=1e-3)


def test_a_cap_and_a_temperature_are_arguments(names: dict[str, Any]) -> None:
    np.testing.assert_allclose(names["soft"], with_bias(names, logits_soft_cap=20.0), atol=1e-5)

    def scaled(x: jax.Array) -> jax.Array:
        return with_query(names, names["q"] * x[None, None, :, None])

    np.testing.assert_allclose(names["warm"], scaled(names["temperature"]), atol=1e-5)
    wanted = jax.grad(lambda x: scaled(x).sum())(names["temperature"])
    np.testing.assert_allclose(names["dtemperature"], wanted, atol=1e-4)


def test_the_table_of_swin_has_a_number_for_two_differences(names: dict[str, Any]) -> None:
    side, x = names["side"], names["windows"]
    at = np.arange(side**2)
    table = np.asarray(names["numbers"]).reshape(2 * side - 1, 2 * side - 1, -1)
    rows, columns = (y[:, None] - y + side - 1 for y in np.divmod(at, side))
    scores = np.einsum("btnh,bsnh->bnts", x, x) / x.shape[-1] ** 0.5 + np.moveaxis(table[rows, columns], 2, 0)
    wanted = np.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=3), x)
    np.testing.assert_allclose(names["local"], wanted, atol=1e-5)
    assert names["dnumbers"].shape == names["numbers"].shape and np.abs(names["dnumbers"]).max() > 0


# By name: what makes the function of a captured array, and the shape of the array; None is no function, but a bias.
FUSED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "alibi": (lambda names, x: {"score_mod": names["alibi"](x), "is_causal": True}, (4,)),
    "t5": (lambda names, x: {"score_mod": names["t5"](x)}, (32, 4)),
    "cap": (lambda names, x: {"score_mod": names["capped"]}, (1,)),
    "temperature": (lambda names, x: {"score_mod": names["with_temperature"](x)}, (4,)),
    "swin": (lambda names, x: {"bias": x[names["offset"]].transpose(2, 0, 1)[None]}, (13**2, 4)),
}


@pytest.mark.parametrize("name", FUSED)
def test_recipes_are_fused_with_their_gradients(
    name: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both passes run kernels, or `implementation="cuda"` would raise."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    make, shape = FUSED[name]
    length = names["side"] ** 2 if name == "swin" else names["T"]
    x = jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16)

    def loss(query: jax.Array, key: jax.Array, captured: jax.Array) -> jax.Array:
        options = make(names, captured)
        return names["attention"](query, key, key, implementation="cuda", **options).astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("standard"):
        text = calls.cuda_text(jax.grad(loss, argnums=(0, 1, 2)), x, x, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert calls.count_launches(text) == 2


def test_masks_are_masks(names: dict[str, Any]) -> None:
    b, q, k = np.ogrid[:2, : names["T"], : names["T"]]
    document, prefix = np.asarray(names["document"]), np.asarray(names["prefix"])
    shown = {
        "prefix-LM": (k <= q) | (k < prefix[:, None, None]),
        "documents and causal": (k <= q) & (document[:, :, None] == document[:, None, :]),
        "sliding window with global tokens": (k <= q) & ((q - k < 16) | (k < 4)) & (b >= 0),
        "dilated window": (k <= q) & (q - k < 64) & ((q - k) % 4 == 0) & (b >= 0),
    }
    assert set(shown) == set(names["masked"])
    for name, mask in shown.items():
        np.testing.assert_allclose(names["masked"][name], with_bias(names, mask=jnp.asarray(mask)[:, None]), atol=1e-5)
    chosen = jnp.repeat(jnp.repeat(names["chosen"], 8, axis=2), 8, axis=3)
    np.testing.assert_allclose(names["sparse"], with_bias(names, mask=chosen), atol=1e-5)


def test_kept_lists_are_those_of_the_function(names: dict[str, Any]) -> None:
    x = names["q"]
    for _ in range(3):
        x = with_query(names, x, is_causal=True, local_window_size=(31, None))
    np.testing.assert_allclose(names["kept"], x, atol=1e-5)


def test_explain_says_what_the_page_says(names: dict[str, Any]) -> None:
    said = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    assert said == [names["found"].note, names["lists"].note]
