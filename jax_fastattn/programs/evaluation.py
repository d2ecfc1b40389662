# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a code computes, in JAX: of single numbers, or of arrays of pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fastattn.programs.code import Code, parsed


def evaluate_code(code: Code, leaves: Mapping[str, Any], planes: Sequence[Any], count: int | None = None) -> list[Any]:
    """Returns the first `count` results (None is all) of a code, of numbers or of arrays that broadcast.

    Args:
        code: what is evaluated.
        leaves: "query" and "key", and "score" of a score function.
        planes: each plane where it is read; of a table, a function from an index to numbers.
        count: how many results.
    """
    floats = leaves["score"].dtype if "score" in leaves else jnp.float32
    dtypes = {"f": floats, "i": jnp.int32, "b": jnp.bool_}
    values: list[Any] = [None] * len(code.instructions)
    results = code.results[:count]
    for i in sorted(code.needed(results)):
        op, *operands = code.instructions[i]
        if op == "score":
            values[i] = leaves["score"]
        elif op == "const":
            values[i] = np.asarray(parsed(code.dtypes[i], operands[0]), dtypes[code.dtypes[i]])
        elif op == "plane":
            values[i] = planes[operands[0]]
        elif op == "table":
            values[i] = planes[operands[0]](values[operands[1]])
        elif op == "affine":
            a, b, c = (np.int32(x) for x in operands)
            values[i] = a * leaves["query"] + b * leaves["key"] + c
        elif op == "to_float":
            values[i] = values[operands[0]].astype(floats)
        else:
            values[i] = _APPLY[op](*_same_shape([values[x] for x in operands]))
    return [None if x < 0 else values[x] for x in results]


def _same_shape(values: list[Any]) -> list[Any]:
    shape = jnp.broadcast_shapes(*(np.shape(x) for x in values))
    return [x if np.shape(x) == shape else jnp.broadcast_to(x, shape) for x in values]


_APPLY: dict[str, Callable[..., Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "rem": lax.rem,
    "neg": lax.neg,
    "abs": lax.abs,
    "max": lax.max,
    "min": lax.min,
    "sign": lax.sign,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "log": lax.log,
    "log1p": lax.log1p,
    "tanh": lax.tanh,
    "logistic": lax.logistic,
    "sqrt": lax.sqrt,
    "rsqrt": lax.rsqrt,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lax.bitwise_not,
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
    "select": lax.select_n,
    "stop_gradient": lax.stop_gradient,
    "to_int": lambda x: lax.convert_element_type(x, jnp.int32),
}
OPS = frozenset(_APPLY)
