# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Features as a compile key holds them: what the host and the tables of configs know of a feature.

A code holds no device value and is made without the compiler. It names the class that a kernel makes of it
(`features/of_launch.py`). The built-in codes are here; a code may be made anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax_fastattn.programs.code import Code as Program
from jax_fastattn.programs.code import Place


@dataclass(frozen=True)
class Code:
    """A feature in a compile key. Its `repr` names it in the cache.

    Attributes:
        name: the feature in words.
        feature: module and class of what kernels make of it, a `Feature`, as "module:Class".
        hooks: which of `HOST_HOOKS` that class has.
        constants: what else is compiled in, hashable.
        operands: name and dtype of each array that it adds to a launch.
        score_nbytes: bytes that it loads to shared memory for each score of a tile.
        registers: registers of a lane that keep its numbers from tile to tile.
        is_placed: whether it asks where a score lies, or for the head of one. Decoding kernels, whose rows have several
            heads, refuse such a feature.
    """

    name: str
    feature: str
    hooks: tuple[str, ...] = ()
    constants: tuple[Any, ...] = ()
    operands: tuple[tuple[str, str], ...] = ()
    score_nbytes: int = 0
    registers: int = 0
    is_placed: bool = True


# The host chooses by these hooks: whether a logit changes, whether by a term alone, whether scores are hidden, and
# whether weights are dropped.
HOST_HOOKS = ("logit", "term", "sees", "keep")


class Cost(NamedTuple):
    """What the features of a launch load and hold. Tables of configs choose rows by it.

    Attributes:
        score_nbytes: bytes in shared memory for each score of a tile.
        key_nbytes: bytes in shared memory for each key of a tile.
        registers: registers of a lane that keep their numbers from tile to tile.
    """

    score_nbytes: int
    key_nbytes: int
    registers: int


# A key has this many bytes in what a bias of keys loads where it is a step of the product q . k.
KEY_PART_NBYTES = 32

_FEATURES = "jax_fastattn.kernels.features"

# The two codes of a soft cap differ in whether the tanh is exact, see `features/softcap.py`.
SOFT_CAP, EXACT_SOFT_CAP = (
    Code("soft cap", f"{_FEATURES}.softcap:SoftCap", ("logit",), constants=(exact,), is_placed=False)
    for exact in (False, True)
)
SINKS = Code("sinks", f"{_FEATURES}.sinks:Sinks", operands=(("sinks", "float32"),), is_placed=False)
# Which weights are kept depends on the place of a score. No logit changes.
DROPOUT = Code("dropout", f"{_FEATURES}.dropout:Dropout", ("keep",), operands=(("dropout", "int32"),), registers=3)
KEY_BIAS = Code("bias of keys", f"{_FEATURES}.bias.keys:KeyBias", ("logit", "term"), registers=2)
# A bias of rows is added to logits that a function takes, else to the maximum of a row.
ROW_BIAS = Code("bias of queries", f"{_FEATURES}.bias.rows:RowBias", ("logit",), registers=2)
ROW_SHIFT = Code("bias of queries", f"{_FEATURES}.bias.rows:RowShift")


def pair_bias(terms: int) -> Code:
    """Returns the code of a bias of pairs, whose terms have 16 bits each."""
    return Code(
        "bias of pairs", f"{_FEATURES}.bias.global_memory:GlobalBias", ("logit", "term"), score_nbytes=2 * terms
    )


# These instructions give the same numbers in the prepass as on the XLA path. A function with another one would count
# other pairs where its last digits decide.
MASK_OPS = frozenset(
    (
        *("const", "plane", "table", "affine", "to_float", "to_int", "stop_gradient", "select"),
        *("add", "sub", "mul", "div", "rem", "neg", "abs", "max", "min", "sign"),
        *("and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt", "ge"),
    )
)

# A CTA of the prepass holds the planes of rows, of keys and of distances of a tile in shared memory, up to this many.
MAX_STAGED_PLANES = 16


def staged_places(places: tuple[Place, ...]) -> tuple[Place, ...]:
    """Returns the planes that a CTA of the prepass holds in shared memory."""
    return tuple(place for place in places if place.plane.kind in ("query", "key", "distance"))


def mask_mod(program: Program, places: tuple[Place, ...], rows: dict[str, int]) -> Code:
    """Returns the code of a mask function, which the prepass evaluates.

    Args:
        program: the function.
        places: where its planes are.
        rows: how many planes, or numbers of tables, each operand has in all.
    """
    dtypes = {place.operand: "float32" if place.plane.dtype == "f" else "int32" for place in places}
    return Code(
        "mask function",
        "jax_fastattn.kernels.prepass.program:MaskProgram",
        constants=(program, places, tuple(sorted((name, rows[name]) for name in dtypes))),
        operands=tuple(sorted(dtypes.items())),
    )
