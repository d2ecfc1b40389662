# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores of packed sequences in the kernels of both families, in both passes; emulated.

Sequences end inside of tiles, one is empty, one has keys and no queries, and there is padding on both sides. What no
pair reads is poison: rows, numbers of rows that belong to no sequence, and distances that no sequence has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import dataclasses

import emulated_ops
import jax
import jax.numpy as jnp
import numpy as np
from test_score_mods import reference
from testing.poison import poison

from jax_fastattn.canonical.packed import canonicalize
from jax_fastattn.kernels.choose import forward_spec
from jax_fastattn.kernels.support import MAX_LISTED_LENGTH, gradient_reasons, unsupported_reasons
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.spec import QKV, AttentionSpec, Operands, Problem

Mod = Callable[..., Any]

T, S, N, K = 90, 112, 2, 1
ARCHS = ("sm_80", "sm_90a")
STARTS, STARTS_K = jnp.array([3, 43, 43, 43, 81]), jnp.array([0, 37, 37, 60, 105])
M = 4

_random = np.random.default_rng(11)
SLOPES = jnp.asarray([0.3, -0.05], jnp.float32)
TABLE = jnp.asarray(_random.standard_normal((300, N)), jnp.float32)
ROWS = jnp.asarray(_random.standard_normal(T), jnp.float32)
COLUMNS = jnp.asarray(_random.standard_normal((N, S)), jnp.float32)
OF_SEQUENCES = jnp.asarray(_random.standard_normal((M, N)), jnp.float32)
COUNTS = jnp.asarray([3, 9, 30, 7], jnp.int32)


def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - SLOPES[h] * (q - k)


def every_plane(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Numbers of heads, queries, keys and distances, integers of sequences, and a slope that differs by pair."""
    term = TABLE[k - q + 150, h] * COLUMNS[h, STARTS_K[b] + k] - SLOPES[h] * jnp.abs(q + COUNTS[b] - k)
    return s * (1 + 0.5 * jnp.tanh(ROWS[STARTS[b] + q])) + term


def of_rows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Without distances other than in formulas, so that rows stay where they are next to a `mask_mod`."""
    return 3 * jnp.tanh(s / 3) + OF_SEQUENCES[b, h] * jnp.abs(q - k) / 8 + (q + 2 * k) % 3 - COLUMNS[h, STARTS_K[b] + k]


def far_apart(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A mask function with floats of distances."""
    return (TABLE[k - q + 150, h] < 0.8) & ((q + 2 * k + b) % 3 != 0)


# By name: a function, and head dim with other arguments.
CASES: dict[str, tuple[Mod, int, dict[str, Any]]] = {
    "alibi": (alibi, 64, {}),
    "alibi-d128-window-sinks": (
        alibi,
        128,
        {"local_window_size": (30, 8), "sinks": jnp.array([0.3, -1.0]), "query_offset": jnp.array([5, 0, 0, -7])},
    ),
    "cap-full-d128": (lambda s, b, h, q, k: 3 * jnp.tanh(s / 3), 128, {"is_causal": False, "logits_soft_cap": 2.0}),
    "every-plane-d192": (every_plane, 192, {}),
    "terms-d256": (lambda s, b, h, q, k: s + TABLE[k - q + 150, h] * ROWS[STARTS[b] + q], 256, {"is_causal": False}),
    "float16": (lambda s, b, h, q, k: s + TABLE[k - q + 150, h] * OF_SEQUENCES[b, h], 64, {"dtype": jnp.float16}),
    "float32": (lambda s, b, h, q, k: 5 * jnp.tanh(s / 5) + TABLE[k - q + 150, h], 64, {"dtype": jnp.float32}),
    "mask-function": (of_rows, 64, {"mask_mod": lambda b, h, q, k: (q + k + h) % 3 != 0}),
    "mask-function-window-d192": (
        of_rows,
        192,
        {"mask_mod": lambda b, h, q, k: (q + k + b) % 4 != 1, "local_window_size": (30, 8)},
    ),
    "mask-function-every-plane-d128": (
        every_plane,
        128,
        {"mask_mod": far_apart, "query_offset": 0, "local_window_size": (30, None), "sinks": jnp.array([0.3, -1.0])},
    ),
}


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def call(mod: Mod, head_dim: int = 64, **options: Any) -> tuple[AttentionSpec, Operands, jax.Array]:
    """Returns a causal call, and a cotangent of the output."""
    random, dtype = np.random.default_rng(0), options.pop("dtype", jnp.bfloat16)
    arrays = [
        jnp.asarray(random.standard_normal((rows, heads, head_dim)), dtype) for rows, heads in ((T, N), (S, K), (S, K))
    ]
    options = {"is_causal": True, "query_offset": "bottom_right"} | options
    spec, operands = canonicalize(*arrays, STARTS, STARTS_K, score_mod=mod, **options)
    return spec, operands, jnp.asarray(random.standard_normal(operands.query.shape), dtype)


def check(
    arch: str,
    patch: pytest.MonkeyPatch,
    spec: AttentionSpec,
    operands: Operands,
    dout: jax.Array,
    *planes: str,
    tolerance: float = 2**-6,
) -> None:
    """Compares a poisoned call and its gradients on an emulated GPU with the float32 reference.

    Args:
        planes: operands with planes whose gradient is wanted, too.
    """
    names = [*QKV, *planes, *(["sinks"] if operands.sinks is not None else [])]
    problem = Problem.of(spec, operands)
    assert not unsupported_reasons(problem, arch) and not gradient_reasons(problem, names)
    emulated_ops.emulate(patch, arch)
    poisoned, poisoned_dout, _ = poison(spec, operands, dout)
    out, lse = cuda.forward(spec, poisoned)
    found = cuda.backward(spec, poisoned, out, lse, poisoned_dout, None, names)
    (wanted, wanted_lse), gradients = reference(spec, operands, names, dout)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(wanted_lse), atol=1e-3, rtol=1e-4)
    results = {"out": (out, wanted, 2**-7)}
    results |= {x: (getattr(found, x), y, tolerance) for x, y in zip(names, gradients, strict=True)}
    for name, (got, expected, part) in results.items():
        assert got.shape == expected.shape, name
        got, expected = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
        np.testing.assert_allclose(got, expected, atol=part * np.abs(expected).max() + 1e-5, err_msg=name)


@pytest.mark.parametrize("arch", ARCHS)
def test_all_kinds_of_planes(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, operands, dout = call(every_plane)
    stacks = {"head_numbers", "query_numbers", "key_numbers", "distance_numbers", "query_integers"}
    assert stacks < {*spec.present} and spec.mask_mod is None
    check(arch, monkeypatch, spec, operands, dout)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_calls(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mod, head_dim, options = CASES[name]
    check(arch, monkeypatch, *call(mod, head_dim, **options))


@pytest.mark.parametrize("mod", [of_rows, every_plane])
def test_a_mask_function_next_to_one_of_scores(mod: Mod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of `attention` run it, for which places in a sequence are planes. For distances rows are aligned."""
    mask = CASES["mask-function"][2]["mask_mod"] if mod is of_rows else far_apart
    check("sm_80", monkeypatch, *call(mod, mask_mod=mask))


@pytest.mark.parametrize("arch", ARCHS)
def test_few_queries_next_to_a_mask_function(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run a decoding kernel, for which XLA makes bits of rows."""
    random, starts, starts_k = np.random.default_rng(1), jnp.array([1, 3, 3, 5]), jnp.array([0, 70, 75, 185])
    columns = jnp.asarray(random.standard_normal((4, 200)), jnp.float32)
    slopes = jnp.asarray(random.standard_normal((3, 4)) / 8, jnp.float32)
    query, key, value = (
        jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in ((6, 4, 64), (200, 2, 64), (200, 2, 64))
    )
    spec, operands = canonicalize(
        *(query, key, value, starts, starts_k),
        score_mod=lambda s, b, h, q, k: s - slopes[b, h] * (q - k) + columns[h, starts_k[b] + k],
        mask_mod=lambda b, h, q, k: (q + k + h) % 3 != 0,
        is_causal=True,
        query_offset="bottom_right",
    )
    problem = Problem.of(spec, operands)
    assert not unsupported_reasons(problem, arch) and forward_spec(problem, arch).op == "decode"
    emulated_ops.emulate(monkeypatch, arch)
    found, lse = cuda.forward(spec, poison(spec, operands, query[None])[0])
    (expected, expected_lse), _ = reference(spec, operands, [*QKV], jnp.zeros_like(found))
    np.testing.assert_allclose(np.asarray(lse), np.asarray(expected_lse), atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(found.astype(jnp.float32)), np.asarray(expected), atol=2**-7 * 3)


def two_packs() -> tuple[AttentionSpec, Operands, jax.Array]:
    """Returns two packs, of which one has other sequences, and other numbers of its heads, rows and distances."""
    spec, operands, dout = call(every_plane)
    assert operands.sequences is not None
    moved = operands.sequences.at[:, 1, 0].add(1).at[:, 0, 1].add(1).at[:, 1, 1].add(-1)
    others = operands._replace(sequences=moved)
    floats = [name for name in spec.present if name.endswith("_numbers")]
    others = others._replace(**{name: -getattr(operands, name) for name in floats if name != "key_numbers"})
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), operands, others)
    return spec, both._replace(key_numbers=operands.key_numbers), jnp.concatenate([dout, -dout])


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
def test_batch_entries_are_joined(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(arch, monkeypatch, *two_packs())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "plane"), [("sm_80", "query_numbers"), ("sm_90a", "query_numbers"), ("sm_80", "distance_numbers")]
)
def test_gradients_of_batch_entries(arch: str, plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pack has an order of rows of its own."""
    check(arch, monkeypatch, *two_packs(), plane)


# By name: a function, and an array that it captures.
CAPTURED: dict[str, tuple[Callable[[Any], Mod], Any]] = {
    "slopes": (lambda x: lambda s, b, h, q, k: s - x[h] * (q - k), SLOPES),
    "slopes-of-sequences": (lambda x: lambda s, b, h, q, k: s - x[b, h] * (q - k), OF_SEQUENCES),
    "keys": (lambda x: lambda s, b, h, q, k: s - SLOPES[h] * (q - k) + x[h, STARTS_K[b] + k], COLUMNS),
    "temperature-of-tokens": (lambda x: lambda s, b, h, q, k: s * x[STARTS[b] + q], 1 + 0.3 * ROWS),
    "table": (lambda x: lambda s, b, h, q, k: s + x[k - q + 150, h], TABLE),
    "table-times-score": (
        lambda x: lambda s, b, h, q, k: s * (1 + 0.5 * jnp.tanh(x[k - q + 150, 0])) + (q + 2 * k) % 3,
        TABLE,
    ),
}
CALLS = [(name, arch) for name in CAPTURED for arch in ARCHS]
# These run at every commit.
ALWAYS = [("slopes", "sm_80"), ("table", "sm_80")]


@pytest.mark.parametrize(
    ("name", "arch"), [pytest.param(*x, marks=[] if x in ALWAYS else pytest.mark.slow) for x in CALLS]
)
def test_gradients_of_captured_arrays(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass takes the kernels of `attention`."""
    make, captured = CAPTURED[name]
    spec, operands, dout = call(make(captured))
    *_, plane = (x for x in spec.present if x.endswith("_numbers"))
    check(arch, monkeypatch, spec, operands, dout, plane)


def test_what_the_kernels_refuse() -> None:
    def reasons(mod: Mod, *planes: str, rows: int = T, **options: Any) -> list[str]:
        spec, operands, _ = call(mod, **options)
        problem = dataclasses.replace(Problem.of(spec, operands), query_length=rows)
        found = unsupported_reasons(problem, "sm_90a") + gradient_reasons(problem, [*QKV, *planes])
        return [reason.text for reason in found]

    def of_table(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + TABLE[k - q + 150, h]

    most = MAX_LISTED_LENGTH
    assert not reasons(of_table, "distance_numbers", rows=most - S, query_offset=0)
    (found,) = reasons(of_table, "distance_numbers", rows=most, query_offset=0)
    assert found.endswith(f"for numbers of distances of packed sequences with more than {most} rows in one order")
    # Offsets are compared by bits.
    (found,) = reasons(of_table, "distance_numbers", rows=1 << 16)
    assert found.endswith("of packed sequences, of which bits would take more than 256 MiB")
    (found,) = reasons(every_plane, mask_mod=lambda b, h, q, k: q != k, rows=1 << 16)
    assert found == "the bits of `mask_mod` would take more than 256 MiB in a pass"
    dropout = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    (found,) = reasons(alibi, "head_numbers", **dropout)
    assert found.endswith("for numbers of heads of packed sequences next to dropout")
    assert not reasons(alibi, **dropout)
    (found,) = reasons(lambda s, b, h, q, k: s / (1.0 + q - k))
    assert found == "`score_mod` may be no number past the last query of a packed sequence"
    (found,) = reasons(lambda s, b, h, q, k: s + TABLE[k - q + b, h])
    assert found.startswith("`score_mod` has no code, because a captured array is indexed by query and key together")
