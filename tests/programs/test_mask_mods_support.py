# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which functions of positions kernels take, why not the others, and what is compiled of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import causal
from jax_fastattn.canonical import batched
from jax_fastattn.canonical.shapes import shapes_of
from jax_fastattn.kernels.choose import kernel_spec, list_sizes, prepass_configs, prepass_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.support import describe_lists, unsupported_reasons
from jax_fastattn.ops.cuda.prepass import _scalars  # pyright: ignore[reportPrivateUsage]
from jax_fastattn.spec import AttentionSpec, Operands, Problem

B, T, N, K = 2, 512, 4, 2
X = np.linspace(-1, 1, T, dtype=np.float32)
IDS = jnp.arange(B * T).reshape(B, T) // 100


def call(mask_mod: Any, length: int = T, **options: Any) -> tuple[AttentionSpec, Operands]:
    """Returns spec and shapes of a call."""
    query, key = (jax.ShapeDtypeStruct((B, length, heads, 64), jnp.bfloat16) for heads in (N, K))
    return shapes_of(batched.canonicalize, query=query, key=key, value=key, mask_mod=mask_mod, **options)


def reasons(mask_mod: Any, length: int = T, **options: Any) -> list[str]:
    return [str(x) for x in unsupported_reasons(Problem.of(*call(mask_mod, length, **options)), "sm_90a")]


def prepass_keys(mask_mod: Any) -> list[KernelSpec]:
    """Returns the compile keys of the prepasses of both passes."""
    spec, operands = call(mask_mod)
    kernels = [kernel_spec(Problem.of(spec, operands), op, "sm_90a") for op in ("forward", "backward")]
    return [prepass_spec(spec, config, "sm_90a") for kernel in kernels for config in prepass_configs(kernel)]


def window(width: Any) -> Any:
    return lambda b, h, q, k: (q - k < width) & (q >= k)


def test_functions_with_code_run_in_kernels() -> None:
    points, shown = jnp.asarray(X), jnp.ones((T, T), jnp.bool)
    for mod in (
        causal(),
        causal(jnp.array([3, 4])),
        window(5),
        lambda b, h, q, k: IDS[b, q] == IDS[b, k],
        lambda b, h, q, k: shown[q, k],
        lambda b, h, q, k: jnp.exp(points[q]) < 2 * jnp.sqrt(jnp.abs(points[k])),  # XLA computes both
    ):
        assert not reasons(mod)
        assert not reasons(mod, is_causal=True, segment_ids=IDS, logits_soft_cap=5.0, sinks=jnp.ones(N))


def test_others_are_refused_with_the_reason() -> None:
    points = jnp.asarray(X)
    (found,) = reasons(lambda b, h, q, k: jnp.exp(-jnp.abs(points[q] - points[k])) > 0.5)
    assert "`mask_mod` computes `exp` of a query and a key together, which has no instruction" in found
    (found,) = reasons(lambda b, h, q, k: jnp.sort(jnp.array([q + b, k]))[0] < 9)
    assert found.startswith("`mask_mod` has no code, because `") and "or pass an array as `mask`" in found
    many = jnp.ones((17, T), jnp.int32)
    (found,) = reasons(lambda b, h, q, k: sum(many[i, k] * (q + i) for i in range(17)) > 0)
    assert found.startswith("`mask_mod` reads 17 numbers of queries, keys and distances; the kernels take 16")


def test_the_limit_of_bits_is_a_reason() -> None:
    def near(width: Any) -> Any:
        return lambda b, h, q, k: (q - k).astype(jnp.float32) * 0.5 < width(h)

    assert not reasons(near(lambda h: 5.0), 32 * 1024)
    (found,) = reasons(near(lambda h: 5.0), 64 * 1024)
    assert found.startswith("the bits of `mask_mod` would take more than 256 MiB in a pass")
    # Heads have bits of their own.
    (found,) = reasons(near(lambda h: 9.0 * h.astype(jnp.float32)), 32 * 1024)
    assert "256 MiB" in found
    # Edge tiles evaluate a function of integers.
    assert not reasons(window(jnp.int32(5)), 64 * 1024)


def test_lists_have_the_planes_that_a_function_reads() -> None:
    def sizes(mod: Any, **options: Any) -> list[tuple[int, ...]]:
        problem = Problem.of(*call(mod, **options))
        kernels = [kernel_spec(problem, op, "sm_90a") for op in ("forward", "backward")]
        return [list_sizes(problem, config)[:3] for kernel in kernels for config in prepass_configs(kernel)]

    assert sizes(causal()) == [(1, 1, 1)] * 2
    assert sizes(lambda b, h, q, k: IDS[b, q] == IDS[b, k]) == [(B, 1, 1)] * 2
    assert sizes(lambda b, h, q, k: q - k < h) == [(1, N, 1), (1, N, N // K)]
    assert sizes(causal(), mask=jnp.ones((B, K, T, T), jnp.bool)) == [(B, K, 1)] * 2
    assert sizes(lambda b, h, q, k: q - k < h, mask=jnp.ones((B, K, T, T), jnp.bool)) == [(B, N, 1), (B, N, N // K)]
    problem = Problem.of(*call(lambda b, h, q, k: q - k < h + b))
    assert describe_lists(problem, "sm_90a") == (
        "a prepass evaluates `mask_mod` (forward: lists of keys for tiles 64 x 64, 8 planes of bits; backward: lists "
        "of queries for tiles 128 x 128, 8 planes of bits)"
    )


def test_scalars_say_which_operands_have_numbers_of_their_own() -> None:
    heads = jnp.arange(N)
    spec, operands = call(lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q - k < heads[h]) & (heads[k % 4] > 0))
    (config, *_) = prepass_configs(kernel_spec(Problem.of(spec, operands), "forward", "sm_90a"))
    found = _scalars(spec, operands, list_sizes(Problem.of(spec, operands), config))
    # Operands are integers of heads, of keys and of queries, in this order; the integers of keys have two planes.
    assert (found.mask_members, found.plane_batches, found.plane_heads) == (N, 0b110, 0b001)
    spec, operands = call(None, mask=jnp.ones((T, T), jnp.bool))
    assert _scalars(spec, operands, list_sizes(Problem.of(spec, operands), config)).plane_heads is None


def test_equal_functions_share_a_prepass() -> None:
    widths = jnp.int32(7), jnp.int32(9)
    assert prepass_keys(window(widths[0])) == prepass_keys(window(widths[1]))
    assert prepass_keys(window(7)) == prepass_keys(window(7))
    # The cache tells kernels apart by this text.
    names = [{repr(x) for x in prepass_keys(mod)} for mod in (window(7), window(9), window(widths[0]))]
    assert len(set.union(*names)) == sum(map(len, names))
    spec, _ = call(None, mask=jnp.ones((T, T), jnp.bool))
    assert not prepass_spec(spec, prepass_keys(causal())[0].config, "sm_90a").features
