# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores and positions as code: its text, its equality, its derivatives, and why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fastattn.programs.code import Code
from jax_fastattn.programs.evaluation import evaluate_code
from jax_fastattn.programs.function import words
from jax_fastattn.programs.lower import NoCodeError, lower_mask, lower_score
from jax_fastattn.programs.trace import MASK_ARGUMENTS, SCORE_ARGUMENTS, trace_call

SLOPES, TABLE, OF_KEYS = jnp.arange(4.0) / 8, jnp.arange(12.0).reshape(3, 4) / 8, jnp.arange(10.0).reshape(2, 5) / 8
IDS, BLOCKS, WINDOW = jnp.arange(5) // 2, jnp.arange(2 * 4 * 3 * 2).reshape(2, 4, 3, 2) % 2 == 0, jnp.int32(3)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def score_code(function: Callable[..., Any], wide: Any = np.float32) -> Code:
    dtypes = {name: wide if name == "score" else np.int32 for name in SCORE_ARGUMENTS}
    return lower_score(trace_call("score_mod", function, dtypes)[0], wide)[0]


def mask_code(function: Callable[..., Any]) -> Code:
    return lower_mask(trace_call("mask_mod", function, dict.fromkeys(MASK_ARGUMENTS, np.int32))[0])[0]


def text(code: Code) -> str:
    marks = {"per_batch": "b", "per_head": "h"}
    planes = [
        f"{x.kind}-{x.dtype}{''.join(mark for name, mark in marks.items() if getattr(x, name))}{x.length or ''}"
        for x in code.planes
    ]
    return " ".join([*planes, f"| {code}"])


ALIBI = "head-fh | 0:f = score; 1:f = plane 0; 2:i = affine -1 1 0; 3:f = to_float 2; 4:f = mul 1 3; 5:f = add 0 4; "
SCORES = {
    "alibi": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), ALIBI + "6:f = const 1.0; return 5 6 3"),
    "alibi without an array": (
        lambda s, b, h, q, k: s + 2.0 ** (-2 * (h + 1)) * (k - q),
        ALIBI + "6:f = const 1.0; return 5 6 3",
    ),
    "table of buckets": (
        lambda s, b, h, q, k: s + TABLE[jnp.clip(k - q, -1, 1) + 1, h],
        "distance-fh | 0:f = score; 1:f = plane 0; 2:f = add 0 1; 3:f = const 1.0; return 2 3 3",
    ),
    "buckets of both signs": (
        lambda s, b, h, q, k: s + TABLE[jnp.where(jnp.abs(q - k) < 2, 0, 1) + (k > q), h],
        "distance-fh | 0:f = score; 1:f = plane 0; 2:f = add 0 1; 3:f = const 1.0; return 2 3 3",
    ),
    "an array of heads times one of keys": (
        lambda s, b, h, q, k: s + SLOPES[h] * OF_KEYS[b, k],
        "key-fbh | 0:f = score; 1:f = plane 0; 2:f = add 0 1; 3:f = const 1.0; return 2 3 3",
    ),
    "hidden by -inf": (
        lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf),
        "| 0:i = affine 1 0 0; 1:i = affine 0 1 0; 2:b = ge 0 1; 3:f = const -inf; 4:f = score; 5:f = select 2 3 4; "
        "6:f = const 0.0; 7:f = const 1.0; 8:f = select 2 6 7; return 5 8",
    ),
    "temperature": (
        lambda s, b, h, q, k: s * SLOPES[h],
        "head-fh | 0:f = score; 1:f = plane 0; 2:f = mul 0 1; return 2 1 0",
    ),
    "a captured number": (
        lambda s, b, h, q, k: jnp.where(k < WINDOW, s, 2 * s),
        "head-i | 0:i = affine 0 1 0; 1:i = plane 0; 2:b = lt 0 1; 3:f = const 2.0; 4:f = score; 5:f = mul 3 4; "
        "6:f = select 2 5 4; 7:f = const 0.0; 8:f = const 1.0; 9:f = select 2 7 8; 10:f = select 2 8 7; "
        "11:f = mul 3 10; 12:f = add 9 11; return 6 12 -1",
    ),
    "no gradient": (
        lambda s, b, h, q, k: s * lax.stop_gradient(s),
        "| 0:f = score; 1:f = stop_gradient 0; 2:f = mul 0 1; return 2 1",
    ),
}
MASKS = {
    "documents and causal": (
        lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
        "query-i key-i | 0:i = plane 0; 1:i = plane 1; 2:b = eq 0 1; 3:i = affine 1 0 0; 4:i = affine 0 1 0; "
        "5:b = ge 3 4; 6:b = and 2 5; return 6",
    ),
    "a window that is data": (
        lambda b, h, q, k: q - k < WINDOW,
        "head-i | 0:i = affine 1 -1 0; 1:i = plane 0; 2:b = lt 0 1; return 2",
    ),
    "a window that is a number": (
        lambda b, h, q, k: q - k < 3,
        "| 0:i = affine 1 -1 0; 1:i = const 3; 2:b = lt 0 1; return 2",
    ),
    "heads": (
        lambda b, h, q, k: (h == 0) | (q >= k),
        "head-ih | 0:i = plane 0; 1:i = const 0; 2:b = ne 0 1; 3:i = affine 1 0 0; 4:i = affine 0 1 0; 5:b = ge 3 4; "
        "6:b = or 2 5; return 6",
    ),
    "blocks of pairs": (
        lambda b, h, q, k: lax.dynamic_slice(BLOCKS, (b, h, q // 2, k // 2), (1, 1, 1, 1)).reshape(()),
        "query-i key-i table-ibh6 | 0:i = const 0; 1:i = plane 0; 2:i = max 1 0; 3:i = const 2; 4:i = min 2 3; "
        "5:i = plane 1; 6:i = max 5 0; 7:i = const 1; 8:i = min 6 7; 9:i = mul 4 3; 10:i = add 9 8; 11:i = table 2 10; "
        "12:b = ne 11 0; return 12",
    ),
    "all": (lambda b, h, q, k: True, "| 0:b = const True; return 0"),
}


@pytest.mark.parametrize("name", SCORES)
def test_the_code_of_a_score_mod(name: str) -> None:
    function, expected = SCORES[name]
    assert text(score_code(function)) == expected


@pytest.mark.parametrize("name", MASKS)
def test_the_code_of_a_mask_mod(name: str) -> None:
    function, expected = MASKS[name]
    assert text(mask_code(function)) == expected


OF_SEQUENCES = {
    "alibi": (SCORES["alibi"][0], ALIBI + "6:f = const 1.0; return 5 6 3"),
    "a number of a sequence is one of its queries": (
        lambda s, b, h, q, k: s * OF_KEYS[b, 0],
        "query-f | 0:f = score; 1:f = plane 0; 2:f = mul 0 1; return 2 1 0",
    ),
    "of keys": (
        lambda s, b, h, q, k: s + OF_KEYS[b, k],
        "key-f | 0:f = score; 1:f = plane 0; 2:f = add 0 1; 3:f = const 1.0; return 2 3 3",
    ),
    "of tokens": (
        lambda s, b, h, q, k: s + SLOPES[IDS[b] + q] + SLOPES[IDS[b] + k],
        "query-f key-f | 0:f = score; 1:f = plane 0; 2:f = add 0 1; 3:f = plane 1; 4:f = add 2 3; "
        "5:f = const 1.0; return 4 5 5 5",
    ),
    "of distances": (
        lambda s, b, h, q, k: s + TABLE[jnp.clip(k - q, -1, 1) + 1, h],
        "distance-fh | 0:f = score; 1:f = plane 0; 2:f = add 0 1; 3:f = const 1.0; return 2 3 3",
    ),
}


@pytest.mark.parametrize("name", OF_SEQUENCES)
def test_the_code_of_a_score_mod_of_packed_sequences(name: str) -> None:
    function, expected = OF_SEQUENCES[name]
    dtypes = {name: np.float32 if name == "score" else np.int32 for name in SCORE_ARGUMENTS}
    graph = trace_call("score_mod", function, dtypes)[0]
    assert text(lower_score(graph, np.float32, of_sequences=True)[0]) == expected


def test_a_distance_and_a_sequence_together_have_no_code() -> None:
    dtypes = {name: np.float32 if name == "score" else np.int32 for name in SCORE_ARGUMENTS}
    graph = trace_call("score_mod", lambda s, b, h, q, k: s + TABLE[jnp.clip(k - q, -1, 1) + 1, b], dtypes)[0]
    assert lower_score(graph, np.float32)[0].planes[0].kind == "distance"
    with pytest.raises(NoCodeError, match="indexed by query and key together"):
        lower_score(graph, np.float32, of_sequences=True)


def test_equal_functions_have_equal_codes_and_captured_values_are_none_of_them() -> None:
    def alibi(slopes: jax.Array, factor: float) -> Code:
        return score_code(lambda s, b, h, q, k: s + slopes[h] * (factor * (k - q)))

    first, second = alibi(SLOPES, 2.0), alibi(SLOPES + 1, 2.0)
    assert first == second and hash(first) == hash(second) and repr(first) == repr(second)
    assert alibi(SLOPES, 3.0) != first
    assert score_code(lambda s, b, h, q, k: s * 0.0) != score_code(lambda s, b, h, q, k: s * -0.0)
    nan = [score_code(lambda s, b, h, q, k: jnp.where(q > k, s, jnp.nan)) for _ in range(2)]
    assert nan[0] == nan[1]


def test_a_function_that_captures_another_array_is_traced_again() -> None:
    """`jax.make_jaxpr` of the same function twice returns the first array."""
    slopes = jnp.zeros(4)

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h]

    dtypes = {name: np.float32 if name == "score" else np.int32 for name in SCORE_ARGUMENTS}
    (first,) = trace_call("score_mod", function, dtypes)[1]
    slopes = jnp.ones(4)
    (second,) = trace_call("score_mod", function, dtypes)[1]
    assert first[0] == 0 and second[0] == 1


UNARY = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": lambda x: jnp.log(x + 3),
    "log1p": lambda x: jnp.log1p(x + 2),
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "sqrt": lambda x: jnp.sqrt(x + 3),
    "rsqrt": lambda x: lax.rsqrt(x + 3),
    "abs": jnp.abs,
    "sign": lambda x: x * jnp.sign(x),
    "neg": lambda x: -x,
    "square": jnp.square,
    "power": lambda x: x**-3,
    "clip": lambda x: jnp.clip(x, -0.5, 0.5) * x,
    "max": lambda x: jnp.maximum(x, 0.3) * x,
    "min": lambda x: jnp.minimum(x, 0.3) * x,
    "div": lambda x: 2.0 / (x - 4),
    "sub": lambda x: 1 - x,
    "select": lambda x: jnp.where(x > 0, x * x, -x),
    "comparisons": lambda x: x * ((x <= 0.2) | ((x != 0.5) ^ ~(x >= 0.1)) & (x == x)),
    "integers": lambda x: x * ((x * 8).astype(jnp.int32) % 3 // 2 + 1),
}


@pytest.mark.parametrize("name", UNARY)
def test_values_and_derivatives_of_each_instruction(name: str) -> None:
    """Against JAX's of the function, by the score and by a number of a head."""
    function = UNARY[name]
    numbers = jnp.array([0.25, 0.75, 1.5, 2.0])

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, given: jax.Array = numbers) -> Any:
        return function(s * given[h])

    code, scores = score_code(mod), jnp.linspace(-0.95, 0.97, 12)
    leaves = {"score": scores, "query": jnp.int32(0), "key": jnp.int32(0)}
    found = evaluate_code(code, leaves, [numbers[2]])

    def value(score: jax.Array, given: jax.Array) -> jax.Array:
        return mod(score, 0, 2, 0, 0, given)

    slopes = [jax.vmap(jax.grad(value, i), (0, None))(scores, numbers) for i in (0, 1)]
    expected = value(scores, numbers), slopes[0], slopes[1][:, 2]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.broadcast_to(x, scores.shape), y, rtol=2e-6, atol=1e-6)


def test_all_floats_have_the_dtype_of_logits() -> None:
    """JAX rounds `slopes[h] * (q - k)` to the dtype of the slopes."""
    slopes = SLOPES.astype(jnp.bfloat16)
    code = score_code(lambda s, b, h, q, k: s + (slopes[h] * (q - k)).astype(jnp.float32))
    assert code == score_code(lambda s, b, h, q, k: s + SLOPES[h] * (q - k))
    plain = score_code(lambda s, b, h, q, k: s * 0.1 + SLOPES[h] * (q - k))
    with jax.enable_x64(True):
        wide = score_code(lambda s, b, h, q, k: s * np.float64(0.1) + slopes[h] * (q - k), np.float64)
        narrow = score_code(lambda s, b, h, q, k: s * np.float64(0.1) + slopes[h] * (q - k))
    assert "const 0.1;" in str(wide) and narrow == plain


PAIRS = (
    "a captured array is indexed by query and key together, other than by their difference, or by the score; pass "
    "`bias=` with the array that it would give, of shape `[b, n, T, S]` with axes of size 1 where nothing changes"
)
NO_CODE = {
    "sort": (
        lambda s, b, h, q, k: jnp.sort(jnp.array([s, 0.0]))[0],
        "it makes or takes an array of shape",
    ),
    "pairs": (lambda s, b, h, q, k: s + TABLE[q, k], PAIRS),
    "the score": (lambda s, b, h, q, k: s + SLOPES[s.astype(jnp.int32)], PAIRS),
    "an array of pairs": (
        lambda s, b, h, q, k: s + jnp.max(jnp.stack([q, k, q + k])),
        "it makes or takes an array of shape",
    ),
    "erf": (
        lambda s, b, h, q, k: lax.erf(s),
        "`erf` in a score_mod or mask_mod has no instruction: only arithmetic, comparisons and a few functions have. "
        "Functions are evaluated in the kernels one number at a time; compute what needs it before, and index the "
        "result",
    ),
    "relu": (lambda s, b, h, q, k: jax.nn.relu(s), "it has a derivative of its own, which instructions lack"),
    "divisor": (
        lambda s, b, h, q, k: s + lax.div(q + k, k + 1),
        "`div` in a score_mod or mask_mod has no instruction: integers are divided by positive numbers alone that are "
        "known when a call is traced",
    ),
    "narrow integers": (
        lambda s, b, h, q, k: s + (q + k).astype(jnp.uint8),
        "`convert_element_type` in a score_mod or mask_mod has no instruction",
    ),
}


@pytest.mark.parametrize("name", NO_CODE)
def test_why_a_function_has_no_code(name: str) -> None:
    function, expected = NO_CODE[name]
    with pytest.raises(NoCodeError) as caught:
        score_code(function)
    assert expected in str(caught.value)


def test_a_mask_mod_reads_booleans_and_integers_of_pairs_alone() -> None:
    with pytest.raises(NoCodeError, match="compare it with a number ahead of the call, and index the booleans"):
        mask_code(lambda b, h, q, k: TABLE[q, k] > 0.5)


WRONG = {
    "no function": (score_code, 3, "`score_mod` is int, expected a function of (score, b, h, q, k)"),
    "arguments": (
        mask_code,
        lambda q, k: q >= k,
        "`mask_mod` does not take (b, h, q, k), expected a function of these arguments",
    ),
    "a float mask": (
        mask_code,
        lambda b, h, q, k: q * 1.0,
        "`mask_mod` returned float32 of shape (), expected one boolean, an array of shape (); compare it with a number",
    ),
    "a boolean score": (
        score_code,
        lambda s, b, h, q, k: s > 0,
        "`score_mod` returned bool of shape (), expected one float, an array of shape (); use `mask_mod` to hide a "
        "pair",
    ),
    "two scores": (
        score_code,
        lambda s, b, h, q, k: (s, s),
        "`score_mod` returned tuple, expected one float, an array of shape ()",
    ),
    "an array": (
        score_code,
        lambda s, b, h, q, k: s + SLOPES,
        "`score_mod` returned float32 of shape (4,), expected one float, an array of shape ()",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_score_mod_or_mask_mod(name: str) -> None:
    code_of, function, expected = WRONG[name]
    with pytest.raises(TypeError) as caught:
        code_of(function)
    assert str(caught.value).startswith(expected)


def test_an_error_of_the_function_is_its_own() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        mask_code(lambda b, h, q, k: q + "a")
    with pytest.raises(jax.errors.TracerBoolConversionError):
        mask_code(lambda b, h, q, k: q >= k and q > 0)


def test_functions_of_partial_arguments_are_functions() -> None:
    assert mask_code(functools.partial(lambda n, b, h, q, k: q >= k + n, 2)) == mask_code(lambda b, h, q, k: q >= k + 2)


# By the index that decides the first factor: functions that have one. None stands for no such factor.
FACTORS: list[tuple[str | None, Callable[..., Any]]] = [
    ("head", lambda s, b, h, q, k: SLOPES[h] * s),
    ("query", lambda s, b, h, q, k: jnp.tanh(s * OF_KEYS[b, q]) + s),
    ("key", lambda s, b, h, q, k: s - s * OF_KEYS[b, k]),
    (None, lambda s, b, h, q, k: 2.0 * s),
    (None, lambda s, b, h, q, k: s * TABLE[jnp.clip(k - q, -1, 1) + 1, h]),
    (None, lambda s, b, h, q, k: (s + 1) * SLOPES[h]),
    (None, lambda s, b, h, q, k: s * s),
]


@pytest.mark.parametrize(("kind", "function"), FACTORS)
def test_explain_names_a_factor_that_joins_the_scale(kind: str | None, function: Callable[..., Any]) -> None:
    found = words("score_mod", score_code(function))
    assert (f", and its factor of a {kind} is folded into the scale" in found) == (kind is not None)
    assert ("scale" in found) == (kind is not None)


# What `explain` says of a function, and whether it says what to change: not where nothing would help.
SAID: dict[str, tuple[str, Callable[..., Any], str]] = {
    "planes": (
        "score_mod",
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k) + TABLE[jnp.clip(k - q, -1, 1) + 1, h],
        "`score_mod` has 2 planes (head, distance) and 11 instructions (1 product), and adds a term to the score; if",
    ),
    "learned": ("score_mod", lambda s, b, h, q, k: s - SLOPES[h] * (q - k), "slow: `jax.lax.stop_gradient` of what"),
    "distances": ("score_mod", lambda s, b, h, q, k: s + TABLE[jnp.clip(k - q, -1, 1) + 1, h], "a formula of `k - q`"),
    "plain": ("score_mod", lambda s, b, h, q, k: s - 0.5 * (q - k), "(1 product), and adds a term to the score"),
    "heads": ("mask_mod", lambda b, h, q, k: q - k < 3 * h, "; if `mask_mod` is slow: without `h`, all heads share"),
    "floats": ("mask_mod", lambda b, h, q, k: OF_KEYS[b, k] > 0.1 * q, "is slow: comparisons of positions, or of"),
    "causal": ("mask_mod", lambda b, h, q, k: q >= k, "`mask_mod` has 0 planes and 3 instructions"),
}


@pytest.mark.parametrize("name", SAID)
def test_explain_says_how_a_function_was_understood_and_what_to_change(name: str) -> None:
    argument, function, text = SAID[name]
    found = words(argument, (score_code if argument == "score_mod" else mask_code)(function))
    assert text in found
    assert found.endswith(text) == (name in ("plain", "causal")), found
