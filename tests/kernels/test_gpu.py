# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels against the oracle, on a GPU: results, gradients, poison, and equal bits in a second order.

Oracles compile for seconds each, so all of them are computed in threads while the first tests run.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import combinations, compare, draw_sizes, draws
from testing.borrow import portable_forward, portable_kernel
from testing.cases.biases import BIASES
from testing.cases.few_queries import FEW_QUERIES
from testing.cases.gpu import GPU_CASES
from testing.cases.hidden_rows import HIDDEN_ROWS
from testing.cases.long_rows import LONG_ROWS
from testing.poison import poison

import jax_fastattn
from jax_fastattn import ffi
from jax_fastattn.cases import models
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.compilation import cache
from jax_fastattn.kernels.choose import configured, kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.kernels.tiles import lists as tile_lists
from jax_fastattn.ops import vjp
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import PLANES, AttentionSpec, Operands

pytestmark = pytest.mark.gpu

_first_results: dict[Case, compare.Results] = {}

# A forward and a backward kernel for each kind, and for 2 kinds with wild boundaries: 40 at most. 4 runs with other
# seeds make 500 calls.
DRAWS, KINDS = 125, 18
WILD_DRAWS, WILD_KINDS = 20, 2
# Calls that the portable kernels run too, on a Hopper GPU.
PORTABLE_CASES = HIDDEN_ROWS | FEW_QUERIES
CHOICES = {
    "dtypes": ["bfloat16", "float16", "float32"],
    "head_dims": [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (40, 72)],
    "rows": [1100, 700],
}
# At most 64 kernels: two for each kind, and the prepasses of masks, ids and functions. 4 runs with other seeds make
# 1,040 calls.
COMBINED_DRAWS, COMBINED_KINDS = 260, 20

# Segment ids, masks that broadcast over queries or over keys, and functions of positions.
_LISTED = Case("bfloat16", 2, 517, 901, num_kv_heads=2, group=2, head_dim=64, deterministic=True)
BROADCAST = [
    dataclasses.replace(_LISTED, **changes)
    for changes in (
        {"segments": 4, "is_causal": True},
        {"segments": 3, "head_dim": 128, "window": (150, 60), "query_offset": (300, -40)},
        {"segments": 3, "mask": "bns", "head_dim": 192, "v_head_dim": 128},
        {"mask": "bs", "query_seq_lengths": (517, 201), "key_value_seq_lengths": (333, 901)},
        {"mask": "bt", "is_causal": True, "head_dim": 256},
        {"mask_mod": 0, "is_causal": True},
        {"mask_mod": 9, "head_dim": 128, "segments": 2},
    )
]


def combined_draws(seed: int) -> list[Case]:
    """Returns the calls of a run in which features meet."""
    return combinations.combined_draws(seed, COMBINED_DRAWS, COMBINED_KINDS, draw_sizes.LARGE)


def model_calls() -> list[Case]:
    """Returns the calls of published models, with fewer heads and rows."""
    found = {**models.CALLS, **models.BIASED}
    return [models.cut(case, min(case.query_length, 1100), 2) for case in found.values()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed = metafunc.config.getoption("--seed")
    if metafunc.function is test_random_packed_calls:
        metafunc.parametrize("case", draws.packed_draws(seed, DRAWS, KINDS, **CHOICES), ids=str)
    elif metafunc.function is test_models:
        metafunc.parametrize("case", model_calls(), ids=str)
    elif metafunc.function is test_random_combinations:
        metafunc.parametrize("case", combined_draws(seed), ids=str)
    elif metafunc.function is test_wild_boundaries_are_moved_into_the_rows:
        metafunc.parametrize("case", draws.wild_draws(seed, WILD_DRAWS, WILD_KINDS, **CHOICES), ids=str)


def _inputs(case: Case) -> tuple[AttentionSpec, Operands, jax.Array, Any]:
    spec, *arrays = combinations.inputs(case)
    return dataclasses.replace(spec, implementation="cuda"), *arrays


@functools.partial(jax.jit, static_argnums=(0, 1))
def _kernels(
    spec: AttentionSpec, family: str | None, operands: Operands, dout: jax.Array, dlse: jax.Array | None
) -> compare.Results:
    del family  # part of the cache key

    def attention(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, Any]:
        return vjp.attend(spec, operands, True)

    return compare.evaluate(attention, spec, operands, dout, dlse)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _kernels_without_lse(
    spec: AttentionSpec, family: str | None, operands: Operands, dout: jax.Array
) -> compare.Results:
    """As in training: nobody asks for the log-sum-exp, and its cotangent is no operand of the kernel."""
    del family  # part of the cache key
    names = [name for name in compare.DIFFERENTIABLE if name in spec.present and name not in PLANES]

    def attention(*arrays: jax.Array) -> jax.Array:
        return vjp.attend(spec, operands._replace(**dict(zip(names, arrays, strict=True))), False)[0]

    out, pullback = jax.vjp(attention, *(getattr(operands, name) for name in names))
    gradients = {f"d{name}": x for name, x in zip(names, pullback(dout), strict=True)}
    return compare.Results(out, vjp.attend(spec, operands, True)[1], **gradients)


def _results(case: Case, family: str | None = None) -> compare.Results:
    """Runs the kernels with NaN and Inf in everything that is invisible."""
    spec, *arrays = _inputs(case)
    operands, dout, dlse = poison(spec, *arrays)
    if dlse is None:
        found = _kernels_without_lse(spec, family, operands, dout)
    else:
        found = _kernels(spec, family, operands, dout, dlse)
    return jax.tree.map(np.asarray, found)


def _expectation(case: Case) -> tuple[compare.Results, compare.Results]:
    return jax.tree.map(np.asarray, combinations.expected(case, *_inputs(case)))


def _has_too_wide_heads(case: Case) -> str:
    """Returns why float32 heads are too wide, with the shared memory of an RTX card; an empty string if they fit."""
    reasons = unsupported_reasons(case.problem(), ffi.arch()) if case.dtype == "float32" else []
    return next((str(reason) for reason in reasons if reason.kind == "head_dim"), "")


@pytest.fixture(autouse=True)
def _skip_too_wide_heads(request: pytest.FixtureRequest) -> None:
    case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
    if isinstance(case, Case) and (reason := _has_too_wide_heads(case)):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def expectations(request: pytest.FixtureRequest) -> Any:
    """Oracle and baseline of every selected case, as futures; all their kernels are compiled on return."""
    arch = ffi.arch() or ""
    cases: dict[Case, None] = {}
    specs: dict[KernelSpec, None] = {}
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if not isinstance(case, Case):
            continue
        cases[case] = None
        if _has_too_wide_heads(case):
            continue
        if item.originalname == test_portable_kernels.__name__:
            portable = kernel_specs([case], "sm_80")
            specs |= {configured(dataclasses.replace(spec, arch=arch)): None for spec in portable}
        else:
            specs |= dict.fromkeys(kernel_specs([case], arch))
    workers = len(os.sched_getaffinity(0))
    # Each worker takes half a gigabyte, and many processes may run the suite.
    missing = [spec for spec in specs if cache.load(cache.kernel_key(spec)) is None]
    if missing:
        with ProcessPoolExecutor(min(workers, len(missing)), multiprocessing.get_context("spawn")) as compilers:
            list(compilers.map(ffi.prepare, missing))
    with ThreadPoolExecutor(workers) as pool:
        futures: dict[Case, Future[Any]] = {case: pool.submit(_expectation, case) for case in cases}
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_results_and_gradients(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    actual = _results(case)
    _first_results[case] = actual
    compare.assert_within_budget(actual, *expectations[case].result())


@pytest.mark.parametrize("case", GPU_CASES[::-1], ids=str)
def test_same_bits_in_another_order(case: Case) -> None:
    _assert_same_bits(case, _first_results.get(case) or _results(case), _results(case))


def _assert_same_bits(case: Case, first: compare.Results, second: compare.Results) -> None:
    """Holds results of two runs together, except sums in an order that may vary."""
    kernel = kernel_spec(case.problem(), "backward", ffi.arch() or "")
    any_order = {"dquery", "dscale"} if kernel.config.adds_dq and not kernel.ordered else set()
    compare.assert_same_bits(first, second, any_order)


def test_models(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    """As they are called in training: by flags, with a mask array, with segment ids."""
    compare.assert_within_budget(_public_results(case), *expectations[case].result())


@pytest.mark.parametrize("case", BIASES.values(), ids=str)
def test_biases(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    """With the gradient of the bias where a kernel computes it, each run twice."""
    _check_twice(case, expectations)


def test_random_combinations(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    """Calls that `--seed` draws in which two or three features meet, each run twice."""
    _check_twice(case, expectations)


@pytest.mark.parametrize("case", LONG_ROWS, ids=str)
def test_long_rows_of_float16(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    """Gradients of logits would underflow there, and every second call has small cotangents; each run twice."""
    _check_twice(case, expectations)


def _check_twice(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    first, second = _public_results(case), _public_results(case)
    compare.assert_within_budget(first, *expectations[case].result(), rounding=combinations.rounding(case))
    _assert_same_bits(case, first, second)


def _public_results(case: Case) -> compare.Results:
    """Runs the public function on the operands of a case, poisoned."""
    spec, operands, *cotangents = _inputs(case)
    poisoned = poison(spec, operands, *cotangents, turn=case.draw or 0)
    return jax.tree.map(np.asarray, combinations.evaluate(case, spec, *poisoned))


def test_random_packed_calls(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    """Calls of `attention_varlen` that `--seed` draws, each run twice."""
    first, second = _varlen_results(case), _varlen_results(case)
    compare.assert_within_budget(first, *expectations[case].result(), rounding=combinations.rounding(case))
    _assert_same_bits(case, first, second)


def test_wild_boundaries_are_moved_into_the_rows(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    """Those that decrease, are negative or huge; see "Which key a query sees" in docs/semantics.md."""
    found = _varlen_results(case)
    compare.assert_within_budget(found, *expectations[case].result(), rounding=combinations.rounding(case))
    _assert_same_bits(case, found, _varlen_results(case, draws.moved(case)))


@pytest.mark.parametrize("case", BROADCAST, ids=str)
def test_results_without_bits_are_those_with_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge tiles of long calls compare ids, or evaluate a function; see docs/kernels/masks.md."""
    with_bits = _results(case)
    # Less than the bits of a plane take, and more than what remains of them without.
    monkeypatch.setattr(tile_lists, "MAX_BITS_NBYTES", case.query_length * case.key_length // 16)
    assert all(kernel.compared for kernel in kernel_specs([case], ffi.arch() or "") if kernel.op != "prepass")
    compare.assert_same_bits(with_bits, _results(case, "compared"), set())


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_nan_stays_in_its_sequence(head_dim: int) -> None:
    """Neighbors that lie in the same tiles of rows have the bits that they have without NaN."""
    lengths, sizes = (127, 65, 0, 200, 64), {"query_length": 500, "key_length": 500}
    case = Case("bfloat16", 1, **sizes, num_kv_heads=2, group=2, head_dim=head_dim, packed=(lengths, lengths))
    case = dataclasses.replace(case, is_causal=True, dlse=True, deterministic=True)
    spec, operands, dout, dlse = _inputs(case)
    broken = slice(127, 127 + 65)
    query, k, value, bad_dout = (x.at[:, broken].set(jnp.nan) for x in (*operands[:3], dout))
    found = draws.evaluate(case, spec, operands._replace(query=query, key=k, value=value), bad_dout, dlse)
    expected = draws.evaluate(case, spec, operands, dout, dlse)
    for name, x, y in zip(compare.Results._fields, found, expected, strict=True):
        if x is not None:
            x, y = (np.delete(np.asarray(z).view(np.uint8), broken, axis=1) for z in (x, y))
            np.testing.assert_array_equal(x, y, err_msg=name)


def _varlen_results(case: Case, bounded: Case | None = None) -> compare.Results:
    """Runs the public function on the operands of a case, poisoned, with its boundaries or those of another case."""
    spec, *arrays = _inputs(case)
    return jax.tree.map(np.asarray, draws.evaluate(bounded or case, spec, *poison(spec, *arrays)))


@pytest.mark.parametrize("case", PORTABLE_CASES.values(), ids=PORTABLE_CASES.keys())
def test_portable_kernels(case: Case, expectations: dict[Case, Future[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a Hopper GPU runs only here."""
    monkeypatch.setattr(cuda, "kernel_spec", portable_kernel)
    monkeypatch.setattr(cuda, "forward_spec", portable_forward)
    compare.assert_within_budget(_results(case, "sm80"), *expectations[case].result())


# By how much each block of 32 keys shifts the scores of all queries, in nats, from the first block to the last.
SHIFTS = {
    "rising by hundreds": lambda block: 150.0 * (block % 24),
    "falling by hundreds": lambda block: -150.0 * (block % 24),
    "up and down": lambda block: 400.0 * (block * 7 % 5),
    "one jump": lambda block: 700.0 * (block == 3),
    "slowly rising": lambda block: 11.0 * block,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("head_dim", "length"), [(64, 700), (64, 2300), (96, 2300), (128, 700), (256, 700)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("shift", SHIFTS)
def test_scores_that_jump(shift: str, is_causal: bool, head_dim: int, length: int, dtype: str) -> None:
    """Maxima that no earlier tile announces: the forward kernels may not trust those of the tiles they have seen."""
    case = Case(
        dtype=dtype, query_length=length, key_length=length, num_kv_heads=2, head_dim=head_dim, is_causal=is_causal
    )
    query, k, value = case.operands(jax.random.key(5))[:3]
    shifts = jnp.array([SHIFTS[shift](block) for block in range(-(-length // 32))]).repeat(32)[:length]
    # The first column carries the shift: 16 times a key's entry, before the scale.
    k = k.at[..., 0].set((shifts / 16 * head_dim**0.5).astype(dtype)[None, :, None])
    operands = Operands(query.at[..., 0].set(16), k, value)
    spec = dataclasses.replace(case.spec(), implementation="cuda")
    out, lse = jax.jit(vjp.attend, static_argnums=(0, 2))(spec, operands, True)
    wide = Operands(*(x.astype(jnp.float32) for x in operands[:3]))
    with jax.default_matmul_precision("highest"):
        oracle = attention_reference(spec, wide)
    # jax.nn itself: scores of thousands show what tensor cores cut off when they add, which the stand-in does not do.
    with jax.numpy_dtype_promotion("standard"):
        theirs = jax.nn.dot_product_attention(
            *operands[:3], scale=spec.scale, is_causal=is_causal, implementation="xla"
        )
    baseline = theirs, compare.same_dtype_attention(spec, operands)[1]
    results = [compare.Results(*jax.tree.map(np.asarray, x)) for x in ((out, lse), oracle, baseline)]
    compare.assert_within_budget(*results)


# Scores differ by hundreds, so that warps of the forward kernel have to compute full tiles again.
CAPPED = Case("bfloat16", 1, 133, 520, num_kv_heads=2, head_dim=128, scale=2.0, logits_soft_cap=200.0)


@pytest.mark.parametrize("case", [CAPPED, dataclasses.replace(CAPPED, sinks="n")], ids=str)
def test_a_tile_that_is_computed_again_has_the_soft_cap(case: Case, expectations: dict[Case, Future[Any]]) -> None:
    """The tanh is exact with sinks alone; without them its relative error, up to 2^-11, is that of the logits."""
    found, oracle, baseline = (compare.Results(*x[:2]) for x in (_results(case), *expectations[case].result()))
    np.testing.assert_allclose(found.lse, oracle.lse, rtol=2**-10)
    if case.sinks is not None:
        compare.assert_within_budget(found, oracle, baseline)


@pytest.mark.parametrize("long", ["query", "key"])
def test_more_than_2_to_the_31_elements(long: str) -> None:
    """The last rows of long arrays, against the same rows alone: each query sees the 96 keys up to its own position."""
    length, heads, head_dim, short = (1 << 17) + 96, 128, 128, 64
    lengths = {"query": short, "key": short, long: length}
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(key: jax.Array, length: int) -> jax.Array:
        return jax.random.normal(key, (1, length, heads, head_dim), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnames="offset")
    def gradients(query: Any, k: Any, value: Any, dout: Any, *, offset: int) -> list[Any]:
        def attention(*arrays: jax.Array) -> jax.Array:
            return jax_fastattn.attention(
                *arrays, implementation="cuda", local_window_size=(95, 0), query_offset=offset
            )

        out, pullback = jax.vjp(attention, query, k, value)
        return [out, *pullback(dout)]

    query, dout = normal(keys[0], lengths["query"]), normal(keys[1], lengths["query"])
    k, value = normal(keys[2], lengths["key"]), normal(keys[3], lengths["key"])
    offset = lengths["key"] - lengths["query"]
    found = gradients(query, k, value, dout, offset=offset)
    tail = 160
    query, dout, k, value = (x[:, -tail:] for x in (query, dout, k, value))
    expected = gradients(query, k, value, dout, offset=k.shape[1] - query.shape[1])
    for name, x, y in zip(("out", "dquery", "dkey", "dvalue"), found, expected, strict=True):
        y = np.asarray(y, np.float32)
        x = np.asarray(x[:, -y.shape[1] :], np.float32)
        assert np.abs(x - y).max() <= 0.02 * (1 + np.abs(y).max()), name


@pytest.mark.parametrize("seen", [100, 30000])
def test_one_query_over_few_heads(seen: int) -> None:
    """It takes the XLA path, without a copy of the values, of which hidden ones may be NaN."""
    keys = jax.random.split(jax.random.key(0), 3)
    query, k, value = (
        jax.random.normal(key, (1, length, heads, 128), jnp.bfloat16)
        for key, length, heads in zip(keys, (1, 32768, 32768), (16, 8, 8), strict=True)
    )
    k, value = (x.at[:, seen:].set(jnp.nan) for x in (k, value))

    def attend(implementation: Any) -> np.ndarray:
        attend = jax.jit(functools.partial(jax_fastattn.attention, implementation=implementation))
        return np.asarray(attend(query, k, value, key_value_seq_lengths=jnp.array([seen])), np.float32)

    found, kernel = attend(None), attend("cuda")
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, kernel, atol=0.01)


def test_a_second_size_compiles_nothing() -> None:
    def run(length: int, **options: Any) -> None:
        x = jnp.ones((2, length, 2, 64), jnp.bfloat16)
        jax.block_until_ready(jax_fastattn.attention(x, x, x, implementation="cuda", is_causal=True, **options))

    run(100, local_window_size=(9, 0), logits_soft_cap=2.0)
    compiled = ffi.compile_count()
    run(333, local_window_size=(70, 0), logits_soft_cap=3.0, scale=0.5)
    assert ffi.compile_count() == compiled


def test_other_boundaries_compile_nothing() -> None:
    """Boundaries, the order of sequences and offsets are data, and so is how many tiles a sequence has."""
    keys = jax.random.split(jax.random.key(0), 3)
    query, k, value = (jax.random.normal(key, (600, 2, 128), jnp.bfloat16) for key in keys)

    @jax.jit
    def gradients(boundaries: jax.Array, offset: jax.Array) -> Any:
        def attend(*arrays: jax.Array) -> jax.Array:
            options: dict[str, Any] = {"is_causal": True, "query_offset": offset, "implementation": "cuda"}
            return jax_fastattn.attention_varlen(*arrays, boundaries, boundaries, **options)

        out, pullback = jax.vjp(attend, query, k, value)
        return out, pullback(out)

    def run(boundaries: list[int], offset: list[int]) -> None:
        jax.block_until_ready(gradients(jnp.array(boundaries), jnp.array(offset)))

    run([0, 500, 510, 600], [0, 0, 0])
    compiled = ffi.compile_count()
    run([0, 90, 590, 600], [0, 7, -3])
    run([0, 10, 10, 100], [1, 2, 3])
    assert (ffi.compile_count(), gradients._cache_size()) == (compiled, 1)


def test_unsupported_calls_warn_and_fall_back() -> None:
    x = jnp.ones((1, 256, 3, 8))
    with pytest.warns(UserWarning, match="there are few queries in float32"):
        out = jax_fastattn.attention(x[:, :1], x, x)
    np.testing.assert_array_equal(np.asarray(out), 1.0)


def test_explain_names_the_kernel() -> None:
    x = jnp.ones((1, 5, 3, 64), jnp.bfloat16)
    found = jax_fastattn.explain(x, x, x)
    assert (found.implementation, found.reasons) == ("cuda", ())
    family = "sm90" if ffi.arch() == "sm_90a" else "sm80"
    assert found.kernel == f"{family} forward, {family} backward"


def test_concurrent_streams_and_threads() -> None:
    """Several threads launch at once; each must get its own numbers."""
    attend = jax.jit(lambda x: jax_fastattn.attention(x, x, x, implementation="cuda"))
    inputs = [jax.random.normal(jax.random.key(i), (2, 130 + i, 2, 64), jnp.bfloat16) for i in range(8)]
    alone = [np.asarray(attend(x)) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for expected, found in zip(alone, pool.map(attend, inputs), strict=True):
                np.testing.assert_array_equal(np.asarray(found), expected)
