# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls of the public functions, made from the named cases of `testing`, and what they should give.

What is expected comes from `reference.py`, differentiated by JAX: nothing of the ops and their rules is in it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stand_in
from testing import compare
from testing.launches import count_launches  # noqa: F401 (tests call it as one of this module)

from jax_fastattn import attention
from jax_fastattn.cases.case import Case
from jax_fastattn.compilation import libraries
from jax_fastattn.ffi import registry
from jax_fastattn.kernels import support
from jax_fastattn.ops import dispatch
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import DIFFERENTIABLE as _DIFFERENTIABLE
from jax_fastattn.spec import PLANES, AttentionSpec, Operands

# The differentiable arrays that a caller passes. Planes are made of what functions capture.
DIFFERENTIABLE = tuple(name for name in _DIFFERENTIABLE if name not in PLANES)

# Every array of a call, in small sizes that are pairwise distinct.
EVERYTHING = Case(
    query_length=5,
    key_length=7,
    num_kv_heads=3,
    group=2,
    head_dim=8,
    v_head_dim=4,
    is_causal=True,
    window=(6, None),
    logits_soft_cap=2.0,
    bias="bnts",
    mask="bnts",
    query_seq_lengths=(5, 4),
    key_value_seq_lengths=(6, 7),
    query_offset=(3, 2),
    segments=3,
    sinks="n",
    scale=-0.6,
    scale_is_array=True,
    dlse=True,
)

Arrays = dict[str, Any]


def arrays_of(operands: Operands) -> Arrays:
    """The arrays of a call of `attention`, by name; canonical shapes are valid arguments."""
    segment_ids = operands.query_segment_ids, operands.key_value_segment_ids
    found = operands._asdict() | {
        "segment_ids": None if segment_ids == (None, None) else segment_ids,
        "sinks": None if operands.sinks is None else operands.sinks[0],
        "scale": None if operands.scale is None else operands.scale[0, 0],
    }
    return {name: x for name, x in found.items() if x is not None and not name.endswith("_segment_ids")}


def options_of(spec: AttentionSpec) -> dict[str, Any]:
    """The other arguments of a call of `attention`."""
    scale = {} if "scale" in spec.present else {"scale": spec.scale}
    return scale | {
        "is_causal": spec.is_causal,
        "local_window_size": spec.window,
        "logits_soft_cap": spec.logits_soft_cap,
    }


def through_api(spec: AttentionSpec, operands: Operands) -> Any:
    """`attention` as the comparisons of `testing.compare` take it."""
    return attention(**arrays_of(operands), **options_of(spec), return_residual=True)


def refuse_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes float32 a dtype that no kernel takes, for tests of what happens then."""
    monkeypatch.setattr(support, "DTYPES", ("bfloat16", "float16"))
    dispatch._warned.cache_clear()


def quick_jit(function: Any) -> Any:
    """Halves the time to compile what runs once."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def check(case: Case, seed: int = 0) -> compare.Results:
    """Asserts that `attention` is right on `case`, gradients included, and returns its results.

    float32 is held against the reference itself; dtypes of 16 bits against the error budget of `testing.compare`.
    """
    spec, operands, cotangents = case.spec(), case.operands(jax.random.key(seed)), case.cotangents(jax.random.key(1))
    actual = quick_jit(functools.partial(compare.evaluate, through_api, spec))(operands, *cotangents)
    if case.dtype == "float32":
        reference = functools.partial(compare.evaluate, attention_reference, spec)
        assert_same(actual, quick_jit(reference)(operands, *cotangents))
    else:
        compare.assert_within_budget(actual, *compare.expected(spec, operands, *cotangents))
    return actual


def loss_of(case: Case, function: Any = through_api, seed: int = 1) -> Any:
    """A scalar function of the arrays of `case`, in which each element of both results has its own weight."""
    spec, (dout, dlse) = case.spec(), case.cotangents(jax.random.key(seed))
    has_segments = "query_segment_ids" in spec.present

    def loss(arrays: Arrays) -> jax.Array:
        if function is through_api:
            out, lse = attention(**arrays, **options_of(spec), return_residual=True)
        else:
            query_ids, key_ids = arrays["segment_ids"] if has_segments else (None, None)
            given = {name: x for name, x in arrays.items() if name != "segment_ids"} | {
                "query_segment_ids": query_ids,
                "key_value_segment_ids": key_ids,
                "sinks": arrays["sinks"][None] if "sinks" in arrays else None,
                "scale": arrays["scale"][None, None] if "scale" in arrays else None,
            }
            out, lse = function(spec, Operands(**given))
        total = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32))
        return total if dlse is None else total + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) * dlse)

    return loss


def gradients(loss: Any, arrays: Arrays) -> Arrays:
    """The value of `loss`, under "loss", and its gradients by name."""
    wanted = {name: x for name, x in arrays.items() if name in DIFFERENTIABLE}
    value, found = jax.value_and_grad(lambda wanted: loss(arrays | wanted))(wanted)
    return found | {"loss": value}


def expected_gradients(case: Case) -> Any:
    """`gradients` of the reference, jitted, as a function of the arrays."""
    return quick_jit(functools.partial(gradients, loss_of(case, attention_reference)))


def assert_same(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Equal trees of arrays, up to rounding; errors are held against the largest element of an array."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)

    def compare_leaf(path: Any, x: Any, y: Any) -> None:
        assert (x.shape, x.dtype) == (y.shape, y.dtype), jax.tree_util.keystr(path)
        x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
        bound = tolerance * (1 + np.abs(y).max(initial=0.0, where=np.isfinite(y)))
        np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(compare_leaf, actual, expected)


def lower_for_cuda(patch: Any, directory: Any, arch: str | None = "sm_90a") -> None:
    """From here on, lowering for CUDA needs no GPU and compiles nothing: a stand-in takes each kernel's place.

    Outside blocks of `target_arch` it is for `arch`.
    """
    patch.setenv("JAX_FASTATTN_CACHE_DIR", str(directory))
    stand_in.stand_in_compiler(patch)
    patch.setattr(libraries, "is_installed", lambda module: True)
    patch.setattr(registry, "named_arch", lambda: registry._target.value or arch)
    dispatch._warned.cache_clear()


def cuda_text(function: Any, *arrays: Any) -> str:
    """StableHLO of `function`, lowered for CUDA, without what the custom calls carry."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return re.sub(r'object = "[^"]*"', "", text)
