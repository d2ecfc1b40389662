# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""One compiled program for each signature of an eager call, which JAX otherwise runs operation by operation.

A signature has what the program may depend on:

- the function, and which arguments are plain values, with their values and types: the key of `_program`;
- shapes, dtypes, weak types and shardings of the arrays, and all settings and contexts of JAX that a trace reads, such
  as x64, the precision of products, the default device, the mesh and `target_arch`: `jax.jit` tells these apart.

Other calls run as they are: a call inside a transformation, whose program is the caller's; a call with NumPy arrays,
lists or other objects that may change; a call with a `score_mod` or `mask_mod`, since captured values may change, too;
and a call under `debug_nans`, `debug_infs` or `debug_key_reuse`. Under `disable_jit`, `jax.jit` itself runs the
function as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import numpy as np

from jax_fastattn import _compat
from jax_fastattn.ops import call_sites

# A new scale is a new program, and so is each other set of plain values.
KEPT_PROGRAMS = 256

# Values of these types and NumPy's numbers never change. Equal ones of other types may be errors: `1 == True`.
_PLAIN = frozenset((bool, int, float, str, type(None)))


def call(function: Callable[..., Any], operands: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Calls a function, by a compiled program of its own if the call is eager.

    Args:
        function: it takes operands and options as keywords.
        operands: the arguments that may be arrays, or pairs of arrays.
        options: the arguments that are static.
    """
    if _compat.runs_at_once():
        arrays: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        kinds: list[object] = []
        for name, x in operands.items():
            if _is_known(x):
                arrays[name] = x
            elif name == "query_offset" and _is_position(x):
                arrays[name] = np.int32(x)
            elif name == "dropout_rate" and _is_rate(x):
                arrays[name] = np.float32(x)
            elif kind := _kind(x):
                plain[name] = x
                kinds.append(kind)
        for name, x in options.items():
            if kind := _kind(x):
                plain[name] = x
                kinds.append(kind)
        if len(arrays) + len(plain) == len(operands) + len(options):
            program = _program(function, tuple(plain), tuple(plain.values()), tuple(kinds))
            # An error of a trace has frames and words of JAX in it: the call below raises the same error without them.
            try:
                return call_sites.calling(program, arrays)
            except (TypeError, ValueError, NotImplementedError):
                pass
    return function(**operands, **options)


def _is_known(x: Any) -> bool:
    """Returns whether `x` is a JAX array that is not traced, or a tuple of such arrays."""
    if x is None:  # asking whether it is a `jax.Array` takes longer
        return False
    if type(x) is tuple:
        return len(x) > 0 and all(map(_is_known, x))
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_position(x: Any) -> bool:
    """Returns whether `x` is an offset that may change from token to token. It is data then; an offset of 0 is none."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and bool(x) and -(2**31) <= int(x) < 2**31


def _is_rate(x: Any) -> bool:
    """Returns whether `x` is a rate that may change from call to call. It is data then; a rate of 0 is no dropout."""
    return isinstance(x, (int, float, np.floating)) and not isinstance(x, bool) and bool(0 < x <= 1)


def _kind(x: Any) -> object:
    """Returns the type of a plain value, or the types of a tuple of them; None for anything else."""
    kind = type(x)
    if kind in _PLAIN or issubclass(kind, (np.number, np.bool_)):
        return kind
    if kind is tuple and None not in (kinds := tuple(map(_kind, x))):
        return kinds
    return None


@functools.lru_cache(KEPT_PROGRAMS)
def _program(
    function: Callable[..., Any], names: tuple[str, ...], values: tuple[Any, ...], kinds: tuple[object, ...]
) -> Callable[..., Any]:
    del kinds  # these tell calls apart that have equal values
    return jax.jit(functools.partial(function, **dict(zip(names, values, strict=True))))
