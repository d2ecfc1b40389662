# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_fastattn.attention` as the `attention_fn` of Flax's attention modules, linen and nnx.

    flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)
    flax.nnx.MultiHeadAttention(8, 512, attention_fn=bind(is_causal=True, implementation="cuda"), rngs=rngs)

A packed batch takes the place of the mask. It is data of the call, so new segment ids and boundaries cause no retrace:

    layer = flax.nnx.MultiHeadAttention(8, 512, attention_fn=bind(is_causal=True), decode=False, rngs=rngs)

    @flax.nnx.jit
    def step(layer, x, segment_ids):  # x [batch, length, 512], segment_ids [batch, length]
        return layer(x, mask=Packed(segment_ids=segment_ids))

Every argument that a module may pass is honored or raises. Two things differ from Flax's own function: softmax is in
float32 for every dtype, and a query that sees no key gives 0, while Flax gives the mean of the values.

The attention weights never exist in memory, with dropout neither. Sowing them raises an error. What dropout keeps
depends on the module's key as in `jax_fastattn.attention`, and so is not what Flax's own function would keep.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_fastattn import keywords
from jax_fastattn.api import attention, attention_varlen
from jax_fastattn.canonical import validation
from jax_fastattn.canonical.dropout import check_key
from jax_fastattn.keywords import explained


@explained
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """The tokens of a packed batch that attend to each other. A module takes it in the place of a mask.

    Modules of Flax hand the mask of a call to their attention_fn unchanged, unless they decode. A `Packed` is a pytree,
    so it may also be an argument of `jax.jit`, `nnx.jit`, `nn.remat` and the like. Give one of the two attributes:

    Attributes:
        segment_ids: integers `[batch..., T]` (with T = S), or a pair `([batch..., T], [batch..., S])`; tokens attend
            inside equal ids.
        cu_seqlens: integers `[batch..., sequences + 1]`, or a pair, of queries and of keys: the boundaries of the
            sequences in each row of the batch, as for `jax_fastattn.attention_varlen`. The kernels need no prepass for
            them.
    """

    segment_ids: Any = None
    cu_seqlens: Any = None

    def given(self) -> list[str]:
        """Returns the names of the attributes that are not None."""
        return [
            name for name, x in (("segment_ids", self.segment_ids), ("cu_seqlens", self.cu_seqlens)) if x is not None
        ]


@explained
def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | Packed | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    # linen drops, without a word, the arguments that an attention_fn does not name: the next four are named to be seen.
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    is_causal: bool = False,
    input_positions: jax.Array | None = None,
    deterministic_gradients: bool = False,
    **options: Any,
) -> jax.Array:
    """Computes attention as `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention` do.

    `bind` sets options for modules that have no argument for them.

    Args:
        query: `[batch..., T, N, H]` with any number of batch axes, none included.
        key: `[batch..., S, K, H]`, where K divides N.
        value: `[batch..., S, K, D]`.
        bias: broadcastable to `[batch..., N, T, S]`, or with K heads, added to the scaled logits. At or below -2.36e38
            it counts as -inf, as a mask that T5 adds to its position bias does. Default None.
        mask: broadcastable to `[batch..., N, T, S]`, or with K heads, which groups of query heads share. It
            holds bools, or numbers as the mask functions of Flax return them; a query may attend where it is not 0. A
            `Packed` instead lets tokens attend inside their own sequence. Default None.
        broadcast_dropout: whether all batch entries and heads drop the same weights, as in Flax. Default True.
        dropout_rng: the key of dropout, which a module makes for each call. Default None; a rate needs a key.
        dropout_rate: the rate of dropout on the attention weights, as in Flax. Default 0.
        deterministic: whether dropout is off, as in Flax. Default False.
        dtype: the dtype that query, key and value are cast to. Default None: their common dtype.
        precision: the precision of products of float32, as in Flax: a `jax.lax.Precision`, a
            `jax.lax.DotAlgorithmPreset`, the name of one, or a pair of the same. Default None: as
            `jax.default_matmul_precision` says.
        module: where to sow the attention weights; must be None, the default.
        force_fp32_for_softmax: accepted and not used, since the softmax is always in float32.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None, the default.
        is_causal: query i sees the keys up to i. Default False. Do not set it with `functools.partial`: nnx passes its
            own at every call; `bind` joins the two.
        input_positions: accepted and not used, since only rotary embeddings need positions; rotate query and key
            before the call. Default None.
        deterministic_gradients: `deterministic` of `jax_fastattn.attention`. Default False.
        **options: other keyword arguments of `jax_fastattn.attention`. If there are several batch axes, arguments
            with a batch axis must have them flattened into one.

    Returns:
        `[batch..., T, N, D]` in the common dtype.

    Raises:
        NotImplementedError: for sown weights, custom einsums, or a precision without a name; the message lists every
            one.
        ValueError: for shapes that do not fit, or `is_causal` in a decoding step.
    """
    del input_positions
    if text := keywords.unknown("attention_fn", options):
        raise TypeError(text)
    if "dropout_key" in options:
        raise TypeError("`dropout_key` is given, expected the key as modules pass it; pass `dropout_rng`")
    query, key, value = (validation.as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    bias = None if bias is None else validation.as_array("bias", bias)
    mask = mask if mask is None or isinstance(mask, Packed) else _numbers("mask", mask)
    is_causal = validation.check_flag("is_causal", is_causal)
    deterministic_gradients = validation.check_flag("deterministic_gradients", deterministic_gradients)
    if not validation.check_flag("deterministic", deterministic):
        rng = None if dropout_rng is None else check_key("dropout_rng", dropout_rng)
        options |= {"dropout_rate": dropout_rate, "dropout_key": rng, "broadcast_dropout": broadcast_dropout}
    packed = mask.given() if isinstance(mask, Packed) else []
    _refuse(
        bias=bias is not None and "cu_seqlens" in packed,
        module=module is not None,
        precision=_precision_name(precision) == "",
        einsum_dot_general=einsum_dot_general is not None,
        qk_attn_weights_einsum=qk_attn_weights_einsum is not None,
        attn_weights_value_einsum=attn_weights_value_einsum is not None,
        return_residual=validation.check_flag("return_residual", options.pop("return_residual", False)),
    )
    for name, array in {"query": query, "key": key, "value": value}.items():
        if array.ndim < 3 or array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"`{name}` has shape {array.shape}; expected [batch..., length, heads, head_dim] "
                f"with the batch axes {query.shape[:-3]} of `query`."
            )
    batch, (query_length, key_length) = query.shape[:-3], (query.shape[-3], key.shape[-3])
    if is_causal and query_length == 1 < key_length and "query_offset" not in options:
        raise ValueError(
            f"`is_causal` with one query and {key_length} keys lets the query see only the first key. In a decoding "
            "step the module's mask already hides the future: leave `is_causal` out, or bind `query_offset`."
        )
    dtype = _dtype(dtype, query=query, key=key, value=value)
    arrays = [x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)]
    options |= {"is_causal": is_causal, "deterministic": deterministic_gradients}
    if bias is not None:
        options["bias"] = _fold_broadcast("bias", bias, batch)
    with contextlib.nullcontext() if precision is None else _precision(precision):
        if isinstance(mask, Packed):
            out = _attend_packed(arrays, mask, batch, options)
        else:
            out = attention(
                *arrays, mask=None if mask is None else _fold_broadcast("mask", mask.astype(bool), batch), **options
            )
    return out.reshape(*batch, *out.shape[1:])


@explained
def bind(*, is_causal: bool = False, **options: Any) -> Callable[..., jax.Array]:
    """Returns an `attention_fn` with options set, for options that a Flax module has no argument for.

    It differs from `functools.partial` in two ways. Attention is causal if either the module or `bind` asks for it; nnx
    modules pass `is_causal=False` at every call, which would override the value of a partial. No bound option can be
    overridden.

    Args:
        is_causal: query i sees the keys up to i, without a mask array. Default False. In a decoding step of the module
            (one query, several keys, and a mask of the module's) only the mask hides the future.
        **options: `bias`, `deterministic_gradients` and the keyword arguments of `jax_fastattn.attention`, such as
            `implementation`, `local_window_size` or `logits_soft_cap`. Segment ids that change from call to call do
            not belong here: to nnx a module with another attention_fn is another module, so that a jitted step is
            traced again at every call. Pass `mask=Packed(segment_ids=...)` to the module instead.

    Returns:
        A function with the signature of `attention_fn`. It raises `TypeError` if a bound option is passed to it again.
    """
    bound_is_causal = validation.check_flag("is_causal", is_causal)
    if text := keywords.unknown("bind", options, of="attention_fn"):
        raise TypeError(text)

    @functools.wraps(attention_fn)  # also hands on the signature, by which linen chooses what it passes
    def bound(
        query: jax.Array, key: jax.Array, value: jax.Array, *args: Any, is_causal: bool = False, **kwargs: Any
    ) -> jax.Array:
        mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
        has_mask = mask is not None and not isinstance(mask, Packed)
        query, key = (validation.as_array(name, x) for name, x in (("query", query), ("key", key)))
        lengths = query.shape[-3:-2] + key.shape[-3:-2]
        decodes = has_mask and lengths[:1] == (1,) < lengths[1:] and "query_offset" not in options
        is_causal = validation.check_flag("is_causal", is_causal) or (bound_is_causal and not decodes)
        return attention_fn(query, key, value, *args, is_causal=is_causal, **options, **kwargs)

    return bound


def _attend_packed(
    arrays: list[jax.Array], packed: Packed, batch: tuple[int, ...], options: dict[str, Any]
) -> jax.Array:
    """Attends inside the sequences of each row; `arrays` are query, key and value with one batch axis."""
    if len(packed.given()) != 1:
        found = " and ".join(f"`{name}`" for name in packed.given()) or "nothing"
        raise ValueError(f"`mask` is a `Packed` with {found}; expected `segment_ids` or `cu_seqlens`, one of them.")
    (name,) = packed.given()
    both = getattr(packed, name)
    is_pair = isinstance(both, (tuple, list)) and len(both) == 2
    both = [validation.as_integers(name, x) for x in (both if is_pair else (both, both))]
    for x in both:
        if x.ndim == 0 or x.shape[:-1] != batch:
            raise ValueError(
                f"`{name}` of `mask` has shape {x.shape}; expected the batch axes {batch} of `query` and one more."
            )
    counts = [x.shape[-1] for x in both]
    if name == "cu_seqlens" and (counts[0] != counts[1] or counts[0] == 0):
        raise ValueError(
            f"`{name}` of `mask` has {counts[0]} boundaries of queries and {counts[1]} of keys; expected as many of "
            "both, one more than there are sequences."
        )
    of_queries, of_keys = (x.reshape(math.prod(batch), x.shape[-1]) for x in both)
    if name == "segment_ids":
        return attention(*arrays, segment_ids=(of_queries, of_keys), **options)
    own: dict[str, jax.Array] = {}
    key = options.pop("dropout_key", None)
    if key is not None and options["broadcast_dropout"]:
        options["dropout_key"] = key
    elif key is not None:  # rows of the batch have masks of their own, as they have without packing
        own["dropout_key"] = jax.random.split(key, math.prod(batch))

    def attend(own: dict[str, jax.Array], *arrays: jax.Array) -> Any:
        return attention_varlen(*arrays, **own, **options)

    return jax.vmap(attend)(own, *arrays, of_queries, of_keys)


def _refuse(**arguments: Any) -> None:
    """Raises `NotImplementedError` with every argument that fused attention cannot honor."""
    remedies = {
        "bias": "attention inside `cu_seqlens` takes no bias: give `Packed` the `segment_ids` instead",
        "module": "the weights to sow never exist in memory: call the module with `sow_weights=False`",
        "precision": "set one precision for both operands, by a name that `jax.default_matmul_precision` takes",
        "einsum_dot_general": "the products are part of the kernel: leave it out",
        "qk_attn_weights_einsum": "the products are part of the kernel: leave `qk_attn_weights_einsum_cls` out",
        "attn_weights_value_einsum": "the products are part of the kernel: leave `attn_weights_value_einsum_cls` out",
        "return_residual": "a module takes one array: call `jax_fastattn.attention` for the residual",
    }
    # The error has names alone, since a module is printed on pages.
    asked = [f"`{name}`: {remedies[name]}" for name, value in arguments.items() if value]
    if asked:
        raise NotImplementedError(
            "jax_fastattn's attention_fn cannot honor "
            + "; ".join(asked)
            + ". Alternatively, keep the module's default attention_fn, which materializes the weights."
        )


def _numbers(name: str, x: Any) -> jax.Array:
    """Returns an array of bools or numbers."""
    array = validation.as_array(name, x)
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"`{name}` has dtype {array.dtype}; expected bool or numbers.")
    return array


def _dtype(dtype: Any, **operands: jax.Array) -> Any:
    """Returns the dtype that query, key and value are cast to."""
    if dtype is None:
        try:
            return jnp.result_type(*operands.values())
        except ValueError as error:
            found = ", ".join(f"`{name}` has dtype {x.dtype}" for name, x in operands.items())
            raise TypeError(f"{found}, which have no common dtype; pass `dtype`, or cast them.") from error
    try:
        found = None if isinstance(dtype, (jax.Array, np.ndarray)) else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in validation.FLOATS:
        raise TypeError(f"`dtype` is {dtype!r}; expected one of {', '.join(validation.FLOATS)}.")
    return found


def _precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns the setting of JAX in which products have a precision that has a name."""
    try:
        return jax.default_matmul_precision(_precision_name(precision))
    except ValueError as error:
        raise ValueError(f"`precision` is {precision!r}; expected a name that JAX knows, such as highest.") from error


def _precision_name(precision: Any) -> str:
    """Returns the name that `jax.default_matmul_precision` takes for a precision; "" if it has none."""
    if isinstance(precision, (tuple, list)) and len(precision) != 2:
        return ""
    if isinstance(precision, (tuple, list)):
        first, *others = {_precision_name(x) for x in precision}  # pyright: ignore (any objects)
        return "" if others else first
    if isinstance(precision, jax.lax.Precision):
        return precision.name.lower()
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return precision.name
    return precision if isinstance(precision, str) else "default" if precision is None else ""


def _fold_broadcast(name: str, x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Reshapes `x`, which broadcasts to `[batch..., N, T, S]`, to four axes; a batch axis that `x` lacks is 1."""
    rank = len(batch) + 3
    if x.ndim > rank:
        raise ValueError(f"`{name}` has shape {x.shape}; expected at most {rank} axes, [batch..., heads, query, key].")
    x = _expand(x, rank)
    leading = x.shape[:-3]
    if any(size not in (1, full) for size, full in zip(leading, batch, strict=True)):
        raise ValueError(f"`{name}` has batch axes {leading}; expected what broadcasts to {batch}, those of `query`.")
    if any(size != 1 for size in leading):
        x = jnp.broadcast_to(x, batch + x.shape[-3:])
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _expand(x: jax.Array, rank: int) -> jax.Array:
    """Prepends axes of size 1 until there are `rank`."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)
