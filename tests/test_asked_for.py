# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients that nobody asks for, and cotangents that are zero, cost nothing.

What is asked for is read off the backward primitive; what it costs, off the programs. That each gradient alone is right
is tested in test_grad.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest

from jax_fastattn import attention
from jax_fastattn.cases.case import Case

CASE = Case(
    query_length=5, key_length=7, num_kv_heads=3, group=2, head_dim=8, bias="bnts", sinks="n", scale_is_array=True
)
ARRAYS = calls.arrays_of(CASE.operands(jax.random.key(0)))
OTHERS = ("bias", "sinks", "scale")


def scanned(function: Any) -> Any:
    """The layer's function in a scan over one layer; what is not differentiated is a constant of its body."""
    return lambda arrays: jax.lax.scan(lambda carry, _: (carry + function(arrays), None), 0.0, None, length=1)[0]


TRANSFORMS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "vmap": lambda f: lambda arrays: jax.vmap(f)(jax.tree.map(lambda x: x[None], arrays)).sum(),
}


def backward_params(function: Any, names: tuple[str, ...], arrays: calls.Arrays = ARRAYS) -> tuple[set[str], bool]:
    """The gradients that the one backward primitive of a program computes, and whether it takes a `dlse`."""
    gradient = jax.grad(lambda wanted: function(arrays | wanted))
    text = str(jax.make_jaxpr(gradient)({name: arrays[name] for name in names}))
    (wanted,), (with_dlse,) = re.findall(r"wanted=\((.*?)\)", text), re.findall(r"with_dlse=(\w+)", text)
    return set(re.findall(r"'(\w+)'", wanted)), with_dlse == "True"


def out_alone(arrays: calls.Arrays) -> jax.Array:
    out, _ = attention(**arrays, return_residual=True)
    return out.astype(jnp.float32).sum()


def lse_alone(arrays: calls.Arrays) -> jax.Array:
    _, lse = attention(**arrays, return_residual=True)
    return lse.sum()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradient_of_a_constant_is_computed(transform: str) -> None:
    function = TRANSFORMS[transform](out_alone)
    for names in [("query",), *(("query", name) for name in OTHERS), ("query", *OTHERS)]:
        assert backward_params(function, names)[0] == {"query", "key", "value", *names[1:]}


def test_one_jitted_function_is_differentiated_with_respect_to_one_set_of_operands() -> None:
    """It may be by several: jax 0.8 asserts that the backward rule returns one structure for all of them."""
    function = jax.jit(out_alone)
    for names in [("query",), ("query", "bias"), ("sinks", "scale")]:
        assert backward_params(function, names)[0] == {"query", "key", "value", *names}


@pytest.mark.parametrize("transform", ["plain", "jit", "checkpoint", "vmap"])
def test_zero_cotangent_of_the_log_sum_exp_is_an_operand(transform: str) -> None:
    assert not backward_params(TRANSFORMS[transform](out_alone), ("query",))[1]
    assert backward_params(TRANSFORMS[transform](lse_alone), ("query",))[1]


def test_constant_bias_costs_the_gradient_of_a_bias() -> None:
    """On the XLA path: the sum over batch and heads, and its addition to `[1, 1, 1, T, S]`, before XLA optimizes."""
    arrays = ARRAYS | {"bias": ARRAYS["bias"][:1, :1]}

    def program(*names: str) -> tuple[int, float]:
        lowered = jax.jit(jax.grad(lambda wanted: out_alone(arrays | wanted))).lower({n: arrays[n] for n in names})
        additions = re.findall(r"stablehlo.add .*tensor<1x1x1x5x7xf32>", lowered.as_text())
        return len(additions), lowered.cost_analysis()["flops"]

    (additions, flops), (more_additions, more_flops) = program("query"), program("query", "bias")
    assert additions == 0 < more_additions
    assert more_flops - flops >= ARRAYS["bias"].size - arrays["bias"].size


def test_launches_take_neither_a_zero_dlse_nor_constant_sinks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    arrays = {name: ARRAYS[name] for name in ("query", "key", "value", "sinks")}
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("query", "key", "value")}

    def program(function: Any, *names: str) -> tuple[list[int], list[str]]:
        """Returns how many operands each launch has, and what is computed of the gradient of sinks around them."""
        gradient = jax.grad(lambda wanted: function(arrays | wanted))
        text = calls.cuda_text(gradient, {name: arrays[name] for name in names})
        launches = re.findall(r"[ .]call @jax_fastattn_launch\w*\((.*?)\)", text)
        return [launch.count("%") for launch in launches], re.findall(r"stablehlo\.(reduce|exponential)\b", text)

    assert program(out_alone, "query") == ([4, 6], [])
    assert program(lse_alone, "query") == ([4, 7], [])
    # Over rows and batch entries; and over the axis of one batch entry that the operand has.
    assert program(out_alone, "query", "sinks") == ([4, 7], ["reduce", "reduce"])
