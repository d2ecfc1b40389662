# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The calls that libraries make reach `attention` in a form that kernels can take, with the right numbers.

Flax is the real one. The others are stand-ins, written in the style of what the library does: Keras 3
(keras/src/backend/jax/nn.py), equinox and equimo (equinox/nn/_attention.py), MaxText (layers/attention_op.py) and
levanter (layers/attention.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calls
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import assert_same
from test_flax import make_inputs, make_layer

from jax_fastattn import attention
from jax_fastattn.integrations import jax_nn
from jax_fastattn.integrations.flax import Packed, attention_fn, bind
from jax_fastattn.ops import call_sites
from jax_fastattn.spec import AttentionSpec, Operands

WINDOW = 5
LENGTHS = jnp.array([11, 7])
IDS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3], [1, 1, 2, 2, 2, 2, 2, 0, 0, 0, 0]])

Call = Callable[..., jax.Array]


def before(length: int) -> jax.Array:
    """By how many positions a key stands before a query, `[T, T]`."""
    return jnp.arange(length)[:, None] - jnp.arange(length)[None, :]


def shown(lengths: jax.Array, length: int) -> jax.Array:
    """Causality, a window and padding in one mask, `[B, T, T]`."""
    band = (before(length) >= 0) & (before(length) < WINDOW)
    return band[None] & (jnp.arange(length)[None] < lengths[:, None])[:, None, :]


def in_document(ids: jax.Array) -> jax.Array:
    """Causality inside documents, `[B, T, T]`."""
    return (ids[:, :, None] == ids[:, None, :]) & (before(ids.shape[1]) >= 0)[None]


def keras(query: Any, key: Any, value: Any, lengths: Any, ids: Any) -> jax.Array:
    """A layer adds the axis of heads; the backend asks for cuDNN first, and tries XLA if that raises."""
    mask = jnp.expand_dims(shown(lengths, query.shape[1]), 1)
    for implementation in ("cudnn", "xla"):
        try:
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                bias=None,
                mask=mask,
                scale=query.shape[-1] ** -0.5,
                is_causal=False,
                implementation=implementation,
            )
        except NotImplementedError:
            continue
    raise AssertionError("both implementations raised")


def linen(query: Any, key: Any, value: Any, lengths: Any, ids: Any) -> jax.Array:
    """Masks are float32, zeros and ones, and so is their combination."""
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    tokens = jnp.ones(query.shape[:2])
    is_token = (jnp.arange(query.shape[1])[None] < lengths[:, None]).astype(jnp.float32)
    padding = nn.make_attention_mask(tokens, is_token)
    band = (before(query.shape[1]) < WINDOW).astype(jnp.float32)[None, None]
    with jax.numpy_dtype_promotion("standard"):
        mask = nn.combine_masks(nn.make_causal_mask(tokens), padding, band)
    assert mask.dtype == jnp.float32
    return attention_fn(
        query, key, value, mask=mask, dropout_rate=0.0, broadcast_dropout=False, deterministic=True, dtype=query.dtype
    )


def equinox(query: Any, key: Any, value: Any, lengths: Any, ids: Any) -> jax.Array:
    """A module is mapped over the batch, and attention over the heads of one entry, with a mask `[T, S]`."""
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))

    def head(query: Any, key: Any, value: Any, mask: Any) -> jax.Array:
        arrays = (x[:, None] for x in (query, key, value))
        return jax.nn.dot_product_attention(*arrays, mask=mask[None])[:, 0]

    heads = jax.vmap(head, in_axes=(1, 1, 1, None), out_axes=1)
    return jax.vmap(heads)(query, key, value, shown(lengths, query.shape[1]))


def equimo(query: Any, key: Any, value: Any, lengths: Any, ids: Any) -> jax.Array:
    """A module is mapped over the batch."""
    masks = shown(lengths, query.shape[1])[:, None]
    return jax.vmap(lambda *x: jax.nn.dot_product_attention(*x[:3], mask=x[3]))(query, key, value, masks)


def maxtext(query: Any, key: Any, value: Any, lengths: Any, ids: Any) -> jax.Array:
    """Segment ids of packed rows, with a causal flag."""
    return bind(is_causal=True)(query, key, value, mask=Packed(segment_ids=ids))


def maxtext_mask(query: Any, key: Any, value: Any, lengths: Any, ids: Any) -> jax.Array:
    """Segment ids and causality in a mask with axes of key/value heads and of groups."""
    mask = in_document(ids)[:, None, None]
    return attention_fn(query, key, value, mask=mask[:, 0])


@dataclass(frozen=True)
class AttentionMask:
    """What levanter hands to its backends in the place of an array."""

    is_causal: bool = False
    segment_ids: tuple[jax.Array, jax.Array] | None = None
    sliding_window: int | None = None


def levanter(query: Any, key: Any, value: Any, lengths: Any, ids: Any) -> jax.Array:
    """A structured mask whose parts become arguments."""
    mask = AttentionMask(is_causal=True, segment_ids=(ids, ids))
    window = None if mask.sliding_window is None else (mask.sliding_window - 1, None)
    return attention(
        query, key, value, is_causal=mask.is_causal, segment_ids=mask.segment_ids, local_window_size=window
    )


BY_MASK = {"keras": keras, "linen": linen, "equinox": equinox, "equimo": equimo}
BY_DOCUMENT = {"maxtext": maxtext, "maxtext-mask": maxtext_mask, "levanter": levanter}
CLIENTS = BY_MASK | BY_DOCUMENT
WITH_IDS = ("maxtext", "levanter")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AttentionSpec, Operands]]:
    """What reaches `attention`."""
    found: list[tuple[AttentionSpec, Operands]] = []
    monkeypatch.setattr(call_sites, "note", lambda *call: found.append(call))
    return found


def assert_reaches_kernels(function: Call, arrays: Any, seen: list[tuple[AttentionSpec, Operands]]) -> str:
    """Asserts that a program lowered for sm_90a launches a kernel, and a prepass if there is a mask or ids.

    Returns:
        The program.
    """
    text = calls.cuda_text(function, *arrays)
    ((spec, _),) = seen
    assert calls.count_launches(text) == (2 if {"mask", "query_segment_ids"} & {*spec.present} else 1)
    return text


def largest_boolean(text: str) -> int:
    """Returns how many elements the largest array of booleans has in a program."""
    return max(math.prod(map(int, shape.split("x")[:-1])) for shape in re.findall(r"tensor<((?:\d+x)+)i1>", text))


def exact(query: Any, key: Any, value: Any, visible: Any) -> jax.Array:
    """Attention with all logits in memory."""
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def arrays_of(length: int, head_dim: int, dtype: Any) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (2, length, heads, head_dim)).astype(dtype)
        for key, heads in zip(keys, (4, 2, 2), strict=True)
    ]


@pytest.mark.parametrize("name", CLIENTS)
def test_numbers_and_gradients(name: str, seen: Any) -> None:
    arrays = arrays_of(11, 8, jnp.float32)
    visible = shown(LENGTHS, 11) if name in BY_MASK else in_document(IDS)

    def gradients(call: Call, *more: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = call(*arrays, *more)
            return jnp.sum(jnp.sin(out)), out

        return calls.quick_jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)

    with jax_nn.installed():
        found = gradients(CLIENTS[name], LENGTHS, IDS)
    assert_same(found, gradients(exact, visible))
    assert len(seen) == 1


@pytest.mark.parametrize("name", CLIENTS)
def test_calls_reach_attention_as_kernels_take_them(
    name: str, seen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In bfloat16: booleans or integers, no bias. No mask is repeated for heads."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    arrays = *arrays_of(129, 64, jnp.bfloat16), LENGTHS, jnp.repeat(IDS, 12, axis=1)[:, :129]
    with jax_nn.installed():
        text = assert_reaches_kernels(CLIENTS[name], arrays, seen)
    assert name in WITH_IDS or largest_boolean(text) == 2 * 129 * 129
    ((spec, operands),) = seen
    wanted = {"query_segment_ids", "key_value_segment_ids"} if name in WITH_IDS else {"mask"}
    assert set(spec.present) == {"query", "key", "value", *wanted}
    dtypes = {np.dtype(getattr(operands, x).dtype) for x in wanted}
    assert dtypes == {np.dtype(np.int32 if name in WITH_IDS else bool)}


@pytest.mark.parametrize("family", ["linen", "nnx", "nnx through jax.nn"])
def test_modules_of_flax_pass_booleans(family: str, seen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their mask functions return float32."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    own = {} if family == "nnx through jax.nn" else {"attention_fn": attention_fn}
    layer = make_layer(family.split()[0], dtype=jnp.bfloat16, **own)
    inputs = make_inputs((2, 17))
    params = make_layer(family.split()[0])(None, *inputs)
    mask = nn.make_causal_mask(jnp.ones((2, 17)))
    assert mask.dtype == jnp.float32
    with jax_nn.installed(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_reaches_kernels(lambda x: layer(params, x, mask=mask), inputs, seen)
    (_, operands) = seen[-1]
    assert operands.mask.dtype == bool and operands.mask.shape == (2, 1, 17, 17)
    assert operands.query.dtype == jnp.bfloat16 and operands.bias is None


def test_a_call_without_kernels_is_noticed(seen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    calls.refuse_float32(monkeypatch)
    arrays = arrays_of(129, 64, jnp.bfloat16)
    assert_reaches_kernels(lambda *x: bind(is_causal=True)(*x), arrays, seen)
    with pytest.raises(AssertionError):
        assert_reaches_kernels(lambda q, k, v: q, arrays, seen)
    seen.clear()
    with pytest.warns(UserWarning, match="the dtype is float32"), pytest.raises(AssertionError):
        assert_reaches_kernels(lambda *x: attention(*(y.astype(jnp.float32) for y in x)), arrays, seen)
    seen.clear()
    bias = jnp.zeros((1, 1, 129, 129))
    assert_reaches_kernels(lambda *x: attention(*x, bias), arrays, seen)
