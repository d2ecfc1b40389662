# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Programs that eager calls keep: what may not be left out of their keys, and calls that may not have one."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import re
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import _compat, attention, attention_varlen, paged_attention, target_arch
from jax_fastattn.api import batched, eager, packed, paged
from jax_fastattn.ops import dispatch, vjp


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


Q, K, V = draw(0, 2, 5, 6, 8), draw(1, 2, 7, 3, 8), draw(2, 2, 7, 3, 8)


def call_dense(x: jax.Array) -> Any:
    return attention(x, K, V, is_causal=True)


def call_packed(x: jax.Array) -> Any:
    starts = jnp.array([0, 2, 5])
    return attention_varlen(x[0], K[0], V[0], starts, starts, query_offset="bottom_right")


def call_paged(x: jax.Array) -> Any:
    pages = draw(3, 4, 16, 3, 8)
    return paged_attention(x, pages, pages, jnp.array([[2, 0], [3, 1]]), jnp.array([17, 3]))


FUNCTIONS = {"attention": call_dense, "varlen": call_packed, "paged": call_paged}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each time that the steps of a call run, whether its query was traced; no program is kept before."""
    eager._program.cache_clear()
    found: list[bool] = []
    for module in (batched, packed, paged):

        def canonicalize(*args: Any, steps: Any = module.canonicalize, **arguments: Any) -> Any:
            found.append(isinstance(args[0] if args else arguments["query"], jax.core.Tracer))
            return steps(*args, **arguments)

        monkeypatch.setattr(module, "canonicalize", canonicalize)
    yield found
    eager._program.cache_clear()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_eager_call_is_checked_and_traced_once(name: str, traces: list[bool]) -> None:
    call = FUNCTIONS[name]
    found = [call(x) for x in (Q, Q + 1, Q - 1)]
    assert traces == [True]
    calls.assert_same(found, [jax.jit(call)(x) for x in (Q, Q + 1, Q - 1)])


# Two values of each argument. Arrays are data, and all others are in the key.
ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "bias": (draw(4, 5, 7), draw(5, 5, 7)),
    "mask": (jnp.arange(7) < 3, jnp.arange(7) > 2),
    "scale": (0.5, 0.25),
    "scale-of-numpy": (np.float32(0.5), np.float32(0.25)),
    "scale-as-array": (jnp.float32(0.5), jnp.float32(0.25)),
    "is_causal": (False, True),
    "query_seq_lengths": (jnp.array([2, 5]), jnp.array([4, 3])),
    "key_value_seq_lengths": (jnp.array([2, 7]), jnp.array([4, 5])),
    "key_value_seq_lengths-of-numpy": (np.array([2, 7]), np.array([4, 5])),
    "local_window_size": ((2, 1), (1, 2)),
    "return_residual": (False, True),
    "logits_soft_cap": (1.5, 2.5),
    "segment_ids": (
        (jnp.arange(10).reshape(2, 5) // 3, jnp.arange(14).reshape(2, 7) // 4),
        (jnp.arange(10).reshape(2, 5) // 4, jnp.arange(14).reshape(2, 7) // 5),
    ),
    "sinks": (draw(6, 6), draw(7, 6)),
    "query_offset": (1, 2),
    "query_offset-as-array": (jnp.array([1, 3]), jnp.array([2, 0])),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_eager_call_gets_no_program_of_other_arguments(name: str) -> None:
    argument = name.partition("-")[0]
    window = {} if argument == "local_window_size" else {"local_window_size": (2, 3)}

    def call(x: Any) -> Any:
        return attention(Q, K, V, **window | {argument: x})

    first, second = (jax.tree.leaves(call(x)) for x in ARGUMENTS[name])
    if argument != "return_residual":
        assert not np.allclose(first[0], second[0], atol=1e-3)
    for found, x in ((first, ARGUMENTS[name][0]), (second, ARGUMENTS[name][1])):
        calls.assert_same(found, jax.tree.leaves(jax.jit(lambda x=x: call(x))()))


class Number:
    """A number that may change, as a tensor of another library is: it has a hash, which stays."""

    shape = ()

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


def test_a_number_that_was_changed_in_place_is_read_again() -> None:
    scale = Number(0.5)
    before = attention(Q, K, V, scale=scale)
    scale.value = 0.25
    calls.assert_same(attention(Q, K, V, scale=scale), attention(Q, K, V, scale=0.25))
    calls.assert_same(before, attention(Q, K, V, scale=0.5))


@pytest.mark.parametrize("name", ["score_mod", "mask_mod"])
def test_a_call_with_a_function_keeps_no_program(name: str, traces: list[bool]) -> None:
    """A value that the function captures may have changed since the last call."""
    captured = [1]
    mods = {"score_mod": lambda s, b, h, q, k: captured[0] * s, "mask_mod": lambda b, h, q, k: q >= k - captured[0]}
    first = attention(Q, K, V, **{name: mods[name]})
    captured[0] = 3
    second = attention(Q, K, V, **{name: mods[name]})
    assert traces == [False, False] and eager._program.cache_info().currsize == 0
    assert (first != second).any()


def test_an_offset_of_each_token_compiles_no_program_of_its_own() -> None:
    """A loop that decodes passes another one in each step."""
    found = [attention(Q[:, :1], K, V, query_offset=step, is_causal=True) for step in (1, 2)]
    before = eager._program.cache_info().currsize
    found += [attention(Q[:, :1], K, V, query_offset=step, is_causal=True) for step in (3, np.int64(4))]
    assert eager._program.cache_info().currsize == before
    for step, x in enumerate(found, 1):
        expected = jax.jit(functools.partial(attention, is_causal=True))(Q[:, :1], K, V, query_offset=jnp.int32(step))
        calls.assert_same(x, expected)


EQUAL = {
    "window": ({"local_window_size": 1}, {"local_window_size": True}),
    "window-side": ({"local_window_size": (1, 1)}, {"local_window_size": (1, True)}),
    "scale": ({"scale": 1.0}, {"scale": True}),
    "cap": ({"logits_soft_cap": 1}, {"logits_soft_cap": True}),
    "offset": ({"query_offset": 1, "is_causal": True}, {"query_offset": 1.0, "is_causal": True}),
    "flag": ({"is_causal": 1}, {"is_causal": 1.0}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_an_error_is_raised_even_if_an_equal_value_has_a_program(name: str) -> None:
    fits, equal = EQUAL[name]
    attention(Q, K, V, **fits)
    with pytest.raises(TypeError, match=f"`{next(iter(equal))}`"):
        attention(Q, K, V, **equal)


@pytest.mark.parametrize("name", ["query_offset", "is_causal"])
def test_an_argument_of_none_is_not_its_default(name: str) -> None:
    attention(Q, K, V)
    with pytest.raises(TypeError, match=f"`{name}` is None"):
        attention(Q, K, V, **{name: None})


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])


# Settings that a trace or the place of a program depends on.
SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "arch": lambda: target_arch("sm_80"),
    "mesh": lambda: jax.set_mesh(mesh_of(AxisType.Auto)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_eager_call_gets_no_program_of_another_setting(name: str, traces: list[bool]) -> None:
    expected = attention(Q, K, V)
    assert len(traces) == 1
    with SETTINGS[name]():
        found = [attention(Q, K, V) for _ in range(2)]
    assert len(traces) == 2
    attention(Q, K, V)
    assert len(traces) == 2
    for out in found:
        calls.assert_same(jax.device_get(out), jax.device_get(expected))


def test_precision_is_that_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    attend = vjp.attend

    def spy(spec: Any, *rest: Any) -> Any:
        seen.append(spec.precision)
        return attend(spec, *rest)

    monkeypatch.setattr(vjp, "attend", spy)
    x = draw(8, 1, 3, 1, 8)  # a size of no other test
    for precision in ("default", "highest", "default"):
        with jax.default_matmul_precision(precision):
            attention(x, x, x)
    assert seen == ["default", "highest"]


def test_results_are_on_the_default_device_of_each_call() -> None:
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 8)).astype("float32")
    for device in jax.devices()[:2]:
        with jax.default_device(device):
            y = jnp.array(x)
            assert attention(y, y, y).devices() == {device}
    committed = jax.device_put(x, jax.devices()[2])
    assert attention(committed, committed, committed).devices() == {jax.devices()[2]}


KINDS = {
    "auto": AxisType.Auto,
    "explicit": pytest.param(
        AxisType.Explicit,
        marks=pytest.mark.skipif(
            jax.__version_info__ < (0, 9), reason="jax 0.8 fails on custom_partitioning under Explicit"
        ),
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_results_are_split_as_the_operands_of_each_call(kind: AxisType) -> None:
    mesh, x = mesh_of(kind), draw(9, 2, 5, 2, 8)
    expected = attention(x, x, x)
    with jax.set_mesh(mesh):
        for spec in (PartitionSpec("data"), PartitionSpec(), PartitionSpec(None, None, "data")):
            y = jax.device_put(x, NamedSharding(mesh, spec))
            out = attention(y, y, y)
            assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
            calls.assert_same(jax.device_get(out), jax.device_get(expected))
    assert attention(x, x, x).devices() == x.devices()


# What has no program of its own.

TRANSFORMED: dict[str, Callable[[], Any]] = {
    "jit": lambda: jax.make_jaxpr(lambda x: attention(x, K, V))(Q),
    "jit-of-constants": lambda: jax.make_jaxpr(lambda: attention(Q, K, V))(),
    "vmap": lambda: jax.make_jaxpr(jax.vmap(lambda x: attention(x, K, V)))(Q[None]),
    "grad": lambda: jax.make_jaxpr(jax.grad(lambda x: attention(x, K, V).sum()))(Q),
    "grad-of-constants": lambda: jax.make_jaxpr(jax.grad(lambda x: (x * attention(Q, K, V)).sum()))(Q),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_traced_call_is_no_nested_program(name: str) -> None:
    attention(Q, K, V)
    jaxpr = TRANSFORMED[name]().jaxpr
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert "jax_fastattn_attend" in names
    assert not {"jit", "pjit"} & {*names}


@pytest.mark.parametrize("transform", [jax.vmap, jax.jacfwd, jax.jacrev], ids=["vmap", "jacfwd", "jacrev"])
def test_a_transformed_call_has_no_kept_program(transform: Any, traces: list[bool]) -> None:
    call = lambda x: attention(x, K[:, :3], V[:, :3])
    x = Q[None] if transform is jax.vmap else Q[:, :2]
    found = transform(call)(x)
    assert traces and all(traces)
    assert eager._program.cache_info().currsize == 0
    calls.assert_same(found, jax.jit(transform(call))(x))


def test_disable_jit_runs_single_operations(traces: list[bool]) -> None:
    expected = attention(Q, K, V)
    assert traces == [True]
    with jax.disable_jit():
        for _ in range(2):
            calls.assert_same(attention(Q, K, V), expected)
    assert traces == [True, False, False]


BAD = Q.at[0, 0, 0, 0].set(jnp.nan)
DEBUG = {
    "nans": (jax.debug_nans, lambda: attention(BAD, K, V)),
    "infs": (jax.debug_infs, lambda: attention(Q, K, V, mask=jnp.zeros((5, 7), bool))),
}


@pytest.mark.parametrize("name", DEBUG)
def test_debug_settings_find_values_of_a_call_that_has_a_program(name: str) -> None:
    setting, call = DEBUG[name]
    call()
    with setting(True), pytest.raises(FloatingPointError, match="encountered in jax_fastattn"):
        call()


def test_without_the_name_of_jax_calls_run_as_they_are(traces: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "jax_core", types.SimpleNamespace())
    found = [call_dense(Q) for _ in range(2)]
    assert traces == [False, False]
    for out in found:
        calls.assert_same(out, jax.jit(call_dense)(Q))


def test_new_scales_do_not_keep_programs_for_ever() -> None:
    def program(scale: float) -> weakref.ref[Any]:
        return weakref.ref(eager._program(call_dense, ("scale",), (scale,), (float,)))

    first = program(-1.0)
    last = [program(float(scale)) for scale in range(eager.KEPT_PROGRAMS)][-1]
    gc.collect()
    assert first() is None
    assert last() is not None
    eager._program.cache_clear()


# Warnings. An eager call is lowered for the CPU here, and asks what a call for CUDA asks.


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    calls.refuse_float32(monkeypatch)
    monkeypatch.setattr("jax_fastattn.ops.dispatch.refuse_platform", dispatch.takes_cuda)
    eager._program.cache_clear()
    yield
    eager._program.cache_clear()
    dispatch._warned.cache_clear()


def here(above: int) -> str:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return re.escape(f"{__file__}:{frame.f_back.f_lineno - above}")


@pytest.mark.usefixtures("asks")
def test_an_eager_call_warns_once_and_names_its_own_place() -> None:
    with pytest.warns(UserWarning) as caught:
        attention(Q, K, V)
        place = here(above=1)
        attention(Q, K, V)
    (warning,) = caught
    assert re.search(f"for the call at {place}: the dtype is float32", str(warning.message))


@pytest.mark.usefixtures("asks")
def test_a_program_that_is_made_of_an_older_trace_warns_of_this_call() -> None:
    """For another device: jax has the trace of the call before, which was made elsewhere."""
    with pytest.warns(UserWarning):
        attention(Q, K, V)
    dispatch._warned.cache_clear()
    q, k, v = jax.device_put((Q, K, V), jax.devices()[1])
    with pytest.warns(UserWarning) as caught:
        attention(q, k, v)
        place = here(above=1)
    assert re.search(f"for the call at {place}: ", str(caught[0].message))


@pytest.mark.usefixtures("asks")
def test_a_call_that_has_a_program_warns_of_new_reasons() -> None:
    wide = jnp.zeros((1, 2, 1, 264), jnp.bfloat16)
    for arch in ("sm_90a", "sm_80"):
        dispatch._warned.cache_clear()
        with target_arch(arch), pytest.warns(UserWarning, match="head dim 264"):
            attention(wide, wide, wide)


@pytest.mark.usefixtures("asks")
def test_a_warning_that_was_an_error_leaves_no_program_behind() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="takes the XLA path"):
            attention(Q, K, V)
        calls.assert_same(attention(Q, K, V), attention(Q, K, V, implementation="xla"))
