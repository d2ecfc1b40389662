# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random packed calls of a few kinds, each with one program, one set of kernels, and many lengths and boundaries.

A seed fixes all draws. They are cases, so poison, oracle and comparison are as for the named cases. `evaluate` calls
the public function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.api import attention_varlen
from jax_fastattn.canonical import dropout
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.mask_functions import mask_function
from jax_fastattn.spec import DIFFERENTIABLE, PLANES, AttentionSpec, Operands
from testing.compare import Results

# These lengths are around the sizes of tiles; any other length is as likely as one of them.
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
LONGEST = 300


def packed_draws(
    seed: int,
    count: int,
    kinds: int,
    *,
    dtypes: Sequence[str],
    head_dims: Sequence[tuple[int, int]],
    rows: Sequence[int],
) -> list[Case]:
    """Returns `count` random packed calls, the first of each kind, then the second of each, and so on.

    Args:
        seed: fixes the kinds and the draws.
        count, kinds: the numbers of calls, and of combinations of what is static. Calls of a kind differ in lengths,
            padding and offsets.
        dtypes, head_dims, rows: the choices for kinds. A head dim is a pair `(H, D)`. `rows` limits the rows of
            queries, and of keys, padding included.
    """
    random = np.random.default_rng(seed)
    found = _kinds(random, kinds, dtypes=dtypes, head_dims=head_dims, rows=rows)
    return [_draw(random, found[i % kinds]) for i in range(count)]


def wild_draws(seed: int, count: int, kinds: int, **choices: Sequence[Any]) -> list[Case]:
    """Returns deterministic calls as `packed_draws` does, with boundaries that decrease or lie outside of the rows."""
    random = np.random.default_rng(seed)
    found = []
    for i, kind in enumerate(packed_draws(seed, count, kinds, **choices)):
        assert kind.packed is not None
        size = len(kind.packed[0]) + 1
        raw = []
        for rows in (kind.query_length, kind.key_length):
            inside, around = random.integers(0, rows + 1, size), random.integers(-rows, 2 * rows, size)
            anywhere = random.integers(-(1 << 31), 1 << 31, size)
            mixed = np.where(random.integers(4, size=size) == 0, around, np.sort(inside))
            raw.append([np.sort(inside)[::-1], around, inside, anywhere, mixed][i // kinds % 5])
        found.append(with_boundaries(dataclasses.replace(kind, deterministic=True), *raw))
    return found


def moved(case: Case) -> Case:
    """Returns a packed call with its effective boundaries: each is the largest one so far, within `[0, rows]`."""
    assert case.packed is not None
    found = []
    for first, lengths, rows in zip(case.first, case.packed, (case.query_length, case.key_length), strict=True):
        found.append(np.maximum.accumulate(np.clip(np.cumsum([first, *lengths]), 0, rows)))
    return with_boundaries(case, *found)


def with_boundaries(case: Case, *boundaries: np.ndarray) -> Case:
    """Returns a case with the given boundaries of queries and of keys."""
    queries, keys = boundaries
    firsts = int(queries[0]), int(keys[0])
    lengths = tuple(np.diff(queries).tolist()), tuple(np.diff(keys).tolist())
    return dataclasses.replace(case, first=firsts, packed=lengths)


def _kinds(random: np.random.Generator, count: int, **choices: Sequence[Any]) -> list[Case]:
    """Returns cases with all static facts and with empty sequences. No option is left out by chance."""

    def some(options: Sequence[Any]) -> Iterator[Any]:
        return iter([options[i % len(options)] for i in random.permutation(count)])

    dtypes, head_dims, rows = (some(choices[name]) for name in ("dtypes", "head_dims", "rows"))
    windows = some([None, (100, None), None, (7, 0), (None, 64), (63, 200)])
    causal, caps, sinks = some([True, False]), some([None, 5.0, None]), some([None, "n"])
    dlse, deterministic, scales = some([False, True]), some([False, True]), some([None, -0.2, None])
    kv_heads, groups, offsets = some([2, 1, 3]), some([1, 2, 3, 4]), some(["given", "bottom_right", None])
    found = []
    for _ in range(count):
        empty = (0,) * int(random.integers(4, 12))
        (head_dim, v_head_dim), limit, offset = next(head_dims), next(rows), next(offsets)
        query_length, key_length = (int(x) for x in random.integers(limit * 3 // 4, limit, 2))
        found.append(
            Case(
                dtype=next(dtypes),
                batch=1,
                query_length=query_length,
                key_length=key_length,
                num_kv_heads=next(kv_heads),
                group=next(groups),
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                scale=next(scales),
                is_causal=next(causal),
                window=next(windows) or (None, None),
                logits_soft_cap=next(caps),
                query_offset=empty if offset == "given" else offset,
                packed=(empty, empty),
                sinks=next(sinks),
                dlse=next(dlse),
                deterministic=next(deterministic),
            )
        )
    return found


def _draw(random: np.random.Generator, kind: Case) -> Case:
    """Returns the kind with sequences of random lengths, and random offsets if it has offsets of their own."""
    assert kind.packed is not None
    count = len(kind.packed[0])
    first = int(random.choice([0, 1, 40])), int(random.choice([0, 5, 64]))
    queries = _lengths(random, count)
    keys = queries if random.integers(2) else _lengths(random, count)
    offset = kind.query_offset
    if isinstance(offset, tuple):
        offset = tuple(int(x) for x in random.choice([-(1 << 28), -70, -1, 0, 3, 64, 150, 1 << 28], count))
    return dataclasses.replace(
        kind,
        first=first,
        packed=(fitted(queries, kind.query_length - first[0]), fitted(keys, kind.key_length - first[1])),
        query_offset=offset,
    )


def _lengths(random: np.random.Generator, count: int) -> list[int]:
    others = random.integers(2, LONGEST, count)
    return [int(x) for x in np.where(random.integers(2, size=count) == 1, random.choice(EDGES, count), others)]


def fitted(lengths: Sequence[int], rows: int) -> tuple[int, ...]:
    """Returns the lengths of the parts that lie within the rows."""
    ends = np.minimum(np.cumsum([0, *lengths]), rows)
    return tuple(int(x) for x in np.diff(ends))


def evaluate(
    case: Case,
    spec: AttentionSpec,
    operands: Operands,
    dout: jax.Array,
    dlse: jax.Array | None,
    captured: dict[str, jax.Array] | None = None,
) -> Results:
    """Returns the results of `attention_varlen` for a packed case, gradients and residual included.

    Args:
        case: the source of boundaries and offsets.
        operands, dout, dlse: the arrays of the case, poisoned or not. If dlse is None, the log-sum-exp is not
            differentiated.
        captured: what the function of the case captures.
    """
    offset = case.query_offset
    named = offset if isinstance(offset, str) else None
    given = jnp.array(offset, jnp.int32) if isinstance(offset, tuple) else None
    return _evaluate(spec, named, case.mask_mod, case.boundaries(), given, operands, captured, dout, dlse)


def static_options(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the keyword arguments of public functions that a spec holds."""
    return {
        "scale": spec.scale,
        "is_causal": spec.is_causal,
        "local_window_size": spec.window,
        "implementation": spec.implementation,
        "logits_soft_cap": spec.logits_soft_cap,
        "deterministic": spec.deterministic,
    }


def kept_by(operand: jax.Array | None) -> contextlib.AbstractContextManager[Any]:
    """Makes public calls drop weights by an operand `[b, n, W]`, as if made of a key; None drops nothing."""
    if operand is None:
        return contextlib.nullcontext()
    return mock.patch.object(dropout, "operand", lambda *_: operand)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate(
    spec: AttentionSpec,
    named: str | None,
    mask_mod: int | None,
    boundaries: tuple[jax.Array, jax.Array],
    offset: jax.Array | None,
    operands: Operands,
    captured: dict[str, jax.Array] | None,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> Results:
    names = [name for name in DIFFERENTIABLE if name in spec.present and name not in PLANES]
    function_of_rows = None
    if mask_mod is not None and captured is not None:
        function_of_rows = mask_function(mask_mod, operands.query.shape[1], captured, is_packed=True)
    query_offset: Any = named or (0 if offset is None else offset)

    def function(*arrays: jax.Array) -> tuple[Any, jax.Array]:
        given = operands._replace(**dict(zip(names, arrays, strict=True)))
        with kept_by(given.dropout):
            out, lse = attention_varlen(
                given.query[0],
                given.key[0],
                given.value[0],
                *boundaries,
                **static_options(spec),
                return_residual=True,
                sinks=None if given.sinks is None else given.sinks[0],
                query_offset=query_offset,
                mask_mod=function_of_rows,
            )
        return out[None] if dlse is None else (out[None], lse[None]), lse[None]

    found, pullback, lse = jax.vjp(function, *(getattr(operands, name) for name in names), has_aux=True)
    gradients = pullback(dout if dlse is None else (dout, dlse))
    out = found if dlse is None else found[0]
    return Results(out, lse, **{f"d{name}": x for name, x in zip(names, gradients, strict=True)})
