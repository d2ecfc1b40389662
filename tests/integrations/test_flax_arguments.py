# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Wrong values of `attention_fn`, `bind` and `Packed` raise errors that name the argument; lists are taken."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np
import pytest
from test_explain import BAD
from test_flax import HEADS, QUERIES

from jax_fastattn import attention
from jax_fastattn.integrations.flax import Packed, attention_fn, bind

X = np.ones((2, QUERIES, HEADS, 8), np.float32)
ARGUMENTS = {**inspect.signature(attention_fn).parameters, **inspect.signature(attention).parameters}
ARGUMENTS = [name for name in ARGUMENTS if name != "options"]
# Lists of one, two and three arrays, of which one is too few and three are too many for a pair.
MORE = [(X,), (X, X), (X, X, X), True, "highest"]
BOUNDARIES = [
    [[0, 3, QUERIES]] * 2,
    [[[0, 3, QUERIES]] * 2] * 3,
    ([[0, QUERIES]] * 2, [[0, 3, QUERIES]] * 2),
    ([[]] * 2,) * 2,
]


def error_of(function: Any, *args: Any, **arguments: Any) -> str:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            jax.eval_shape(lambda: function(*args, **arguments))
        except (TypeError, ValueError, NotImplementedError) as error:
            return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_value_names_the_argument(name: str) -> None:
    """Of 640 wrong values 126 named no argument, or one of the function below."""
    good = {"query": X, "key": X, "value": X}
    for bad in (*BAD, *MORE):
        calls = [error_of(attention_fn, **good | {name: bad})]
        if name not in (*good, "mask"):
            calls.append(error_of(lambda bad=bad: bind(**{name: bad})(X, X, X)))
        assert not [text for text in calls if text and f"`{name}`" not in text]


@pytest.mark.parametrize("name", ["segment_ids", "cu_seqlens"])
def test_a_wrong_value_of_packed_names_the_attribute(name: str) -> None:
    found = [error_of(attention_fn, X, X, X, mask=Packed(**{name: bad})) for bad in (*BAD[1:], *MORE, *BOUNDARIES)]
    assert not [text for text in found if text and f"`{name}`" not in text]
    assert sum(text != "" for text in found) > len(BAD) // 2


def test_nested_lists_are_arrays() -> None:
    rows = np.asarray(jax.random.normal(jax.random.key(0), X.shape)).tolist()
    mask = np.tri(QUERIES, dtype=bool)
    want = attention_fn(np.array(rows, np.float32), *[np.array(rows, np.float32)] * 2, mask=mask)
    for function, options in ((attention_fn, {"mask": mask.tolist()}), (bind(is_causal=True), {})):
        found = function(rows, rows, rows, bias=np.zeros((QUERIES, QUERIES), np.float32).tolist(), **options)
        np.testing.assert_allclose(found, want, atol=1e-6)
    ids = [[1, 1, 1, 2, 2, 3, 3]] * 2
    boundaries = [[0, 3, 5, 7]] * 2
    found = [
        attention_fn(rows, rows, rows, mask=packed)
        for packed in (Packed(segment_ids=(ids, ids)), Packed(cu_seqlens=(boundaries, boundaries)))
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
