# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Features as a compile key holds them: what the host and the tables of configs know of a feature.

A code holds no device value and is made without the compiler. It names the class that a kernel makes of it
(`features/of_launch.py`). The built-in codes are here; a code may be made anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jax_fastattn.programs import analysis
from jax_fastattn.programs.code import Code as Program
from jax_fastattn.programs.code import HasPlanes, Place, places


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
            heads, refuse such a feature, unless it has an instance for each row.
        has_rows: whether a decoding kernel makes an instance of it for each of a lane's two rows, which have a query
            and a head of their own each. It may then have the hooks `start`, `read` and `logit`.
        is_steep: whether the derivative of its logit by the score may be greater than 1, or negative.
    """

    name: str
    feature: str
    hooks: tuple[str, ...] = ()
    constants: tuple[Any, ...] = ()
    operands: tuple[tuple[str, str], ...] = ()
    score_nbytes: int = 0
    registers: int = 0
    is_placed: bool = True
    has_rows: bool = False
    is_steep: bool = False


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


def mask_function(score_mod: HasPlanes | None, program: object) -> tuple[Code, ...]:
    """Returns the feature of the prepass that evaluates a mask function; none without one.

    Args:
        score_mod: the score function of the call, whose planes come first in their operands.
        program: the mask function.
    """
    if not isinstance(program, Program):
        return ()
    of_score, of_mask = places((score_mod, program))
    rows: dict[str, int] = {}
    for place in (*of_score, *of_mask):
        rows[place.operand] = rows.get(place.operand, 0) + max(place.plane.length, 1)
    operands = _plane_operands(tuple(of_mask))
    constants = program, tuple(of_mask), tuple(sorted((name, rows[name]) for name, _ in operands))
    feature = "jax_fastattn.kernels.prepass.program:MaskProgram"
    return (Code("mask function", feature, constants=constants, operands=operands),)


# A mask function whose instructions are among these has the same value in an attention kernel as in the prepass: floats
# are only compared there.
_EXACT_OPS = frozenset(("const", "plane", "stop_gradient", "select"))


def evaluates_edges(program: object) -> bool:
    """Returns whether attention kernels can evaluate a mask function: it reads no table, and computes no float."""
    if not isinstance(program, Program):
        return False
    found = zip(program.instructions, program.dtypes, strict=True)
    return all(op in (_EXACT_OPS if dtype == "f" else SCORE_OPS) for (op, *_), dtype in found)


def tells_documents_apart(program: object) -> bool:
    """Returns whether a mask function hides all pairs whose query and key differ in a number of each."""
    return isinstance(program, Program) and analysis.needs_equal_numbers(program)


def edge_function(program: object, shapes: tuple[tuple[str, int, int], ...]) -> tuple[Code, ...]:
    """Returns the feature that evaluates a mask function in edge tiles of lists, see `evaluates_edges`.

    Args:
        program: the function, of a call without a score function.
        shapes: name, b and n of each operand that has its planes.
    """
    assert isinstance(program, Program)
    parts = _parts(program, shapes, exact=True)
    operands = _plane_operands(parts.places)
    return (Code("mask function", f"{_FEATURES}.program.mask:EdgeProgram", ("sees",), (parts,), operands),)


def _plane_operands(found: tuple[Place, ...]) -> tuple[tuple[str, str], ...]:
    """Returns name and dtype of each operand with planes."""
    dtypes = {place.operand: "float32" if place.plane.dtype == "f" else "int32" for place in found}
    return tuple(sorted(dtypes.items()))


# Planes of queries, keys and distances have this many zeros at their ends, so that all rows of a tile find a number.
PLANE_PADDING = 256

# Kernels have these instructions of scores.
SCORE_OPS = MASK_OPS - {"table"} | frozenset(
    ("score", "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sqrt", "rsqrt")
)


# A term of a score function counts as this many registers of a lane, and as the second number if it reads planes of
# queries, keys or distances.
TERM_REGISTERS, READING_REGISTERS = 3, 6


class PlaneOperand(NamedTuple):
    """An operand with planes of a score function.

    Attributes:
        name: see `spec.Operands`.
        planes: how many.
        per_batch, per_head: whether batch entries or query heads have their own.
    """

    name: str
    planes: int
    per_batch: bool
    per_head: bool


@dataclass(frozen=True)
class ScoreParts:
    """What a compile key holds of a score function, or of a mask function that attention kernels evaluate.

    Attributes:
        code: the function.
        places: where each of its planes is.
        plane_operands: the operands with these planes.
        exact: whether the tanh of a score is exact, see `features/softcap.py`.
    """

    code: Program
    places: tuple[Place, ...]
    plane_operands: tuple[PlaneOperand, ...]
    exact: bool

    @cached_property
    def operands(self) -> dict[str, PlaneOperand]:
        """The operands by name."""
        return {x.name: x for x in self.plane_operands}

    @cached_property
    def depends(self) -> list[frozenset[str]]:
        """What each value depends on, see `analysis.depends`."""
        return analysis.depends(self.code)

    @property
    def reads_none(self) -> bool:
        """Whether there are no planes except for numbers of heads."""
        return all(place.plane.kind == "head" for place in self.places)

    @property
    def head_values(self) -> list[int]:
        """The values that the head alone decides."""
        return [i for i, depends in enumerate(self.depends) if not depends]

    @cached_property
    def terms(self) -> list[tuple[int, int]]:
        """Sign and value of each term of a function that adds them; none of another one."""
        return analysis.terms(self.code) or []

    @cached_property
    def makes_planes_finite(self) -> bool:
        """Whether a backward launch gets numbers of planes that are finite.

        A row that sees a NaN has a log-sum-exp of NaN, which is enough.
        """
        return analysis.keeps_nan(self.code)

    def is_tame(self, result: int, *, finite_score: bool, packed: bool) -> bool:
        """Returns whether a result is a finite number in the backward pass, even for a row past the end.

        Args:
            result: which one.
            finite_score: see `analysis.is_tame`. A row past the end may have the bias of another row.
            packed: whether rows past the end have the numbers of another packed sequence. Sums and products of numbers
                that nobody sees may overflow, where those past the end of an array are 0.
        """
        finite_planes = self.makes_planes_finite and not packed
        results = self.code.results[result : result + 1]
        return analysis.is_tame(self.code, results, finite_planes=finite_planes, finite_score=finite_score)

    @property
    def slope_is_one(self) -> bool:
        """Whether the derivative by the score is 1."""
        return self.code.instructions[self.code.results[1]] == ("const", "1.0")

    @cached_property
    def factored(self) -> tuple[int, float | None]:
        """The value that a last product with a known positive number multiplies, and that number; else None for it."""
        result = self.code.results[0]
        op, *args = self.code.instructions[result]
        for x, y in (args, args[::-1]) if op == "mul" else ():
            if analysis.is_number(self.code, y) and (number := float(self.code.instructions[y][1])) > 0:
                return x, number
        return result, None


def score_parts(features: Sequence[Code]) -> ScoreParts | None:
    """Returns what the features of a compile key hold of a score function; None without one."""
    return plane_parts([code for code in features if "logit" in code.hooks])


def plane_parts(features: Sequence[Code]) -> ScoreParts | None:
    """Returns what the features of a compile key hold of the one function that has planes; None without one."""
    found = [x for code in features for x in code.constants if isinstance(x, ScoreParts)]
    return found[0] if found else None


def score_function(program: object, shapes: tuple[tuple[str, int, int], ...], *, exact: bool) -> tuple[Code, ...]:
    """Returns the feature that evaluates a score function; none without one, or if it has no code.

    Args:
        program: the function.
        shapes: name, b and n of each operand that has its planes.
        exact: see `ScoreParts`.
    """
    if not isinstance(program, Program):
        return ()
    parts = _parts(program, shapes, exact=exact)
    name = "ShiftedProgram" if parts.factored[1] is None else "ScoreProgram"
    name, hooks = ("TermProgram", ("logit", "term")) if parts.terms else (name, ("logit",))
    feature = f"{_FEATURES}.program.score:{name}"
    registers = 0 if not parts.terms else TERM_REGISTERS if parts.reads_none else READING_REGISTERS
    operands = _plane_operands(parts.places)
    costs = {"registers": registers, "is_steep": not parts.slope_is_one}
    return (Code("score function", feature, hooks, (parts,), operands, has_rows=True, **costs),)


def _parts(program: Program, shapes: tuple[tuple[str, int, int], ...], *, exact: bool) -> ScoreParts:
    found = tuple(places((program,))[0])
    operands = [
        PlaneOperand(name, sum(place.operand == name for place in found), batch > 1, heads > 1)
        for name, batch, heads in shapes
    ]
    return ScoreParts(program, found, tuple(operands), exact)
