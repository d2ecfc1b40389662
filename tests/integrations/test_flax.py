# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`attention_fn` inside Flax's modules gives what their own attention function gives, forward and backward.

Both module families run behind one face, `Layer`, so that each case is written once. Parameters are the same arrays
on both sides, since the attention function has none.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

with warnings.catch_warnings():
    # flax 0.12.0 looks up two names while it is imported that jax 0.8.0 deprecates.
    warnings.filterwarnings("ignore", r"jax\.(array_ref|ArrayRef) is deprecated", DeprecationWarning)
    from flax import nnx

from jax_fastattn import attention, dropout_mask
from jax_fastattn.integrations.flax import attention_fn, bind

HEADS, FEATURES, QUERIES, KEYS = 4, 24, 7, 11
NNX_MODULE = inspect.signature(nnx.MultiHeadAttention.__init__).parameters
NNX_CALL = inspect.signature(nnx.MultiHeadAttention.__call__).parameters


def make_layer(family: str, **options: Any) -> Callable[..., jax.Array]:
    """A function of (params, *inputs, **call options) around one attention module; `params=None` gives the params."""
    if family == "linen":
        module = nn.MultiHeadDotProductAttention(num_heads=HEADS, **options)

        def apply_linen(params: Any, *inputs: jax.Array, **call: Any) -> Any:
            if params is None:
                return jax.jit(module.init)(jax.random.key(3), *inputs)["params"]
            return module.apply({"params": params}, *inputs, rngs={"dropout": jax.random.key(4)}, **call)

        return apply_linen

    graphdef, initial, rest = nnx.split(
        nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(3), **options), nnx.Param, ...
    )

    def apply_nnx(params: Any, *inputs: jax.Array, **call: Any) -> Any:
        if params is None:
            return initial
        # Its own would have been made outside of `jit`.
        rngs = {} if call.get("deterministic", True) else {"rngs": nnx.Rngs(4)}
        return nnx.merge(graphdef, params, rest)(*inputs, **call, **rngs)

    return apply_nnx


def make_inputs(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, (*shape, FEATURES), dtype) for key, shape in zip(keys, shapes, strict=True)]


def outputs_and_gradients(layer: Callable[..., jax.Array], params: Any, inputs: list[jax.Array], **call: Any) -> Any:
    def loss(params: Any, inputs: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        out = layer(params, *inputs, **call)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, inputs)
    return {"out": out, "gradients": grads}


def assert_same(ours: Any, theirs: Any, tolerance: float, floor: float = 0.1) -> None:
    """Errors are held against the largest entry of an array, or `floor`: a key bias's gradient is noise around 0."""

    def compare(path: Any, x: jax.Array, y: jax.Array) -> None:
        assert x.dtype == y.dtype, path
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        bound = tolerance * max(np.abs(y).max(), floor)
        np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))

    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree_util.tree_map_with_path(compare, ours, theirs)


@dataclass(frozen=True)
class Case:
    """Sizes are pairwise distinct, so that any swapped axis fails."""

    name: str
    batch: tuple[int, ...] = (2,)
    mask: tuple[int, ...] | str | None = None
    cross: bool = False
    dtype: Any = jnp.float32
    module: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make_mask(self) -> jax.Array | None:
        if self.mask is None:
            return None
        if self.mask == "causal":
            return nn.make_causal_mask(jnp.ones((*self.batch, QUERIES)))
        mask = jax.random.bernoulli(jax.random.key(1), 0.6, self.mask)
        # Every query sees some key: what Flax makes of a query that sees none is its own (see the module's docstring).
        return mask.at[..., 0].set(True)


CASES = [
    Case("no-batch", batch=(), mask=(1, QUERIES, QUERIES)),
    Case("two-batch-axes", batch=(2, 3), mask=(2, 3, HEADS, QUERIES, QUERIES)),
    Case("two-batch-axes-broadcast", batch=(2, 3), cross=True, mask=(1, 1, 1, 1, KEYS)),
    Case("causal-float-mask", mask="causal"),
    Case("padding-mask", cross=True, mask=(2, 1, 1, KEYS)),
    Case("mask-per-head", cross=True, mask=(1, HEADS, QUERIES, KEYS)),
    Case("bfloat16", dtype=jnp.bfloat16, module={"dtype": jnp.bfloat16}, mask="causal"),
    Case("dtype-below-inputs", module={"dtype": jnp.bfloat16}),
    Case("normalize-qk-precision-default", module={"normalize_qk": True, "precision": jax.lax.Precision.DEFAULT}),
    Case("dropout-switched-off", cross=True, module={"dropout_rate": 0.5}, call={"deterministic": True}),
]


@pytest.mark.numbers
@pytest.mark.parametrize("family", ["linen", "nnx"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_module_equals_its_default(family: str, case: Case) -> None:
    shapes = [(*case.batch, QUERIES)] + [(*case.batch, KEYS)] * case.cross
    inputs = make_inputs(*shapes, dtype=case.dtype)
    theirs = make_layer(family, qkv_features=32, **case.module)
    ours = make_layer(family, qkv_features=32, attention_fn=attention_fn, **case.module)
    params = make_layer(family, qkv_features=32, **case.module | {"dropout_rate": 0.0})(None, *inputs)
    call = case.call | ({"mask": case.make_mask()} if case.mask else {})
    if family == "nnx" and len(case.batch) > 1 and case.name.endswith("broadcast"):
        call["mask"] = jnp.broadcast_to(call["mask"], (*case.batch, 1, 1, KEYS))  # nnx's own does not broadcast here
    with jax.numpy_dtype_promotion("standard"):  # for jax.nn, which nnx's own function calls
        got, want = (outputs_and_gradients(layer, params, inputs, **call) for layer in (ours, theirs))
    half = case.dtype == jnp.bfloat16 or "dtype" in case.module
    assert_same(got, want, *((3e-2, 2.0) if half else (2e-5,)))


@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_bound_causality_equals_a_causal_mask(family: str) -> None:
    inputs = make_inputs((2, QUERIES))
    theirs, ours = make_layer(family), make_layer(family, attention_fn=bind(is_causal=True))
    params = theirs(None, *inputs)
    mask = nn.make_causal_mask(jnp.ones((2, QUERIES)))
    assert_same(
        outputs_and_gradients(ours, params, inputs),
        outputs_and_gradients(theirs, params, inputs, mask=mask),
        tolerance=2e-5,
    )


@pytest.mark.skipif("is_causal" not in NNX_CALL, reason="this flax.nnx has no is_causal")
def test_nnx_causality_is_honoured() -> None:
    inputs = make_inputs((2, QUERIES))
    theirs, ours = make_layer("nnx"), make_layer("nnx", attention_fn=attention_fn)
    params = theirs(None, *inputs)
    want = outputs_and_gradients(theirs, params, inputs, is_causal=True)
    assert_same(outputs_and_gradients(ours, params, inputs, is_causal=True), want, tolerance=2e-5)
    assert not np.allclose(want["out"], theirs(params, *inputs))


@pytest.mark.skipif("num_kv_heads" not in NNX_MODULE, reason="this flax.nnx has no grouped query attention")
def test_nnx_grouped_query_attention() -> None:
    inputs = make_inputs((2, QUERIES))
    theirs, ours = (make_layer("nnx", num_kv_heads=2, **own) for own in ({}, {"attention_fn": attention_fn}))
    params = theirs(None, *inputs)
    got, want = (outputs_and_gradients(layer, params, inputs) for layer in (ours, theirs))
    assert_same(got, want, tolerance=2e-5)


def test_bias_and_its_gradient_equal_linens() -> None:
    batch, head_dim = (2, 3), 8
    keys = jax.random.split(jax.random.key(5), 4)
    query = jax.random.normal(keys[0], (*batch, QUERIES, HEADS, head_dim))
    key, value = (jax.random.normal(k, (*batch, KEYS, HEADS, head_dim)) for k in keys[1:3])
    shapes = [(HEADS, QUERIES, KEYS), (3, HEADS, 1, KEYS), (2, 1, HEADS, QUERIES, KEYS)]
    biases = [jax.random.normal(keys[3], shape) for shape in shapes]

    def value_and_grad(function: Callable[..., jax.Array]) -> Any:
        def loss(biases: list[jax.Array]) -> jax.Array:
            return sum(jnp.sum(jnp.sin(function(query, key, value, bias))) for bias in biases)

        return jax.jit(jax.value_and_grad(loss))(biases)

    with jax.numpy_rank_promotion("allow"):  # for linen, which adds a bias of lower rank
        want = value_and_grad(nn.dot_product_attention)
    assert_same(value_and_grad(attention_fn), want, tolerance=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_that_holds_positions_and_a_mask_of_the_least_number(dtype: str) -> None:
    """As T5 makes it: a bias of relative positions, plus `finfo.min` for the future and for padding."""
    query, key, value = (jax.random.normal(k, (2, 11, HEADS, 8), dtype) for k in jax.random.split(jax.random.key(5), 3))
    positions = jnp.arange(11)[None, :] - jnp.arange(11)[:, None]
    hidden = (positions > 0)[None] | (jnp.arange(11)[None] >= jnp.array([[11], [7]]))[:, None]
    least = jnp.where(hidden[:, None], jnp.finfo(dtype).min, jnp.zeros((), dtype))

    def value_and_grad(function: Callable[..., jax.Array]) -> Any:
        def loss(table: jax.Array) -> jax.Array:
            bias = table[:, positions % 21].astype(dtype)[None] + least
            return jnp.sum(jnp.sin(function(query, key, value, bias).astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(loss))(jax.random.normal(jax.random.key(6), (HEADS, 21)))

    got, want = value_and_grad(attention_fn), value_and_grad(nn.dot_product_attention)
    assert_same(got, want, tolerance=2e-5 if dtype == "float32" else 0.03)
    assert np.any(got[1])


def test_dropout_with_a_bias_per_key_value_head() -> None:
    keys = jax.random.split(jax.random.key(5), 3)
    query, key, value = (jax.random.normal(k, (2, 5, heads, 8)) for k, heads in zip(keys, (6, 3, 3), strict=True))
    bias = jax.random.normal(jax.random.key(6), (2, 3, 5, 5))
    dropout = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0)}
    found, expected = (attention_fn(query, key, value, x, **dropout) for x in (bias, jnp.repeat(bias, 2, axis=1)))
    assert_same(found, expected, tolerance=2e-6)


def test_linen_decoding_equals_its_default() -> None:
    inputs = make_inputs((2, 5))[0]
    outputs = []
    for own in ({}, {"attention_fn": attention_fn}):
        module = nn.MultiHeadDotProductAttention(HEADS, decode=True, **own)
        variables = module.init(jax.random.key(3), inputs)
        params, cache = variables["params"], variables["cache"]
        for i in range(5):
            out, updated = module.apply({"params": params, "cache": cache}, inputs[:, i : i + 1], mutable=["cache"])
            cache = updated["cache"]
            outputs.append(out)
    for theirs, ours in zip(outputs[:5], outputs[5:], strict=True):
        assert_same(ours, theirs, tolerance=2e-5)


def test_nnx_decoding_equals_its_default() -> None:
    inputs = make_inputs((2, 5))[0]
    outputs = []
    for own in ({}, {"attention_fn": attention_fn}):
        module = nnx.MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(3), **own)
        module.init_cache(inputs.shape)
        outputs.append([module(inputs[:, i : i + 1]) for i in range(5)])
    assert_same(outputs[1], outputs[0], tolerance=2e-5)


def test_bound_causality_allows_decoding_steps_of_the_same_module() -> None:
    inputs = make_inputs((2, 5))[0]
    outputs = []
    for own in ({}, {"attention_fn": bind(is_causal=True)}):
        module = nnx.MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(3), **own)
        module.init_cache(inputs.shape)
        steps = [module(inputs[:, i : i + 1]) for i in range(5)]
        outputs.append(jnp.concatenate(steps, axis=1))
        if own:
            assert_same(module(inputs, decode=False), outputs[0], tolerance=2e-5)
    assert_same(outputs[1], outputs[0], tolerance=2e-5)


def test_linen_decodes_with_bound_causality() -> None:
    inputs = make_inputs((2, 5))[0]
    module = nn.MultiHeadDotProductAttention(HEADS, decode=True)
    variables = module.init(jax.random.key(3), inputs)
    outputs = [
        one.apply(variables, inputs[:, :1], mutable=["cache"])[0]
        for one in (module, module.clone(attention_fn=bind(is_causal=True)))
    ]
    assert_same(outputs[1], outputs[0], tolerance=2e-5)


def test_causality_of_one_query_without_a_mask_raises() -> None:
    x = jnp.zeros((2, QUERIES, HEADS, 8))
    with pytest.raises(ValueError, match="lets the query see only the first key"):
        bind(is_causal=True)(x[:, :1], x, x)


def test_bound_causality_sees_a_mask_that_is_passed_by_position() -> None:
    """As in a decoding step, whose mask alone hides the future."""
    key, mask = make_inputs((2, KEYS, HEADS))[0], jnp.arange(KEYS) < 3
    found = bind(is_causal=True)(key[:, -1:], key, key, None, mask)
    assert_same(found, attention_fn(key[:, -1:], key, key, mask=mask), tolerance=0)


def weights_of(query: jax.Array, key: jax.Array, **options: Any) -> jax.Array:
    """The weights `[B, T, N, S]`: the output for values of zeros and one 1."""
    ones = jnp.broadcast_to(jnp.eye(key.shape[1])[None, :, None], (*key.shape[:3], key.shape[1]))
    return attention_fn(query, key, ones, **options)


def with_mask(mask: Callable[[jax.Array, tuple[int, ...]], jax.Array]) -> Callable[..., jax.Array]:
    """An attention_fn that makes all weights, and keeps what `mask` makes of a module's key and the shape BNTS."""

    def fn(query: jax.Array, key: jax.Array, value: jax.Array, dropout_rng: Any = None, **options: Any) -> jax.Array:
        rate, options["dropout_rate"] = options.get("dropout_rate", 0.0), 0.0
        weights = weights_of(query, key, mask=options.get("mask"), is_causal=options.get("is_causal", False))
        shape = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
        keep = jnp.moveaxis(mask(dropout_rng, shape), 1, 2)
        kept = jnp.where(keep, weights / (1 - round(rate * 2**15) / 2**15), 0)
        return jnp.einsum("btns,bsnd->btnd", kept, jnp.repeat(value, query.shape[2] // value.shape[2], axis=2))

    return functools.wraps(attention_fn)(fn)


def flax_dropout(family: str, call: dict[str, Any], **module: Any) -> None:
    """Asserts that a module with dropout trains as with a formula, with no warning."""
    inputs, broadcast = make_inputs((2, QUERIES)), module.get("broadcast_dropout", True)
    formula = with_mask(lambda key, shape: dropout_mask(key, 0.4, shape, broadcast=broadcast))
    layers = [make_layer(family, dropout_rate=0.4, attention_fn=fn, **module) for fn in (attention_fn, formula)]
    params = make_layer(family, **module)(None, *inputs)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        got, want = (outputs_and_gradients(layer, params, inputs, deterministic=False, **call) for layer in layers)
        assert_same(got, want, tolerance=2e-5)
        evaluated = layers[0](params, *inputs, deterministic=True, **call)
        assert not np.allclose(evaluated, got["out"])
        assert_same(evaluated, make_layer(family, **module)(params, *inputs, **call), tolerance=2e-5)


@pytest.mark.parametrize(("family", "broadcast"), [("linen", True), ("nnx", False)])
def test_a_model_with_attention_dropout_trains(family: str, broadcast: bool) -> None:
    flax_dropout(family, {}, broadcast_dropout=broadcast)


@pytest.mark.skipif("is_causal" not in NNX_CALL, reason="this flax.nnx has no is_causal")
@pytest.mark.skipif("num_kv_heads" not in NNX_MODULE, reason="this flax.nnx has no grouped query attention")
def test_a_causal_model_of_grouped_queries_with_attention_dropout_trains() -> None:
    flax_dropout("nnx", {"is_causal": True}, num_kv_heads=2)


def test_bound_causality_and_windows_with_dropout() -> None:
    inputs = make_inputs((2, QUERIES))
    layer = make_layer("linen", dropout_rate=0.4, attention_fn=bind(is_causal=True, local_window_size=(3, 0)))
    params = make_layer("linen")(None, *inputs)
    distance = jnp.arange(QUERIES)[:, None] - jnp.arange(QUERIES)[None]
    seen = ((distance >= 0) & (distance <= 3))[None, None]
    masked = make_layer("linen", dropout_rate=0.4, attention_fn=attention_fn)
    found = layer(params, *inputs, deterministic=False)
    assert_same(found, masked(params, *inputs, mask=seen, deterministic=False), tolerance=2e-5)


def test_attention_itself_refuses_the_dropout_of_linen() -> None:
    """linen hands over the rate, and no key, in evaluation too; without a rate it runs."""
    inputs = make_inputs((2, QUERIES))
    params = make_layer("linen")(None, *inputs)
    layer = make_layer("linen", dropout_rate=0.4, attention_fn=attention)
    for deterministic in (True, False):
        with pytest.raises(ValueError, match=r"`dropout_key` is None .*jax_fastattn.integrations.flax.attention_fn"):
            layer(params, *inputs, deterministic=deterministic)
    found = make_layer("linen", attention_fn=attention)(params, *inputs, deterministic=True)
    assert_same(found, make_layer("linen")(params, *inputs, deterministic=True), tolerance=2e-5)


def test_a_key_under_the_name_of_attention_raises() -> None:
    x = jnp.zeros((2, QUERIES, HEADS, 8))
    with pytest.raises(TypeError, match=r"`dropout_key` is given, expected .*`dropout_rng`"):
        bind(dropout_key=jax.random.key(0))(x, x, x)


def test_positions_of_nnx_are_accepted() -> None:
    """flax.nnx after 0.12.8 hands `input_positions` of a call to the attention_fn."""
    query = jax.random.normal(jax.random.key(0), (2, QUERIES, HEADS, 8))
    positions = jnp.broadcast_to(jnp.arange(QUERIES), (2, QUERIES))
    got = bind(is_causal=True)(query, query, query, mask=None, is_causal=False, input_positions=positions)
    assert_same(got, attention_fn(query, query, query, is_causal=True), tolerance=1e-6)


@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_sowing_weights_raises_in_one_line(family: str) -> None:
    inputs = make_inputs((2, QUERIES))
    layer = make_layer(family, attention_fn=attention_fn)
    params = layer(None, *inputs)
    with pytest.raises(NotImplementedError, match=r"`module`: .*sow_weights=False") as caught:
        layer(params, *inputs, sow_weights=True)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("family", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("precision", "found"),
    [
        (None, "DEFAULT"),
        (jax.lax.Precision.HIGHEST, "HIGHEST"),
        ("high", "HIGH"),
        ((jax.lax.Precision.HIGHEST,) * 2, "HIGHEST"),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3, "num_primitive_operations = 3"),
    ],
    ids=["none", "precision", "name", "pair", "algorithm"],
)
def test_precision_reaches_every_product(family: str, precision: Any, found: str) -> None:
    """A precision raised `NotImplementedError`, though the products of float32 can have one."""
    inputs = make_inputs((2, QUERIES))
    params = make_layer(family)(None, *inputs)
    layer = make_layer(family, precision=precision, attention_fn=attention_fn)
    text = jax.jit(lambda params: layer(params, *inputs)).trace(params).lower(lowering_platforms=("tpu",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 6  # three of the layer before, one after
    assert all(found in line or (found == "DEFAULT" and "precision" not in line) for line in products)


def test_two_precisions_raise() -> None:
    query = make_inputs((2, QUERIES))[0].reshape(2, QUERIES, HEADS, -1)
    with pytest.raises(NotImplementedError, match="`precision`: set one precision for both operands"):
        attention_fn(query, query, query, precision=(jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT))


def test_linens_own_einsums_raise() -> None:
    """linen passes only the arguments that an attention_fn names: an unnamed one would be dropped in silence."""
    inputs = make_inputs((2, QUERIES))[0]
    module = nn.MultiHeadDotProductAttention(
        HEADS,
        attention_fn=bind(implementation="xla"),
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
    )
    with pytest.raises(NotImplementedError, match=r"qk_attn_weights_einsum_cls.*; .*attn_weights_value_einsum_cls"):
        module.init(jax.random.key(3), inputs)


@pytest.mark.parametrize("default", [nn.dot_product_attention, nnx.dot_product_attention], ids=["linen", "nnx"])
def test_no_argument_of_the_default_is_unknown(default: Callable[..., Any]) -> None:
    known = inspect.signature(attention_fn).parameters
    # promote_dtype is nnx's alone, and its module keeps it for itself; given, it ends up in a TypeError.
    assert set(inspect.signature(default).parameters) - {"promote_dtype"} <= set(known)
    positional = list(inspect.signature(nn.dot_product_attention).parameters)
    assert list(known)[: len(positional)] == positional


def test_bound_options_reach_attention_and_cannot_be_overruled() -> None:
    query = jax.random.normal(jax.random.key(0), (2, QUERIES, HEADS, 8))
    near = jnp.abs(jnp.arange(QUERIES)[:, None] - jnp.arange(QUERIES)[None]) <= 1
    got = bind(local_window_size=(1, 1))(query, query, query)
    assert_same(got, nn.dot_product_attention(query, query, query, mask=near[None, None]), tolerance=2e-5)
    with pytest.raises(TypeError, match="mask"):
        bind(mask=near)(query, query, query, mask=None)
    with pytest.raises(TypeError, match="window"):
        bind(window=3)(query, query, query)


def test_wrong_shapes_raise() -> None:
    x = jnp.zeros((2, QUERIES, HEADS, 8))
    with pytest.raises(ValueError, match="`key` has shape"):
        attention_fn(x, x[:1], x)
    with pytest.raises(ValueError, match="`mask` has batch axes"):
        attention_fn(x, x, x, mask=jnp.ones((3, 1, 1, QUERIES)))
    with pytest.raises(ValueError, match="expected at most 4 axes"):
        attention_fn(x, x, x, mask=jnp.ones((1, 1, 1, 1, QUERIES)))


def test_partial_binds_what_no_module_passes() -> None:
    query = jax.random.normal(jax.random.key(0), (2, QUERIES, HEADS, 8))
    module = nn.MultiHeadDotProductAttention(HEADS, attention_fn=functools.partial(attention_fn, scale=0.5))
    inputs = make_inputs((2, QUERIES))[0]
    params = module.init(jax.random.key(3), inputs)
    assert not np.allclose(module.apply(params, inputs), module.clone(attention_fn=attention_fn).apply(params, inputs))
    assert_same(attention_fn(query, query, query, scale=8**-0.5), attention_fn(query, query, query), tolerance=1e-6)
