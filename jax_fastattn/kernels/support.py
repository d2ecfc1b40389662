# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The problems that the CUDA kernels take; dispatch, error texts, test skips and docs/support.md all read this."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from jax_fastattn.kernels.architectures import ARCHITECTURES, BORROWED, UNTIMED, shared_memory_limit
from jax_fastattn.kernels.arguments.precision import NARROW_HEAD_DIM, PRODUCTS_IN_WORDS, forbids_tf32, products_of, rule
from jax_fastattn.kernels.bias_shapes import bias_kind
from jax_fastattn.kernels.choose import (
    forward_spec,
    has_few_queries,
    is_listed,
    kernel_spec,
    list_sizes,
    prepass_configs,
    takes_terms,
)
from jax_fastattn.kernels.codes import MASK_OPS, MAX_STAGED_PLANES, SCORE_OPS, score_function, staged_places
from jax_fastattn.kernels.sm90.geometry import split_obstacle
from jax_fastattn.kernels.tiles.lists import MAX_BITS_NBYTES, MAX_TILES, has_too_many_bits
from jax_fastattn.layouts.packed_masks import problem_by_rows
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.programs.analysis import is_wild, terms
from jax_fastattn.programs.code import Code, Place, places
from jax_fastattn.programs.function import Program
from jax_fastattn.spec import Problem, is_known

DTYPES = ("bfloat16", "float16", "float32")
MAX_HEAD_DIM = 256
# Of tangents.
MAX_TANGENT_HEAD_DIM = 128
# With three bfloat16 products, GPUs with less shared memory for a CTA take head dims up to `NARROW_HEAD_DIM`.
_WIDE_NBYTES = 128 << 10

# Only dispatch finds reasons of the first line.
# fmt: off
Kind = Literal[
    "implementation", "empty", "platform", "installation", "derivative",
    "architecture", "dtype", "precision", "few_queries", "head_dim", "symbolic", "length", "score_mod", "mask_mod",
    "dropout", "captured",
]
# fmt: on


@dataclass(frozen=True)
class Reason:
    """One reason why no CUDA kernel runs a call.

    Attributes:
        kind: the kind of obstacle, for code that tells reasons apart.
        text: the obstacle in words.
        remedy: what to do instead; empty if no argument can remove the reason, or if the text says it.
    """

    kind: Kind
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.remedy})" if self.remedy else self.text


_REMEDIES: dict[Kind, str] = {
    "dtype": "cast query, key and value to bfloat16",
    "precision": 'set `jax.default_matmul_precision` to "default", or cast query, key and value to bfloat16',
    "few_queries": "cast query, key and value to bfloat16",
    "dropout": 'pass `implementation="xla"`, or `dropout_rate=0.0`',
    "symbolic": 'export one program for each set of sizes, or pass `implementation="xla"`',
}


def _remedy(kind: Kind) -> str:
    if kind == "precision" and forbids_tf32():
        return "unset NVIDIA_TF32_OVERRIDE, or cast query, key and value to bfloat16"
    return _REMEDIES.get(kind, "")


# A word of dropout is drawn for rows of a block of this many, see `dropout.py`.
WORD_ROWS = 16

# Tiles of this many queries, or of a divisor, have no rows past the end.
_QUERIES = 128

# Lists have numbers for all tiles up to this length; tiles have at least 32 rows.
MAX_LISTED_LENGTH = 32 * MAX_TILES


def unsupported_reasons(problem: Problem, arch: str | None) -> list[Reason]:
    """Returns every reason why no CUDA kernel can run `problem` on `arch`; none when one can.

    Args:
        arch: the architecture; None if it is not known.
    """
    packed, problem = problem, problem_by_rows(problem)
    symbolic = problem.symbolic_sizes
    longest = max(size for size in (0, problem.query_length, problem.key_length) if is_known(size))
    is_known_arch, head_dims = arch in ARCHITECTURES + BORROWED, (problem.head_dim, problem.v_head_dim)
    most, where = _max_head_dim(problem, arch if is_known_arch else None)
    checks: list[tuple[bool, Kind, str]] = [
        (
            is_known_arch,
            "architecture",
            f"the GPU architecture is {arch}; the kernels run on {', '.join(ARCHITECTURES)}",
        ),
        (problem.dtype in DTYPES, "dtype", f"the dtype is {problem.dtype}; the kernels take {', '.join(DTYPES)}"),
        (
            problem.dtype not in DTYPES or products_of(problem.dtype, problem.spec.precision) is not None,
            "precision",
            f'the precision of float32 products is "{problem.spec.precision}", since {rule(problem.spec.precision)}; '
            f"the kernels have {' or '.join(PRODUCTS_IN_WORDS.values())}",
        ),
        *(
            (size <= most, "head_dim", f"`{name}` has head dim {size}; the kernels take at most {most}{where}")
            for name, size in zip(("query", "value"), head_dims, strict=True)
        ),
        (
            problem.dtype != "float32" or bool(symbolic) or not has_few_queries(problem),
            "few_queries",
            "there are few queries in float32; to convert the keys moves more bytes than to read them",
        ),
        (not symbolic, "symbolic", f"sizes are symbolic: {', '.join(symbolic)}"),
        (longest <= UNBOUNDED, "length", f"a length is {longest}; the kernels take at most {UNBOUNDED}"),
        (
            not is_listed(problem) or longest <= MAX_LISTED_LENGTH,
            "length",
            f"a length is {longest}; with a mask or segment ids the kernels take at most {MAX_LISTED_LENGTH}",
        ),
    ]
    if "dropout" in problem.spec.present:
        checks += _dropout_checks(problem)
    found = [Reason(kind, text, _remedy(kind)) for is_met, kind, text in checks if not is_met]
    found += [Reason("score_mod", *why) for why in _score_mod_reasons(packed, longest)]
    found += [Reason("mask_mod", *why) for why in _mask_mod_reasons(packed)]
    if problem.spec.mask_mod is not None and arch and not found and not _mask_mod_bits_fit(problem, arch):
        text = f"the bits of `mask_mod` would take more than {MAX_BITS_NBYTES >> 20} MiB in a pass"
        found.append(Reason("mask_mod", text, _FEWER_BITS))
    return found


def _mask_mod_bits_fit(problem: Problem, arch: str) -> bool:
    """Returns whether the bits of a mask function take at most `MAX_BITS_NBYTES` in each prepass of both passes.

    Where edge tiles evaluate the function, it has none.
    """
    has_bias = problem.bias_shape is not None
    kernels = [forward_spec(problem, arch), kernel_spec(problem, "backward", arch, dbias=has_bias)]
    configs = [config for kernel in kernels for config in prepass_configs(kernel)]
    return not any(has_too_many_bits(config, list_sizes(problem, config)) for config in configs)


def _dropout_checks(problem: Problem) -> list[tuple[bool, Kind, str]]:
    """Returns what dropout needs, as a row of checks each."""
    lengths = problem.query_length, problem.key_length
    known = problem.spec.is_part and all(is_known(size) for size in lengths)
    return [
        (
            not known or not any(size % WORD_ROWS for size in lengths),
            "dropout",
            f"a block of a ring has {lengths[0]} queries and {lengths[1]} keys; with dropout the kernels take "
            f"multiples of {WORD_ROWS}",
        ),
    ]


_FEWER_BITS = (
    "kernels need no bits of segment ids, lengths and windows, nor of a function without a `score_mod` beside it that "
    "computes with integers and reads no array by query and key together; one that reads neither `b` nor `h` has "
    "bits of one entry and head"
)


def _score_mod_reasons(problem: Problem, longest: int) -> list[tuple[str, str]]:
    """Returns why no kernel evaluates a score function, each with the remedy."""
    program = problem.spec.score_mod
    if program is None:
        return []
    if not isinstance(program, Code):
        return [(f"`score_mod` has no code, because {program.reason}", "or pass an array as `bias`")]
    found: list[tuple[str, str]] = []
    if longest > MAX_LISTED_LENGTH:
        text = f"a length is {longest}; with a `score_mod` the kernels take at most {MAX_LISTED_LENGTH}"
        found.append((text, 'pass `implementation="xla"`'))
    if unknown := sorted({op for op, *_ in program.instructions} - SCORE_OPS):
        text = f"`score_mod` computes {', '.join(f'`{op}`' for op in unknown)}, which has no instruction in the kernels"
        found.append((text, "compute it ahead of the call"))
    if problem.num_sequences and is_wild(program):
        text = "`score_mod` may be no number past the last query of a packed sequence"
        found.append((text, 'pass `implementation="xla"`'))
    elif is_known(problem.query_length) and problem.query_length % _QUERIES and is_wild(program):
        text = (
            f"`score_mod` may be no number past the last query, and {_QUERIES} does not divide {problem.query_length}"
        )
        found.append((text, f"pad the queries to a multiple of {_QUERIES}, and pass `query_seq_lengths`"))
    return found


def gradient_reasons(problem: Problem, wanted: Collection[str]) -> list[Reason]:
    """Returns every reason why no CUDA kernel computes gradients of operands that are wanted, if it runs the call."""
    return _captured_reasons(problem, wanted) + (_steep_reasons(problem) if wanted else [])


def tangent_reasons(problem: Problem, arch: str) -> list[Reason]:
    """Returns every reason why no CUDA kernel computes tangents of a call that the kernels run on `arch`."""
    spec, head_dims = problem.spec, (problem.head_dim, problem.v_head_dim)
    is_split = problem.dtype == "float32" and shared_memory_limit(arch) < _WIDE_NBYTES
    most = 64 if is_split else MAX_TANGENT_HEAD_DIM
    where = f" in float32 with {shared_memory_limit(arch) // 1024} KB of shared memory" if is_split else ""
    checks = (
        (problem.dtype != "float16", "operands are float16"),
        (max(head_dims) <= most, f"a head dim is {max(head_dims)}, over {most}{where}"),
        (problem.bias_shape is None, "there is a bias"),
        (spec.score_mod is None, "there is a `score_mod`"),
        ("dropout" not in spec.present, "there is dropout"),
    )
    return [Reason("derivative", text) for is_met, text in checks if not is_met]


def _steep_reasons(problem: Problem) -> list[Reason]:
    """Returns why a score function has no gradients in float16: P times its slope may be infinite there."""
    score = score_function(problem.spec.score_mod, problem.planes, exact=True)
    if problem.dtype != "float16" or not any(code.is_steep for code in score):
        return []
    text = "the derivative of `score_mod` by the score is not 1, and weights times it may be infinite in float16"
    return [Reason("score_mod", text, "cast query, key and value to bfloat16")]


def _captured_reasons(problem: Problem, wanted: Collection[str]) -> list[Reason]:
    """Returns why no kernel computes gradients of captured arrays."""
    found = _wanted_planes(problem, wanted)
    if not found:
        return []
    words = {"head": "heads", "query": "queries", "key": "keys", "distance": "distances", "table": "pairs"}
    number, kinds = found[0][0], {place.plane.kind for _, place in found}
    bias, text, numbers = problem.bias_shape, "", f"numbers of {' and '.join(sorted(words[kind] for kind in kinds))}"
    if len(found) > 1:
        text = f"{len(found)} planes, {numbers}"
    elif kinds == {"table"}:
        text = numbers
    elif problem.num_sequences and "dropout" in problem.spec.present:
        text = f"{numbers} of packed sequences next to dropout"
    elif problem.num_sequences and _is_long(problem):
        text = f"{numbers} of packed sequences with more than {MAX_LISTED_LENGTH} rows in one order"
    elif problem.num_sequences and _has_many_bits(problem):
        text = f"{numbers} of packed sequences, of which bits would take more than {MAX_BITS_NBYTES >> 20} MiB"
    elif kinds == {"key"} and not _is_one(problem.spec.score_mod, number):
        text = f"{numbers} that are not just added to the score"
    elif bias is not None and "bias" in wanted:
        text = f"{numbers} together with the gradient of a bias"
    elif bias is not None and kinds != {"key"} and bias_kind(bias) == "matrix":
        text = f"{numbers} next to a bias of pairs"
    prefix = "no kernel computes gradients of arrays that `score_mod` captures, for "
    remedy = 'pass `implementation="xla"`, or stop their gradient'
    return [Reason("captured", prefix + text, remedy)] if text else []


def _is_long(problem: Problem) -> bool:
    """Returns whether the call by rows has more of them than lists have numbers for."""
    by_rows = problem_by_rows(problem, sums_plane=True)
    return max(by_rows.query_length, by_rows.key_length) > MAX_LISTED_LENGTH


def _has_many_bits(problem: Problem) -> bool:
    """Returns whether bits of all pairs may take too much memory, which say what causal and window show of rows.

    Tiles reach up to 255 rows past the end.
    """
    by_rows = problem_by_rows(problem, sums_plane=True)
    pairs = (by_rows.query_length + 255) * (by_rows.key_length + 255) * problem.batch
    return by_rows.spec.mask_mod is not None and pairs > 8 * MAX_BITS_NBYTES


def _is_one(program: Program | None, plane: int) -> bool:
    """Returns whether a number of a plane is added to the score as it is."""
    if not isinstance(program, Code) or terms(program) is None:
        return False
    return program.instructions[program.results[2 + plane]] == ("const", "1.0")


def summed_plane(problem: Problem, wanted: Collection[str]) -> int | None:
    """Returns the plane of a score function whose gradient the backward pass sums; None if it sums none."""
    found = _wanted_planes(problem, wanted)
    return found[0][0] if found else None


def _wanted_planes(problem: Problem, wanted: Collection[str]) -> list[tuple[int, Place]]:
    """Returns number and place of each plane whose gradient is wanted."""
    if problem.spec.score_mod is None:
        return []
    found = enumerate(places((problem.spec.score_mod,))[0])
    return [(i, place) for i, place in found if place.operand in wanted]


def _mask_mod_reasons(problem: Problem) -> list[tuple[str, str]]:
    """Returns why no prepass evaluates a mask function, each with the remedy."""
    program = problem.spec.mask_mod
    if program is None:
        return []
    if not isinstance(program, Code):
        return [(f"`mask_mod` has no code, because {program.reason}", "or pass an array as `mask`")]
    found: list[tuple[str, str]] = []
    if problem.num_sequences and "dropout" in problem.spec.present:
        found.append(("no kernel drops weights of packed sequences with a `mask_mod`", 'pass `implementation="xla"`'))
    if unknown := sorted({op for op, *_ in program.instructions} - MASK_OPS):
        found.append(
            (
                f"`mask_mod` computes {', '.join(f'`{op}`' for op in unknown)} of a query and a key together, which "
                "has no instruction in the kernels",
                "compare squares or other numbers without it, or pass an array as `mask`",
            )
        )
    program = problem_by_rows(problem).spec.mask_mod
    staged = len(staged_places(tuple(places((problem.spec.score_mod, program))[1])))
    if staged > MAX_STAGED_PLANES:
        text = f"`mask_mod` reads {staged} numbers of queries, keys and distances; the kernels take {MAX_STAGED_PLANES}"
        found.append((text, "compute fewer ahead of the call, or pass an array as `mask`"))
    return found


def _max_head_dim(problem: Problem, arch: str | None) -> tuple[int, str]:
    """Returns up to which head dim there are kernels for a problem, and in words where that limit holds."""
    has_bias = problem.bias_shape is not None
    is_split = (
        products_of(problem.dtype, problem.spec.precision, takes_terms=takes_terms(problem, dbias=has_bias)) == "bf16x3"
    )
    if is_split and arch is not None and shared_memory_limit(arch) < _WIDE_NBYTES:
        words = "in float32 with a bias and" if has_bias else "in float32 with"
        return NARROW_HEAD_DIM, f" {words} {shared_memory_limit(arch) // 1024} KB of shared memory"
    return MAX_HEAD_DIM, ""


def speed_note(arch: str) -> str:
    """Returns a caveat about the speed of the kernels on `arch`; an empty string if there is none."""
    if arch not in UNTIMED:
        return ""
    return (
        f"the portable kernels were not timed on {arch}, and jax.nn.dot_product_attention with "
        'implementation="cudnn" may be faster there'
    )


def describe_kernels(problem: Problem, arch: str, *, has_gradient: bool = True) -> tuple[str, str]:
    """Describes the families, and query rows x keys of the tiles, that `problem` runs with on `arch`."""
    kernels = [forward_spec(problem, arch)]
    if has_gradient:
        kernels.append(kernel_spec(problem, "backward", arch))
    return ", ".join(f"{x.family} {x.op}" for x in kernels), ", ".join(x.config.tiles for x in kernels)


def describe_portable_split(problem: Problem, arch: str) -> str:
    """Says why portable kernels run a call in float32 on a Hopper GPU; an empty string if they do not."""
    kernel = forward_spec(problem, arch)
    if arch != "sm_90a" or kernel.op != "forward" or kernel.family != "sm80":
        return ""
    obstacle = split_obstacle(kernel.head_dim, kernel.v_head_dim)
    return f"the call takes portable kernels: in Hopper's, {obstacle}"


def describe_lists(problem: Problem, arch: str, *, has_gradient: bool = True) -> str:
    """Describes the lists that prepasses write for a mask function; an empty string without one."""
    problem = problem_by_rows(problem)
    if problem.spec.mask_mod is None:
        return ""
    kernels = [forward_spec(problem, arch)]
    if has_gradient:
        kernels.append(kernel_spec(problem, "backward", arch))
    found: list[str] = []
    for kernel in kernels:
        if kernel.row_bits:
            found.append(f"{kernel.op}: bits of each query, which XLA computes")
        for config in prepass_configs(kernel):
            sizes = list_sizes(problem, config)
            side = "queries" if config.transposed else "keys"
            planes = sizes.batch * sizes.heads
            kept = [tiles for tiles, *_ in problem.spec.kept]
            source = ", kept" if config in kept else ", made in the call, since kept ones have other tiles" * bool(kept)
            found.append(
                f"{kernel.op}: lists of {side} for tiles {config.rows} x {config.keys}, "
                f"{planes} plane{'s' * (planes > 1)} of bits{source}"
            )
    return f"a prepass evaluates `mask_mod` ({'; '.join(found)})"
