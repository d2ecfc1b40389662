# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`attention` takes each kind of argument that `jax.nn.dot_product_attention` takes, except for those listed here.

The table of differences in docs/semantics.md has a row for each argument with an exception.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention

PAGE = Path(__file__).parents[1] / "docs" / "semantics.md"
JAX_NN = inspect.signature(jax.nn.dot_product_attention).parameters
QKV = {"query": np.ones((2, 5, 6, 8)), "key": np.ones((2, 7, 3, 8)), "value": np.ones((2, 7, 3, 8))}
# With a mask, since jax.nn of jax 0.8 ignores a window without one.
GOOD = {name: x.astype(np.float32) for name, x in QKV.items()} | {"mask": np.ones((2, 6, 5, 7), bool)}

DTYPES = ("bool", "int8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64")


def arrays(*shape: int, dtype: str) -> dict[str, Any]:
    """Arrays of every dtype, and one dtype in other shapes and kinds of arrays."""
    x = np.ones(shape, dtype)
    found: dict[str, Any] = {name: jnp.ones(shape, name) for name in DTYPES}
    found |= {"NumPy": x, "list": x.tolist(), "shape ()": x.flat[0], "one axis less": x[0], "one axis more": x[None]}
    return found | {"None": None, "text": "text", "object": object()}


def all_three(change: Callable[[str, np.ndarray], Any]) -> dict[str, Any]:
    return {name: change(name, x) for name, x in QKV.items()}


PLANES = {
    "bfloat16 [S]": jnp.ones(7, "bfloat16"),
    "bool [S]": jnp.ones(7, bool),
    "[4, 1, T, S]": jnp.ones((4, 1, 5, 7)),
}
SCALARS: dict[str, Any] = {
    "True": True, "np.bool_": np.bool_(True), "jnp.bool_": jnp.bool_(True),
    "0": 0, "1": 1, "2": 2, "-1": -1, "1.0": 1.0, "0.3": 0.3, "1j": 1j, "nan": float("nan"), "inf": float("inf"),
    "1e300": 1e300, "np.int8": np.int8(1), "np.float32": np.float32(0.3), "jnp.int32": jnp.int32(1),
    "jnp.float32": jnp.float32(0.3), "np.array(0.3)": np.array(0.3), "[0.3]": [0.3], "np.array([0.3])": np.array([0.3]),
    "jnp.ones(1)": jnp.ones(1), "jnp.ones([T, S])": jnp.ones((5, 7)), "jnp.ones(2)": jnp.ones(2),
    "(3, 0)": (3, 0), "[3, 0]": [3, 0], "np.array([3, 0])": np.array([3, 0]), "jnp.array([3, 0])": jnp.array([3, 0]),
    "(jnp.int32, 2)": (jnp.int32(1), 2), "(3, None)": (3, None), "(-1, 2)": (-1, 2), "(1.5, 2)": (1.5, 2),
    "(True, 2)": (True, 2), "range": range(2), "(1, 2, 3)": (1, 2, 3), "{1: 2, 3: 4}": {1: 2, 3: 4},
    "None": None, "text": "text", '""': "", "b'1'": b"1", "[]": [], "{}": {}, "object": object(),
    "xla": "xla", "cuda": "cuda",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "query": arrays(2, 5, 6, 8, dtype="float32"),
    "key": arrays(2, 7, 3, 8, dtype="float32"),
    "value": arrays(2, 7, 3, 8, dtype="float32") | {"other head dim": jnp.ones((2, 7, 3, 4))},
    "bias": arrays(2, 6, 5, 7, dtype="float32") | PLANES | {"[B, K, T, S]": jnp.ones((2, 3, 5, 7))},
    "mask": arrays(2, 6, 5, 7, dtype="bool") | PLANES | {"[B, K, T, S]": jnp.ones((2, 3, 5, 7), bool)},
    "query_seq_lengths": arrays(2, dtype="int32"),
    "key_value_seq_lengths": arrays(2, dtype="int32"),
    **{name: SCALARS for name in ("scale", "is_causal", "local_window_size", "implementation", "return_residual")},
}
# Kinds of all three operands.
TOGETHER = {
    "query": {
        **{f"{dtype} of all": all_three(lambda name, x, dtype=dtype: jnp.ones(x.shape, dtype)) for dtype in DTYPES},
        "no batch axis": {name: x[0] for name, x in GOOD.items()},
        "no batch axis of key and value": {"query": GOOD["query"][:1], "mask": None}
        | {x: GOOD[x][0] for x in QKV if x != "query"},
        "no length": {name: x[0, 0] for name, x in GOOD.items() if name != "mask"} | {"mask": None},
    }
}

# Of flags: kinds with a truth value that are no flags.
_TRUTH = {name for name in SCALARS if name not in ("True", "np.bool_", "jnp.bool_", "0", "1", "np.int8", "jnp.int32")}
_INTEGERS = {"int8", "uint32"}
# What `jax.nn` takes and `attention` refuses, by argument.
ONLY_JAX_NN: dict[str, set[str]] = {
    "query": {
        "bool of all",
        "int8 of all",
        "int32 of all",
        "uint32 of all",
        "complex64 of all",
        "no batch axis of key and value",
        "no length",
    },
    "bias": {"bool", "int8", "int32", "uint32", "complex64", "bool [S]"},
    "scale": {"True", "np.bool_", "jnp.bool_", "1j", "nan", "inf", "1e300", "b'1'"}
    | {"[0.3]", "np.array([0.3])", "jnp.ones(1)", "jnp.ones([T, S])"},
    "is_causal": _TRUTH,
    "return_residual": _TRUTH,
    "local_window_size": {"True", "-1", "(-1, 2)", "(1.5, 2)", "(True, 2)", "range", "{1: 2, 3: 4}", "jnp.ones(2)"},
}
# The reverse.
ONLY_OURS: dict[str, set[str]] = {
    "value": {"other head dim"},
    "bias": {"[B, K, T, S]"},
    "mask": {"[B, K, T, S]"},
    "query_seq_lengths": _INTEGERS,
    "key_value_seq_lengths": _INTEGERS,
    "local_window_size": {"np.int8", "jnp.int32", "(3, None)"},
    "implementation": {"cuda"},
}


def result_of(function: Any, changes: dict[str, Any]) -> Any:
    """Shapes and dtypes of what a call returns; None if it raises."""
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jax.eval_shape(lambda: function(**GOOD | changes))
    except Exception:
        return None


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("argument", KINDS)
def test_takes_each_kind_that_jax_nn_takes(argument: str) -> None:
    if argument not in JAX_NN:
        pytest.skip(f"this jax.nn has no {argument}")
    changes = {kind: {argument: x} for kind, x in KINDS[argument].items()} | TOGETHER.get(argument, {})
    theirs, ours = (
        {kind: result_of(function, change) for kind, change in changes.items()}
        for function in (jax.nn.dot_product_attention, attention)
    )
    only_theirs = {kind for kind in changes if ours[kind] is None and theirs[kind] is not None}
    assert only_theirs <= ONLY_JAX_NN.get(argument, set())
    assert {kind for kind in changes if theirs[kind] is None and ours[kind] is not None} <= ONLY_OURS.get(
        argument, set()
    )
    assert not any(ours.get(kind) for kind in ONLY_JAX_NN.get(argument, ()))
    assert all(ours[kind] for kind in ONLY_OURS.get(argument, ()))
    both = [kind for kind in changes if ours[kind] is not None and theirs[kind] is not None]
    assert both
    for kind in both:
        assert [x.shape for x in jax.tree.leaves(ours[kind])] == [x.shape for x in jax.tree.leaves(theirs[kind])], kind


def test_the_page_has_a_row_for_each_argument_that_differs() -> None:
    _, _, table = PAGE.read_text().partition("## Differences from `jax.nn.dot_product_attention`")
    rows = re.findall(r"^\| (.*?) \|", table.partition("\n## ")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named >= ONLY_JAX_NN.keys() | ONLY_OURS.keys()


def test_every_argument_of_jax_nn_has_kinds() -> None:
    assert set(JAX_NN) <= KINDS.keys()
