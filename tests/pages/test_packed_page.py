# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The code of docs/packed.md runs as it stands, and means what the page says."""

import re
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the code of the page defines."""
    page = (Path(__file__).parents[2] / "docs" / "packed.md").read_text()
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        # flax 0.12.0 looks up two names while it is imported that jax 0.8.0 deprecates.
        warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
        import flax.nnx  # noqa: F401 (the page imports it again, without a warning)
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), found)
    return found


def test_documents_are_attended_to_one_by_one(names: dict[str, Any]) -> None:
    q, k, v = names["project"](names["tokens"])
    for begin, end in ((0, 70), (70, 73), (73, 114)):
        alone = names["attention"](*(x[begin:end] for x in (q, k, v)), is_causal=True)
        np.testing.assert_allclose(names["out"][begin:end], alone, atol=1e-5)
    np.testing.assert_allclose(names["padded_out"][:114], names["out"], atol=1e-5)
    assert not names["padded_out"][114:].any()


def test_rows_know_their_documents(names: dict[str, Any]) -> None:
    lengths = (70, 3, 41)
    np.testing.assert_array_equal(names["document"][:114], np.repeat([0, 1, 2], lengths))
    np.testing.assert_array_equal(names["position"][:114], np.concatenate([np.arange(n) for n in lengths]))
    np.testing.assert_array_equal(np.flatnonzero(~names["has_next"]), [69, 72, *range(113, 128)])
    _, _, has_next = names["describe"](np.array([0, 5]), 5)
    assert has_next.tolist() == [True] * 4 + [False]


def test_boundaries_mean_what_segment_ids_mean(names: dict[str, Any]) -> None:
    arrays = [names[name] for name in "qkv"]
    expected = names["attention"](*arrays, segment_ids=names["segment_ids"], is_causal=True)
    np.testing.assert_allclose(names["out_of_rows"], expected, atol=1e-5)
    ids = names["segment_ids"][0]
    assert names["boundaries"](ids, 5).tolist() == [0, 50, 80, 120, 128, 128]
    assert names["boundaries"](ids, 2).tolist() == [0, 50, 80]
    assert names["boundaries_without_padding"](ids, 5).tolist() == [0, 50, 80, 120, 120, 120]
    step = jax.jit(names["boundaries"], static_argnums=1)
    assert step(names["segment_ids"][1], 2).tolist() == [0, 128, 128]


def test_a_module_of_flax_attends_inside_segments(names: dict[str, Any]) -> None:
    ids, layer, x = names["segment_ids"], names["layer"], names["x"]
    packed = names["Packed"](segment_ids=ids)
    np.testing.assert_allclose(names["out_of_layer"], layer(x, mask=packed), atol=1e-5)
    row = layer(x[:1, 50:80])
    np.testing.assert_allclose(names["out_of_layer"][:1, 50:80], row, atol=1e-5)
