# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Random calls in which two or three features meet: a differential test of what the named cases do not combine.

A kind is a combination of features with everything that is static, so that all of its draws share a program and a set
of kernels. Draws of a kind differ in lengths, offsets, ids, masks, values and poison. A seed fixes all of them. They
are cases, so poison, oracle and comparison are as for the named cases. `evaluate` calls the public functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from jax_fastattn.api import attention
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.mask_functions import PER_ENTRY, mask_function
from jax_fastattn.kernels.arguments.precision import products_of
from jax_fastattn.kernels.key import Products
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import DIFFERENTIABLE, OPERANDS, PLANES, AttentionSpec, Operands
from jax_fastattn.xla import blocks, chunks
from testing import compare, draws
from testing.compare import Results
from testing.draw_sizes import EMULATED, FEATURES, Sizes
from testing.poison import poison

# `attention_varlen` does not have these arguments. `draws.py` has its calls under other conditions.
_UNPACKED = {"lengths", "mask", "bias", "ids", "vmap"}
# A mask may have these axes in full. "k" is a row for each key/value head.
MASKS = ("bts", "ts", "bnts", "bs", "s", "bt", "bkts", "kts", "nts", "ks", "nt", "t", "n", "")
# What models pass comes more often.
_MASKS = (*MASKS, "bts", "bts", "bts", "bts", "ts", "bs", "bnts", "bkts")
# A bias may have these axes in full: all choices, and again the ones of models (T5 and Swin, AlphaFold, graphs, ALiBi).
BIASES = (*("".join(axes) for count in range(5) for axes in itertools.combinations("bnts", count)), "bkts", "kts", "ks")
_BIASES = (*BIASES, "nts", "nts", "nts", "bnts", "bnts", "ts", "bs", "ns")
# The allowance for rounding that comes on top of the budget, by the products of kernels.
_ROUNDING: dict[Products, float] = {"native": compare.ROUNDING, "bf16x3": 2.0**-13, "half": 2.0**-8}
# Calls of more queries are computed in chunks.
ROWS_AT_ONCE = 30


def allowed() -> list[tuple[str, ...]]:
    """Returns the pairs and triples of features that a public call can have, pairs first."""
    found = [chosen for size in (2, 3) for chosen in itertools.combinations(FEATURES, size)]
    return [chosen for chosen in found if "packing" not in chosen or not _UNPACKED.intersection(chosen)]


def features_of(case: Case) -> set[str]:
    """Returns the features that a case has."""
    has = {
        "causal": case.is_causal,
        "window": case.window != (None, None),
        "offset": case.query_offset is not None,
        "lengths": case.query_seq_lengths is not None or case.key_value_seq_lengths is not None,
        "cap": case.logits_soft_cap is not None,
        "sinks": case.sinks is not None,
        "mask": case.mask is not None,
        "function": case.mask_mod is not None,
        "bias": case.bias is not None,
        "ids": case.segments > 0 or case.documents is not None,
        "packing": case.packed is not None,
        "value head dim": case.v_head_dim is not None,
        "grouped heads": case.group > 1,
        "deterministic": case.deterministic,
        "residual": case.dlse,
        "vmap": case.vmapped,
        "precision": case.precision != "default",
    }
    return {name for name in FEATURES if has[name]}


def number(case: Case, of: str = "") -> int:
    """Returns a number that a draw has for a purpose, whether it asks for precise gradients or not."""
    return zlib.crc32(f"{of}{dataclasses.replace(case, precise_gradients=False)}".encode())


def combined_draws(seed: int, count: int, kinds: int, sizes: Sizes) -> list[Case]:
    """Returns `count` random calls, the first of each kind, then the second of each, and so on.

    Args:
        seed: fixes the kinds and the draws.
        count: the number of calls.
        kinds: the number of kinds. No combination comes twice before every one has come once, and every option of a
            feature is as frequent as the others. Every third kind asks for precise gradients.
        sizes: what kinds may take.
    """
    random = np.random.default_rng(seed)
    found = _kinds(random, kinds, sizes)
    calls = [_draw(random, found[i % kinds], i, sizes) for i in range(count)]
    # A kind has one set of kernels.
    return [dataclasses.replace(case, precise_gradients=i % kinds % 3 == 0) for i, case in enumerate(calls)]


def emulated_draws(seed: int, count: int) -> list[Case]:
    """Returns calls of the sizes that emulators take, each of another kind.

    In turns they have a mask, a bias, ids, a function, and none of these.
    """
    kinds, turns = len(allowed()), ("mask", "bias", "ids", "function", "")
    by_feature: dict[str, list[Case]] = {name: [] for name in turns}
    for case in combined_draws(seed, kinds, kinds, EMULATED):
        has = features_of(case)
        by_feature[next(name for name in ("function", "mask", "ids", "bias", "") if name in {*has, ""})].append(case)
    sources = {name: iter(found) for name, found in by_feature.items()}
    return [next(sources[name]) for name in itertools.islice(itertools.cycle(turns), count)]


def _kinds(random: np.random.Generator, count: int, sizes: Sizes) -> list[Case]:
    """Returns cases with all static facts. Arguments that draws choose are present, with any value."""

    def some(options: Sequence[Any]) -> Iterator[Any]:
        return itertools.cycle([options[i] for i in random.permutation(len(options))])

    combinations, dtypes = some(allowed()), some(sizes.dtypes)
    head_dims, value_head_dims, windows = some(sizes.head_dims), some(sizes.value_head_dims), some(sizes.windows)
    caps, masks, groups = some([5.0, 1.5, 50.0]), some(_MASKS), some([2, 3, 4])
    sides, offsets = some(["both", "queries", "keys"]), some(["given", "bottom_right"])
    biases, constant_biases = some(_BIASES), some([False, False, True])
    bias_dtypes = some(["float32", "float32", "bfloat16", "float16"])
    precisions = some(sizes.precisions)
    found = []
    for _ in range(count):
        has = set(next(combinations))
        batch = 1 if "packing" in has else int(random.integers(2, 4))
        side = next(sides) if "lengths" in has else None
        dtype = next(dtypes)
        head_dim, v_head_dim = next(value_head_dims) if "value head dim" in has else (next(head_dims), None)
        if dtype != "float32":
            head_dim, v_head_dim = head_dim * sizes.widening, v_head_dim and v_head_dim * sizes.widening
        query_length, key_length = (int(x) for x in random.integers(sizes.rows[0], sizes.rows[1] + 1, 2))
        empty = (0,) * (int(random.integers(3, 8)) if "packing" in has else batch)
        offset = next(offsets) if "packing" in has else "given"
        found.append(
            Case(
                dtype=dtype,
                batch=batch,
                query_length=query_length,
                key_length=key_length,
                num_kv_heads=int(random.integers(2, 4)),
                group=next(groups) if "grouped heads" in has else 1,
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                # An offset moves nothing but bounds.
                is_causal="causal" in has or ("offset" in has and "window" not in has),
                window=next(windows) if "window" in has else (None, None),
                logits_soft_cap=next(caps) if "cap" in has else None,
                bias=next(biases) if "bias" in has else None,
                bias_dtype=next(bias_dtypes) if "bias" in has else None,
                constant_bias=next(constant_biases) if "bias" in has else False,
                mask=next(masks) if "mask" in has else None,
                mask_mod=int(random.integers(1000)) if "function" in has else None,
                query_seq_lengths=empty if side in ("both", "queries") else None,
                key_value_seq_lengths=empty if side in ("both", "keys") else None,
                query_offset=None if "offset" not in has else empty if offset == "given" else "bottom_right",
                segments=2 if "ids" in has else 0,
                packed=(empty, empty) if "packing" in has else None,
                # A public call has one row of sinks for its batch, unless it is mapped.
                sinks=None if "sinks" not in has else "bn" if "vmap" in has else "n",
                dlse="residual" in has,
                deterministic="deterministic" in has,
                vmapped="vmap" in has,
                precision=next(precisions) if "precision" in has else "default",
            )
        )
    return found


def _draw(random: np.random.Generator, kind: Case, number: int, sizes: Sizes) -> Case:
    """Returns the kind with random data."""
    changes: dict[str, Any] = {"draw": number}
    for name, rows in (("query_seq_lengths", kind.query_length), ("key_value_seq_lengths", kind.key_length)):
        if getattr(kind, name) is not None:
            changes[name] = _lengths(random, kind.batch, rows, sizes)
    if isinstance(kind.query_offset, tuple):
        near = max(kind.query_length, kind.key_length)
        far = random.choice([-(1 << 28), -near, -1, 0, 1, near // 2, 1 << 28], len(kind.query_offset))
        changes["query_offset"] = _either(random, far, random.integers(-near, near, len(kind.query_offset)))
    if kind.mask is not None:
        shown = _shown(random, kind.mask, kind, sizes)
        changes["spelled" if isinstance(shown, Case) else "mask_density"] = shown
    if kind.bias is not None and random.integers(2):
        shown = _shown(random, kind.bias, kind, sizes)
        changes["bias_spelled" if isinstance(shown, Case) else "bias_density"] = shown
    if kind.segments:
        changes |= _ids(random, kind, sizes)
    if kind.packed is not None:
        changes |= _packed(random, kind, sizes)
    return dataclasses.replace(kind, **changes)


def _either(random: np.random.Generator, first: Any, second: Any) -> tuple[int, ...]:
    return tuple(int(x) for x in np.where(random.integers(2, size=len(first)) == 1, first, second))


def _lengths(random: np.random.Generator, count: int, rows: int, sizes: Sizes) -> tuple[int, ...]:
    edges = random.choice([*(edge for edge in sizes.edges if edge <= rows), rows], count)
    return _either(random, edges, random.integers(0, rows + 1, count))


def _shown(random: np.random.Generator, axes: str, kind: Case, sizes: Sizes) -> Case | float:
    """Returns what a mask, or the finite part of a bias, shows: what other arguments would, or random pairs.

    Args:
        random, kind, sizes: as for `_draw`.
        axes: the axes that the array has in full.

    Returns:
        A call, or the density of random pairs.
    """
    plain = Case(batch=kind.batch, query_length=kind.query_length, key_length=kind.key_length)
    full, spelled = set(axes), list[dict[str, Any]]()
    if full >= set("ts"):
        spelled += [{"is_causal": True}, {"window": sizes.windows[random.integers(len(sizes.windows))]}]
    if full >= set("bts"):
        spelled.append({**_ids(random, plain, sizes), "is_causal": bool(random.integers(2))})
    if full >= set("bs"):
        spelled.append({"key_value_seq_lengths": _lengths(random, kind.batch, kind.key_length, sizes)})
    if spelled and random.integers(2):
        return dataclasses.replace(plain, **spelled[random.integers(len(spelled))])
    return float(random.choice([0.7, 0.02, 0.97, 0.2, 0.0, 1.0], p=[0.3, 0.25, 0.1, 0.15, 0.1, 0.1]))


def _ids(random: np.random.Generator, kind: Case, sizes: Sizes) -> dict[str, Any]:
    """Returns segment ids: random ones, of queries and of keys apart, or the ids of documents."""
    order = random.choice(["sorted", "unsorted", "negative", "documents"])
    if order != "documents":
        return {"segments": int(random.integers(2, 7)), "ids": str(order)}
    rows = max(kind.query_length, kind.key_length)
    entries = (_lengths(random, int(random.integers(1, 6)), rows, sizes) for _ in range(kind.batch))
    return {"segments": 0, "documents": tuple(draws.fitted(lengths, rows) for lengths in entries)}


def _packed(random: np.random.Generator, kind: Case, sizes: Sizes) -> dict[str, Any]:
    """Returns boundaries of packed sequences, with rows of padding on both sides."""
    assert kind.packed is not None
    count, first = len(kind.packed[0]), tuple(int(x) for x in random.choice([0, 1, 5], 2))
    rows = kind.query_length - first[0], kind.key_length - first[1]
    longest = [max(2 * x // count, 1) for x in rows]
    lengths = [_lengths(random, count, most, sizes) for most in longest]
    both = zip(lengths, rows, strict=True)
    return {"first": first, "packed": tuple(draws.fitted(found, left) for found, left in both)}


def keys_of(case: Case) -> jax.Array:
    """Returns the keys of the operands of a case, and of its cotangents."""
    return jax.random.split(jax.random.key(number(case)))


def inputs(case: Case) -> tuple[AttentionSpec, Operands, jax.Array, jax.Array | None]:
    """Returns the spec of a case and its arrays, drawn by its name: other cases may come and go.

    In float16, every second draw has small cotangents of the output, whose products with weights would underflow.
    """
    operands_key, cotangents_key = keys_of(case)
    dout, dlse = case.cotangents(cotangents_key)
    if case.dtype == "float16" and (case.draw or 0) % 2:
        dout = dout * np.float16(2.0**-6)
    return case.spec(), case.operands(operands_key), dout, dlse


def evaluate(case: Case, spec: AttentionSpec, operands: Operands, dout: jax.Array, dlse: jax.Array | None) -> Results:
    """Returns the results of the public call of a case, gradients and residual included.

    Args:
        case: the source of boundaries and of offsets of packed sequences, and of how the function is called.
        operands, dout, dlse: the arrays of the case, poisoned or not. If dlse is None, the log-sum-exp is not
            differentiated.
    """
    captured = {} if case.mask_mod is None else case.captured(keys_of(case)[0])
    if case.packed is not None:
        return draws.evaluate(case, spec, operands, dout, dlse, captured)
    attend = _mapped if case.vmapped else _call
    with jax.default_matmul_precision(case.precision):
        if case.packed is not None:
            return draws.evaluate(case, spec, operands, dout, dlse)
        return _evaluate(spec, attend, wanted(case), case.mask_mod, operands, captured, dout, dlse)


def wanted(case: Case) -> tuple[str, ...]:
    """Returns the operands of which a call asks for the gradient."""
    constant = {*PLANES, *({"bias"} if case.constant_bias else ())}
    return tuple(name for name in DIFFERENTIABLE if name in case.spec().present and name not in constant)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _evaluate(
    spec: AttentionSpec,
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    names: tuple[str, ...],
    mask_mod: int | None,
    operands: Operands,
    captured: dict[str, jax.Array],
    dout: jax.Array,
    dlse: jax.Array | None,
) -> Results:

    def function(*arrays: jax.Array) -> tuple[Any, jax.Array]:
        given = operands._replace(**dict(zip(names, arrays, strict=True)))
        out, lse = attend(spec, mask_mod, given, captured)
        return out if dlse is None else (out, lse), lse

    found, pullback, lse = jax.vjp(function, *(getattr(operands, name) for name in names), has_aux=True)
    gradients = pullback(dout if dlse is None else (dout, dlse))
    out = found if dlse is None else found[0]
    return Results(out, lse, **{f"d{name}": x for name, x in zip(names, gradients, strict=True)})


def _call(
    spec: AttentionSpec, mask_mod: int | None, operands: Operands, captured: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Calls `attention` with a batch axis."""
    given = _by_name(operands)
    if "sinks" in given:
        given["sinks"] = given["sinks"][0]
    return _attention(spec, mask_mod, given, captured)


def _mapped(
    spec: AttentionSpec, mask_mod: int | None, operands: Operands, captured: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Calls `attention` without a batch axis, mapped over the batch."""
    batch, given = operands.query.shape[0], _by_name(operands)
    is_mapped = {name: OPERANDS[name].axes[0] == "B" or x.shape[0] == batch for name, x in given.items()}
    given = {name: x if is_mapped[name] else x[0] for name, x in given.items()}
    axes = {name: 0 if mapped else None for name, mapped in is_mapped.items()}
    # A function of an example reads entry 0.
    captured = {name: x[:, None] if name in PER_ENTRY else x for name, x in captured.items()}
    captured_axes = {name: 0 if name in PER_ENTRY else None for name in captured}
    return jax.vmap(functools.partial(_attention, spec, mask_mod), in_axes=(axes, captured_axes))(given, captured)


def _by_name(operands: Operands) -> dict[str, jax.Array]:
    """Returns the operands that arguments of a call become, without the planes of its function."""
    return {name: x for name, x in operands._asdict().items() if x is not None and name not in PLANES}


def _attention(
    spec: AttentionSpec, mask_mod: int | None, given: dict[str, jax.Array], captured: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    others = ("query_segment_ids", "key_value_segment_ids", "dropout")
    arguments: dict[str, Any] = {name: x for name, x in given.items() if name not in others}
    if "query_segment_ids" in given:
        arguments["segment_ids"] = given["query_segment_ids"], given["key_value_segment_ids"]
    if mask_mod is not None:
        arguments["mask_mod"] = mask_function(mask_mod, given["query"].shape[-3], captured)
    dropout = given.get("dropout")
    with draws.kept_by(dropout if dropout is None or dropout.ndim == 3 else dropout[None]):
        return attention(**arguments, **draws.static_options(spec), return_residual=True)


def rounding(case: Case) -> float:
    """Returns the allowance of `compare.assert_within_budget` for the results of kernels."""
    return _ROUNDING[products_of(case.dtype, case.precision) or "native"]


def check(case: Case) -> None:
    """Asserts that the XLA path is right on poisoned arrays, and that a second run gives the same bits.

    Calls with more than `ROWS_AT_ONCE` queries are computed in chunks, as long ones are.
    """
    spec, operands, *cotangents = inputs(case)
    poisoned = poison(spec, operands, *cotangents, turn=case.draw or 0)
    with in_chunks() if case.query_length > ROWS_AT_ONCE else contextlib.nullcontext():
        first, second = (jax.tree.map(np.asarray, evaluate(case, spec, *poisoned)) for _ in range(2))
    compare.assert_within_budget(first, *expected(case, spec, operands, *cotangents))
    compare.assert_same_bits(first, second)


@contextlib.contextmanager
def in_chunks() -> Generator[None]:
    """Makes the XLA path take chunks of 16 queries and keys at once."""
    whole, tuning = blocks.Blocks.of, dataclasses.replace(chunks.CPU, whole=0, block=0, chunk=16, min_chunk=16)
    with mock.patch.object(blocks.Blocks, "of", lambda spec, operands, _: whole(spec, operands, tuning)):
        yield


def expected(
    case: Case, spec: AttentionSpec, operands: Operands, *cotangents: Any, names: Collection[str] | None = None
) -> tuple[Results, Results]:
    """Returns the results of the oracle and of the baseline, whose products of float32 are exact.

    In float32 the results of a call may differ from them by `rounding` alone.

    Args:
        case, spec, operands, *cotangents: the call.
        names: whose gradients are wanted; None for those of `wanted`.
    """
    names = wanted(case) if names is None else names
    with jax.default_matmul_precision("highest"):
        if {operands.query.dtype, (operands.query if operands.bias is None else operands.bias).dtype} != {np.float32}:
            exact, baseline = compare.expected(spec, operands, *cotangents)
        else:
            exact = baseline = compare.evaluate(attention_reference, spec, operands, *cotangents)
    unasked = {f"d{name}": None for name in DIFFERENTIABLE if name not in names}
    return exact._replace(**unasked), baseline._replace(**unasked)
