# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Forward mode and second derivatives of `attention`, in every order and under every transformation.

tests/xla/test_tangents.py has the numbers of the XLA path in float64, test_forward_mode_meshes.py the meshes.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet
from testing.poison import poison

from jax_fastattn import attention, attention_varlen
from jax_fastattn.canonical import validation
from jax_fastattn.ops.vjp import LSE_NAME, OUT_NAME
from jax_fastattn.reference import attention_reference

Arrays = calls.Arrays
ARGS = (0, 1, 2)


def qkv(seed: int, shape: tuple[int, ...] = (2, 5, 7, 4, 2, 8)) -> tuple[jax.Array, ...]:
    b, t, s, n, k, h = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    return tuple(jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True))


X, U, W = qkv(0), qkv(1), qkv(2)
QUERIES = [x[0] for x in (U, W, X)]


def ours(*x: jax.Array) -> jax.Array:
    return attention(*x, is_causal=True)


def plain(*x: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(*x, is_causal=True)


def loss(f: Any) -> Any:
    return lambda *x: jnp.sum(jnp.sin(f(*x).astype(jnp.float32)))


def dot(xs: Any, ys: Any) -> jax.Array:
    return sum(jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True))


def half(xs: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), xs)


def stack(*trees: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def hvp(f: Any, u: Any = U) -> Any:
    return lambda *x: jax.jvp(jax.grad(loss(f), ARGS), x, u)[1]


def hvp_of_query(f: Any) -> Any:
    return lambda u: jax.jvp(jax.grad(lambda q: loss(f)(q, *X[1:])), X[:1], (u,))[1]


def scanned(f: Any) -> Any:
    return lambda *x: jax.lax.scan(lambda q, _: (f(q, *x[1:]), None), x[0], None, length=3)[0]


# Each takes an attention function of three arrays.
MODES: dict[str, Any] = {
    "jvp": lambda f: jax.jvp(f, X, U),
    "jacfwd": lambda f: jax.jacfwd(f, ARGS)(*X),
    "jacrev": lambda f: jax.jacrev(f, ARGS)(*X),
    "forward-over-reverse": lambda f: jax.jvp(jax.grad(loss(f), ARGS), X, U),
    "reverse-over-forward": lambda f: jax.grad(lambda *x: jax.jvp(loss(f), x, U)[1], ARGS)(*X),
    "reverse-over-reverse": lambda f: jax.grad(lambda *x: dot(jax.grad(loss(f), ARGS)(*x), U), ARGS)(*X),
    "forward-over-forward": lambda f: jax.jvp(lambda *x: jax.jvp(f, x, U)[1], X, W),
    "hessian": lambda f: jax.hessian(lambda q: loss(f)(q, *X[1:]))(X[0]),
    # What is linear is differentiated, too: tangents and cotangents.
    "through-the-tangent": lambda f: jax.grad(lambda u: jnp.sum(jnp.sin(jax.jvp(f, X, u)[1])))(U),
    "through-the-cotangent": lambda f: jax.jvp(lambda c: jax.vjp(f, *X)[1](c), U[:1], W[:1]),
    "through-the-direction": lambda f: jax.grad(lambda u: jnp.sum(jnp.sin(hvp_of_query(f)(u))))(U[0]),
    "linearized-hvp": lambda f: jax.linearize(hvp_of_query(f), U[0])[1](W[0]),
    "second-tangent-through-both": lambda f: jax.grad(
        lambda u, w: jnp.sum(jnp.sin(jax.jvp(lambda *x: jax.jvp(f, x, u)[1], X, w)[1])), (0, 1)
    )(U, W),
    "vmap-of-jvp": lambda f: jax.vmap(lambda u: jax.jvp(f, X, u)[1])(stack(U, W)),
    "jvp-of-vmap": lambda f: jax.jvp(
        lambda q: jax.vmap(lambda q: f(q, *X[1:]))(q), (stack(X[0], U[0]),), (stack(U[0], W[0]),)
    ),
    "vmap-of-hvp": lambda f: jax.vmap(lambda u: hvp(f, u)(*X))(stack(U, W)),
    "hvp-of-vmap": lambda f: jax.jvp(
        jax.grad(lambda q, k: jnp.sum(jnp.sin(jax.vmap(lambda q: f(q, k, X[2]))(q))), (0, 1)),
        (stack(X[0], U[0]), X[1]),
        (stack(U[0], W[0]), U[1]),
    ),
    "vmap-of-vmap-of-jvp": lambda f: jax.vmap(
        lambda q: jax.vmap(lambda u: jax.jvp(f, (q, *X[1:]), (u, *U[1:]))[1], in_axes=1)(jnp.stack(QUERIES, 1))
    )(stack(X[0], W[0])),
    "remat": lambda f: hvp(jax.checkpoint(f))(*X),
    "scan": lambda f: jax.jvp(scanned(f), X, U),
    "hvp-of-scan": lambda f: hvp(scanned(f))(*X),
    "conjugate-gradients": lambda f: jax.grad(
        lambda b: jnp.sum(jax.scipy.sparse.linalg.cg(lambda u: 5 * u + hvp_of_query(f)(u), b, maxiter=3)[0])
    )(X[0]),
}  # fmt: skip


@pytest.mark.numbers
@pytest.mark.parametrize("mode", MODES)
def test_as_jax_nn(mode: str) -> None:
    found, expected = (calls.quick_jit(lambda f=f: MODES[mode](f))() for f in (ours, plain))
    calls.assert_same(found, expected, 5e-5)


@pytest.mark.parametrize("disabled", [False, True], ids=["eager", "disable_jit"])
def test_without_jit(disabled: bool) -> None:
    with jax.disable_jit(disabled):
        found = hvp(ours)(*X)
    calls.assert_same(found, calls.quick_jit(hvp(plain))(*X), 5e-5)


@pytest.mark.parametrize("length", [6, 470], ids=["at-once", "in-chunks"])
def test_the_tangent_of_a_hessian_product_in_its_direction_is_another_one(length: int) -> None:
    """The latter with its own direction, and with its own tangents of output and log-sum-exp, which chunks take."""
    x, u, w = (qkv(seed, (1, length, length + 9, 1, 1, 8)) for seed in range(3))

    def product(u: Any) -> Any:
        return jax.jvp(jax.grad(loss(ours), ARGS), x, u)[1]

    found, expected = calls.quick_jit(lambda: (jax.jvp(product, (u,), (w,))[1], product(w)))()
    calls.assert_same(found, expected)


def test_one_batch_entry_with_a_bias_of_its_own() -> None:
    """A tangent that is mapped alone: output, log-sum-exp and bias are not, and the batch is of size 1."""
    x, bias = [y[:1] for y in X], jax.random.normal(jax.random.key(3), (1, 1, 5, 7))
    basis = stack(bias, bias**2, jnp.ones_like(bias))

    def along(u: jax.Array) -> Any:
        return jax.jvp(
            jax.grad(lambda q, b: loss(lambda *y: attention(*y, b))(q, *x[1:]), (0, 1)), (x[0], bias), (x[0], u)
        )

    found = calls.quick_jit(jax.vmap(along))(basis)
    calls.assert_same(found, stack(*(calls.quick_jit(along)(u) for u in basis)))


def test_a_linearized_function_is_called_twice() -> None:
    out, line = jax.linearize(ours, *X)
    expected, expected_line = jax.linearize(plain, *X)
    calls.assert_same(out, expected)
    for u in (U, W):
        calls.assert_same(line(*u), expected_line(*u))


def test_a_tangent_of_integers_is_ignored() -> None:
    lengths = jnp.array([3, 7])

    def run(q: jax.Array, n: jax.Array) -> jax.Array:
        return attention(q, *X[1:], key_value_seq_lengths=n)

    found = jax.jvp(run, (X[0], lengths), (U[0], np.zeros(2, jax.dtypes.float0)))
    calls.assert_same(found, jax.jvp(lambda q: run(q, lengths), X[:1], U[:1]), 0)


# Every operand that has a tangent


def results_of(case: calls.Case, function: Any) -> tuple[Any, Arrays]:
    """Both results as a function of the differentiable arrays; log-sum-exps that are not finite do not count."""
    spec, operands = case.spec(), case.operands(jax.random.key(0))
    arrays = calls.arrays_of(operands)

    def results(wanted: Arrays) -> Any:
        if function is attention:
            out, lse = attention(**arrays | wanted, **calls.options_of(spec), return_residual=True)
        else:
            given = dict(wanted)
            given |= {"sinks": wanted["sinks"][None]} if "sinks" in wanted else {}
            given |= {"scale": wanted["scale"][None, None]} if "scale" in wanted else {}
            out, lse = attention_reference(spec, operands._replace(**given))
        return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

    return results, {name: x for name, x in arrays.items() if name in calls.DIFFERENTIABLE}


def moved(arrays: Arrays, seed: int) -> Arrays:
    keys = jax.random.split(jax.random.key(seed), len(arrays))
    return {name: jax.random.normal(key, x.shape, x.dtype) for key, (name, x) in zip(keys, arrays.items(), strict=True)}


def total(results: Any) -> Any:
    return lambda x: sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in results(x))


OPERAND_MODES: dict[str, Any] = {
    "forward": lambda f, x, u: jax.jvp(f, (x,), (u,)),
    "forward-over-forward": lambda f, x, u: jax.jvp(lambda x: jax.jvp(f, (x,), (u,))[1], (x,), (moved(x, 9),)),
    "forward-over-reverse": lambda f, x, u: jax.jvp(jax.grad(total(f)), (x,), (u,)),
    "reverse-over-forward": lambda f, x, u: jax.grad(lambda x: jax.jvp(total(f), (x,), (u,))[1])(x),
    "reverse-over-reverse": lambda f, x, u: jax.grad(
        lambda x: sum(jnp.vdot(g, u[n]) for n, g in jax.grad(total(f))(x).items())
    )(x),
}
CASES = {
    "everything": calls.EVERYTHING,
    "lengths": dataclasses.replace(
        calls.EVERYTHING,
        logits_soft_cap=None,
        segments=0,
        query_seq_lengths=(3, 4),
        key_value_seq_lengths=(5, 0),
        bias="ns",
    ),
}


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("mode", "case"), [*((mode, "everything") for mode in OPERAND_MODES), ("forward-over-reverse", "lengths")]
)
def test_every_operand(mode: str, case: str) -> None:
    (f, x), (reference, _) = (results_of(CASES[case], function) for function in (attention, attention_reference))
    run = OPERAND_MODES[mode]
    found, expected = (calls.quick_jit(lambda x, u, f=f: run(f, x, u))(x, moved(x, 3)) for f in (f, reference))
    calls.assert_same(found, expected, 1e-4)


@pytest.mark.numbers
@pytest.mark.parametrize("name", calls.DIFFERENTIABLE)
def test_one_operand_alone(name: str) -> None:
    """Only its tangent is bound, in the gradient and in the second derivative too."""
    (f, x), (reference, _) = (results_of(calls.EVERYTHING, function) for function in (attention, attention_reference))
    u = moved(x, 3)[name]

    def run(f: Any) -> Any:
        return lambda y: jax.jvp(jax.grad(lambda y: total(f)(x | {name: y})), (y,), (u,))

    calls.assert_same(calls.quick_jit(run(f))(x[name]), calls.quick_jit(run(reference))(x[name]), 1e-4)
    moves = re.findall(r"moved=\((.*?)\)", str(jax.make_jaxpr(run(f))(x[name])))
    assert len(moves) == 2  # of a tangent and of a second gradient
    assert set(moves) == {f"'{name}',"}


def test_tangents_have_the_dtype_of_their_array() -> None:
    """Bias, sinks and scale have gradients in float32 inside, and here they are bfloat16."""
    f, x = results_of(dataclasses.replace(calls.EVERYTHING, dtype="bfloat16", bias="ns"), attention)
    x = half(x)
    found = jax.jit(lambda x, u: [run(f, x, u) for run in OPERAND_MODES.values()])(x, moved(x, 3))
    out, expected = f(x), [x, x]
    assert jax.tree.map(jnp.shape, found[0][1]) == jax.tree.map(jnp.shape, out)
    assert [y.dtype for y in found[0][1]] == [y.dtype for y in out]
    for (gradient, second), wanted in zip([found[2], (found[3], found[4])], [expected, expected], strict=True):
        for got, want in zip((gradient, second), wanted, strict=True):
            assert {n: (y.shape, y.dtype) for n, y in got.items()} == {n: (y.shape, y.dtype) for n, y in want.items()}
            assert all(np.isfinite(y.astype(jnp.float32)).all() and np.any(y) for y in got.values())


def test_padding_is_not_read() -> None:
    """NaN in invisible rows of operands and of tangents, in both directions."""
    case = dataclasses.replace(
        calls.EVERYTHING,
        logits_soft_cap=None,
        segments=0,
        query_seq_lengths=(3, 4),
        key_value_seq_lengths=(5, 0),
    )
    spec, operands = case.spec(), case.operands(jax.random.key(0))
    bad, *_ = poison(spec, operands, *case.cotangents(jax.random.key(0)))
    clean, bad = calls.arrays_of(operands), calls.arrays_of(bad)

    def pick(arrays: Arrays) -> Arrays:
        return {name: x for name, x in arrays.items() if name in calls.DIFFERENTIABLE}

    def run(arrays: Arrays, u: Arrays) -> Any:
        def f(x: Arrays) -> jax.Array:
            return attention(**arrays | x, **calls.options_of(spec), return_residual=True)

        both = jax.jvp(lambda x: jax.jvp(f, (x,), (u,)), (pick(arrays),), (u,))
        return both, jax.jvp(jax.grad(total(lambda x: f(x)[:1])), (pick(arrays),), (u,))

    run = calls.quick_jit(run)
    expected = run(clean, pick(clean))
    for x, u in ((bad, bad), (clean, bad)):
        found = run(x, pick(u))
        calls.assert_same(found[0], expected[0], 1e-6)
        calls.assert_same(found[1], expected[1], 1e-6)


def test_second_derivative_where_values_are_zero() -> None:
    """The output is 0 there. Its products with cotangents are not read where it is 0; their derivatives are."""
    sinks = jnp.linspace(-1.0, 2.0, 4)
    x = (*X[:2], jnp.zeros_like(X[2]), jnp.float32(0.3), sinks)
    u = (*U, jnp.float32(1.0), jnp.ones(4))

    def by_hand(q: Any, k: Any, v: Any, scale: Any, sinks: Any) -> Any:
        k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
        both = jnp.concatenate([logits, jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))], -1)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(both, -1)[..., :-1], v)

    def run(f: Any) -> Any:
        return calls.quick_jit(lambda: jax.jvp(jax.grad(loss(f), argnums=range(5)), x, u)[1])()

    found, expected = run(lambda q, k, v, scale, s: attention(q, k, v, scale=scale, sinks=s)), run(by_hand)
    calls.assert_same(found, expected)
    assert np.any(expected[3])
    assert np.any(expected[4])


def test_packed_sequences() -> None:
    x, u = (tuple(y[0] for y in z) for z in (X, U))
    starts = jnp.array([0, 2, 5]), jnp.array([0, 4, 7])

    def packed(*x: Any) -> Any:
        return attention_varlen(*x, *starts, is_causal=True)

    def apart(q: Any, k: Any, v: Any) -> Any:
        return jnp.concatenate([plain(q[:2], k[:4], v[:4]), plain(q[2:], k[4:], v[4:])])

    def run(f: Any) -> Any:
        return calls.quick_jit(lambda: (jax.jvp(f, x, u), hvp(f, u)(*x)))()

    calls.assert_same(run(packed), run(apart))


# What rested on `custom_vjp`


def test_an_eager_call_traces_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [y[:, :3] for y in X]  # sizes of no other test
    run = lambda: (attention(*x), hvp(attention, tuple(x))(*x))
    jax.block_until_ready(run())

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("traced again")

    for module, name in (("passes", "forward"), ("passes", "backward"), ("tangents", "_tangent")):
        monkeypatch.setattr(f"jax_fastattn.xla.{module}.{name}", refuse)
    jax.block_until_ready(run())
    with pytest.raises(AssertionError, match="traced again"):
        attention(*(y[:, :2] for y in x))


LENGTHS = jnp.array([3, 7])
# Functions of a query and a number, their launches, and whether their gradient has a cotangent of the log-sum-exp.
ZEROS: dict[str, tuple[Any, int, list[str]]] = {
    "all": (jax.grad(lambda q, w: jnp.sum(ours(q, *half(X[1:]))) * w, (0, 1)), 2, ["False"]),
    "unmoved-operands": (jax.grad(lambda q, w: jnp.sum(ours(q, *half(X[1:]))) * w, 1), 1, []),
    "stopped-output": (jax.grad(lambda q, w: jnp.sum(jax.lax.stop_gradient(ours(q, *half(X[1:]))) * q) * w), 1, []),
    "unused-residual": (
        jax.grad(lambda q, w: jnp.sum(attention(q, *half(X[1:]), return_residual=True)[0]) * w), 2, ["False"]
    ),
    "residual-alone": (
        jax.grad(lambda q, w: jnp.sum(attention(q, *half(X[1:]), return_residual=True)[1])), 2, ["True"]
    ),
    "integers": (
        lambda q, w: jax.jvp(
            lambda n: attention(q, *half(X[1:]), key_value_seq_lengths=n),
            (LENGTHS,),
            (np.zeros(2, jax.dtypes.float0),),
        ), 1, []
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_that_jax_knows_launch_nothing(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    function, launches, with_dlse = ZEROS[name]
    calls.lower_for_cuda(monkeypatch, tmp_path)
    arguments = half(X[0]), jnp.bfloat16(2.0)
    assert re.findall(r"with_dlse=(\w+)", str(jax.make_jaxpr(function)(*arguments))) == with_dlse
    text = calls.cuda_text(function, *arguments)
    assert calls.count_launches(text) == launches
    assert "_tangent" not in text


def test_an_array_is_not_converted_again() -> None:
    """JAX would linearize the conversion, which takes as long as the call itself."""

    def same(x: jax.Array) -> jax.Array:
        assert validation.as_array("query", x) is x
        return x

    same(X[0])
    jax.vjp(same, X[0])


def test_checkpoint_policy_saves_both_names_for_second_derivatives() -> None:
    policy = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
    saved = jax.checkpoint(ours, policy=policy)
    calls.assert_same(calls.quick_jit(hvp(saved))(*X), calls.quick_jit(hvp(plain))(*X), 5e-5)


def test_residuals_can_be_offloaded() -> None:
    """Both names go to the memory of the host after the forward pass and come back before the backward pass."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[OUT_NAME, LSE_NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )
    gradient = jax.grad(loss(jax.checkpoint(ours, policy=policy)), ARGS)
    text = str(jax.make_jaxpr(gradient)(*X))
    assert len(re.findall("device_put", text)) == 4
    calls.assert_same(jax.jit(gradient)(*X), jax.jit(jax.grad(loss(plain), ARGS))(*X))


def test_third_derivatives_name_attention_and_the_way_out() -> None:
    def second(q: jax.Array) -> jax.Array:
        return jnp.vdot(hvp_of(q), U[0])

    def hvp_of(q: jax.Array) -> jax.Array:
        return jax.jvp(jax.grad(lambda q: loss(ours)(q, *X[1:])), (q,), U[:1])[1]

    for third in (jax.grad(second), lambda q: jax.jvp(second, (q,), U[:1])):
        with pytest.raises(NotImplementedError, match=r"jax_fastattn.attention has no third derivative.*stop_gradient"):
            third(X[0])
    twice = lambda q: jax.jvp(lambda q: jax.jvp(lambda q: ours(q, *X[1:]), (q,), U[:1])[1], (q,), U[:1])[1]
    with pytest.raises(NotImplementedError, match="third derivative"):
        jax.jvp(twice, X[:1], U[:1])
    stopped = jax.grad(lambda q: jnp.vdot(hvp_of(jax.lax.stop_gradient(q)), q))(X[0])
    calls.assert_same(stopped, hvp_of(X[0]))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_taylor_mode_names_attention_and_the_way_out(wrap: Any) -> None:
    """It was a KeyError of a primitive."""
    function = wrap(lambda q: jnp.sum(ours(q, *X[1:])))
    with pytest.raises(NotImplementedError, match=r"jax_fastattn.attention.*jax.experimental.jet.*jax.jvp"):
        jet.jet(function, X[:1], ([U[0], W[0]],))


def test_export_of_a_jvp_and_its_gradient() -> None:
    def slope(q: jax.Array) -> jax.Array:
        return jax.jvp(lambda q: loss(ours)(q, *X[1:]), (q,), U[:1])[1]

    exported = jax.export.deserialize(jax.export.export(jax.jit(slope))(X[0]).serialize(vjp_order=1))
    calls.assert_same(jax.grad(exported.call)(X[0]), calls.quick_jit(jax.grad(slope))(X[0]), 1e-6)


# CUDA

HVPS: dict[str, Any] = {
    "forward-over-reverse": lambda f: lambda x, u: jax.jvp(jax.grad(loss(f), ARGS), x, u)[1],
    "reverse-over-forward": lambda f: lambda x, u: jax.grad(lambda *x: jax.jvp(loss(f), x, u)[1], ARGS)(*x),
    "reverse-over-reverse": lambda f: lambda x, u: jax.grad(
        lambda *x: dot(jax.grad(loss(f), ARGS)(*x), u), ARGS
    )(*x),
}  # fmt: skip


@pytest.mark.parametrize("mode", HVPS)
def test_a_hessian_product_takes_the_tangents_that_jax_has(mode: str) -> None:
    """Those of output and log-sum-exp; in chunks, XLA would compute them twice. A transpose has none."""
    text = str(jax.make_jaxpr(HVPS[mode](ours))(X, U))
    assert re.findall(r"with_results=(\w+)", text) == [str(mode == "forward-over-reverse")]


def test_a_jvp_runs_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It launches the forward kernel and the one of tangents, without a warning."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    text = calls.cuda_text(lambda x, u: jax.jvp(ours, x, u), half(X), half(U))
    assert calls.count_launches(text) == 2
    assert _shares(text) == {"forward", "forward_tangent"}


@pytest.mark.parametrize("mode", HVPS)
def test_hessian_products_run_three_kernels(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In any order an HVP launches the backward kernel, too; one warning tells the rest."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match="no kernel computes second derivatives") as caught:
        text = calls.cuda_text(HVPS[mode](ours), half(X), half(U))
    assert len(caught) == 1
    assert __file__ in str(caught[0].message)
    assert calls.count_launches(text) == 3
    assert _shares(text) == {"forward", "forward_tangent", "backward", "backward_tangent"}


def _shares(text: str) -> set[str]:
    return set(re.findall(r"func private @jax_fastattn_((?!launch)\w+)\(", text))


UNSUPPORTED: dict[str, Any] = {
    "operands are float16": {"dtype": jnp.float16},
    "a head dim is 136": {"head_dim": 136},
    "there is a bias": {"bias": jnp.ones((1, 1, 1, 9))},
    "there is a `score_mod`": {"score_mod": lambda score, b, h, q, k: score * 2.0},
    "there is dropout": {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
}


@pytest.mark.parametrize("cause", UNSUPPORTED)
def test_tangents_without_a_kernel_say_why(cause: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A jvp launches the forward kernel, and one warning tells the rest; whoever insists gets an error."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    options = dict(UNSUPPORTED[cause])
    shape, dtype = (1, 9, 2, options.pop("head_dim", 16)), options.pop("dtype", jnp.bfloat16)
    x = (jnp.ones(shape, dtype),) * 3

    def tangent(**more: Any) -> str:
        return calls.cuda_text(lambda x, u: jax.jvp(lambda *x: attention(*x, **options, **more), x, u), x, x)

    with pytest.warns(UserWarning, match=f"no kernel computes tangents.*{cause}") as caught:
        assert calls.count_launches(tangent()) == 1
    assert len(caught) == 1
    assert __file__ in str(caught[0].message)
    with pytest.raises(NotImplementedError, match=rf'implementation="cuda".*\n.*no kernel computes tangents.*{cause}'):
        tangent(implementation="cuda")


def test_insisting_on_kernels_refuses_second_derivatives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)

    def insisting(*x: jax.Array) -> jax.Array:
        return attention(*x, implementation="cuda")

    assert calls.count_launches(calls.cuda_text(jax.grad(loss(insisting), ARGS), *half(X))) == 2
    assert calls.count_launches(calls.cuda_text(lambda x, u: jax.jvp(insisting, x, u), half(X), half(U))) == 2
    with pytest.raises(NotImplementedError, match=r'implementation="cuda".*\n.*no kernel computes second derivatives'):
        calls.cuda_text(HVPS["forward-over-reverse"](insisting), half(X), half(U))


def test_a_call_that_no_kernel_runs_does_not_warn_of_tangents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    calls.refuse_float32(monkeypatch)
    with pytest.warns(UserWarning, match="float32") as caught:
        calls.cuda_text(lambda x, u: jax.jvp(ours, x, u), X, U)
    assert len(caught) == 1
    calls.cuda_text(lambda x, u: jax.jvp(lambda *x: attention(*x, implementation="xla"), x, u), half(X), half(U))
