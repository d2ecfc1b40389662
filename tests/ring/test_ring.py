# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`ring_attention` and `all_to_all_attention`: devices compute what one does, with every option."""

from __future__ import annotations

from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rings
from jax.sharding import PartitionSpec as P

import jax_fastattn

CAUSAL: dict[str, Any] = {"is_causal": True}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "window": CAUSAL | {"local_window_size": (11, None)},
    "wide-window": CAUSAL | {"local_window_size": (40, None)},
    "both-sides": {"local_window_size": (6, 11)},
    "cap": CAUSAL | {"logits_soft_cap": 2.0},
}


# A device has 10 rows, and in zigzag order two chunks of 5, an odd number that no other size divides. Windows are
# chosen by where they end. A window of 6 or 11 keys to the left ("both-sides", "window") ends, for the first row of a
# chunk, at the last row of another chunk; that of 11, for the first row of a device, at the last row of another device.
# The window of 40 ("wide-window") ends in no neighbor, but reaches over four devices.
@pytest.mark.numbers
@pytest.mark.parametrize(
    ("size", "mask", "layout"),
    [
        (2, "full", "contiguous"),
        (2, "causal", "zigzag"),
        (2, "window", "zigzag"),
        (4, "full", "zigzag"),
        (4, "causal", "contiguous"),
        (4, "causal", "zigzag"),
        (4, "window", "contiguous"),
        (4, "wide-window", "zigzag"),
        (4, "both-sides", "contiguous"),
        (4, "both-sides", "zigzag"),
        (4, "cap", "zigzag"),
        (8, "window", "contiguous"),
        (8, "causal", "zigzag"),
    ],
)
def test_a_ring_under_each_mask_computes_what_one_device_does(size: int, mask: str, layout: str) -> None:
    rings.check(size, rings.draw(size * 10), layouts=[layout], **MASKS[mask])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_window_that_ends_where_the_rows_of_a_device_do(layout: str) -> None:
    """The first row of a device, of 10, sees the last one of the device two before, and its last row the next one."""
    arrays = {name: x for name, x in rings.draw(40, batch=1).items() if name != "dout"}
    window = {"local_window_size": (11, 1)}
    split = rings.split(4, arrays, layout=layout, **window)
    found, expected = (calls.quick_jit(x)(arrays) for x in (split, rings.whole(**window)))
    calls.assert_same(jax.device_get(found), jax.device_get(expected))


IDS = [[0] * 5 + [1] * 3 + [2] * 12, [3] * 20]
OPERANDS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": jnp.array([0.5, -1.0, 2.0, 0.0])},
    "key-lengths": {"key_value_seq_lengths": jnp.array([9, 17])},
    "no-keys": {"key_value_seq_lengths": jnp.array([0, 20])},
    "query-lengths": {"query_seq_lengths": jnp.array([7, 16]), "key_value_seq_lengths": jnp.array([9, 17])},
    "segments": {"segment_ids": jnp.array(IDS)},
    "offset": {"query_offset": jnp.array([3, -2])},
    "scale": {"scale": jnp.float32(-0.6)},
    "mask": {"mask": jax.random.bernoulli(jax.random.key(1), 0.7, (2, 1, 20, 20))},
    "mask-of-columns": {"mask": jax.random.bernoulli(jax.random.key(1), 0.7, (2, 1, 1, 20))},
    "bias": {"bias": jax.random.normal(jax.random.key(1), (1, 4, 20, 20))},
    "bias-per-key-head": {"bias": jax.random.normal(jax.random.key(1), (1, 2, 20, 20))},
    "bias-of-columns": {"bias": jax.random.normal(jax.random.key(1), (2, 1, 1, 20))},
}
HALF = {
    "sinks",
    "no-keys",
    "scale",
    "bias-per-key-head",
    "bias-of-columns",
    "offset",
}  # which are drawn with one layout alone


@pytest.mark.numbers
@pytest.mark.parametrize("name", OPERANDS)
def test_a_ring_with_each_operand_computes_what_one_device_does(name: str) -> None:
    layouts = ["zigzag"] if name in HALF else ["contiguous", "zigzag"]
    rings.check(2, rings.draw(20) | OPERANDS[name], layouts=layouts, **CAUSAL)


def test_operands_together() -> None:
    """Shapes differ from each other; what several devices and steps add up is in one call."""
    arrays = rings.draw_every_operand()
    dlse = jax.random.normal(jax.random.key(3), (2, 24, 6))
    rings.check(
        2, arrays, dlse=dlse, local_window_size=(11, 6), logits_soft_cap=3.0, return_residual=True, deterministic=True
    )


@pytest.mark.numbers
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_packed_rows_cross_devices(mask: str, layout: str) -> None:
    arrays = rings.draw(20) | {"boundaries": jnp.array([[0, 3, 3, 16, 20], [2, 9, 11, 11, 18]])}
    rings.check(2, arrays, layouts=[layout], **MASKS[mask])


@pytest.mark.parametrize("boundaries", [(1, 6, 19), (6,)], ids=["two sequences", "none"])
def test_packed_rows_with_sinks(boundaries: tuple[int, ...]) -> None:
    arrays = rings.draw(20, batch=1) | {"boundaries": jnp.array([boundaries])}
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    rings.check(2, arrays, layouts=["zigzag"], sinks=sinks, **CAUSAL)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_log_sum_exp_and_its_gradient(mask: str) -> None:
    dlse = jax.random.normal(jax.random.key(3), (2, 20, 4))
    rings.check(2, rings.draw(20), layouts=["zigzag"], dlse=dlse, return_residual=True, **MASKS[mask])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_lengths_that_int32_just_holds_hide_what_they_hide_on_one_device(layout: str) -> None:
    """Less than the first row of a device, int32 does not hold the smallest length."""
    least = jnp.iinfo(jnp.int32).min
    lengths = {"query_seq_lengths": jnp.array([least, 7, 20]), "key_value_seq_lengths": jnp.array([9, least + 3, 20])}
    arrays = {name: x for name, x in rings.draw(20, batch=3).items() if name != "dout"} | lengths
    found, expected = (calls.quick_jit(x)(arrays) for x in (rings.split(2, arrays, layout=layout), rings.whole()))
    calls.assert_same(jax.device_get(found), jax.device_get(expected))


ROW_BIASES = [((2, 4, 20, 1), None, "zigzag"), ((1, 2, 20, 1), 3.0, "contiguous"), ((2, 1, 1, 1), None, "contiguous")]


@pytest.mark.parametrize(("shape", "cap", "layout"), ROW_BIASES)
def test_a_bias_of_size_1_along_the_keys(shape: tuple[int, ...], cap: float | None, layout: str) -> None:
    """No block knows its gradient: it is that of the log-sum-exp, less what the sink takes, if there is no cap."""
    arrays = rings.draw(20) | OPERANDS["sinks"] | OPERANDS["key-lengths"]
    arrays |= {"bias": jax.random.normal(jax.random.key(1), shape)}
    options: dict[str, Any] = {"logits_soft_cap": cap, "return_residual": True, **CAUSAL}
    rings.check(2, arrays, layouts=[layout], dlse=jax.random.normal(jax.random.key(3), (2, 20, 4)), **options)


# Rows of a device: 10, of which 5 are in the step of two devices for one block.
HELPED: dict[str, tuple[int, dict[str, Any]]] = {
    "segments": (2, OPERANDS["segments"]),
    "sinks": (3, OPERANDS["sinks"]),
    "no-keys": (4, {"key_value_seq_lengths": jnp.array([0, 23])}),
    "query-lengths": (3, {"query_seq_lengths": jnp.array([8, 29]), "key_value_seq_lengths": jnp.array([14, 25])}),
    "column-mask": (2, OPERANDS["mask-of-columns"]),
    "bias-of-columns": (3, {"bias": jax.random.normal(jax.random.key(1), (2, 4, 1, 30))}),
    "bias-per-key-head": (4, {"bias": jax.random.normal(jax.random.key(1), (1, 2, 1, 40)), "scale": jnp.float32(0.7)}),
}


@pytest.mark.numbers
@pytest.mark.parametrize("name", HELPED)
def test_helpers_have_every_operand(name: str) -> None:
    size, extra = HELPED[name]
    rings.check(size, rings.draw(size * 10) | extra, layouts=["contiguous"], balance=True, **CAUSAL)


@pytest.mark.numbers
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_helpers_of_any_number(size: int) -> None:
    """All of it together: log-sum-exp with a cotangent, a soft cap, head dims that differ, in one order of sums."""
    arrays = rings.draw(size * 6, heads=(6, 3), head_dims=(8, 4)) | {"sinks": jnp.linspace(-1.0, 1.0, 6)}
    options = CAUSAL | {"logits_soft_cap": 3.0, "return_residual": True, "deterministic": True}
    dlse = jax.random.normal(jax.random.key(3), (2, size * 6, 6))
    rings.check(size, arrays, layouts=["contiguous"], dlse=dlse, balance=True, **options)


@pytest.mark.parametrize(("rows", "mask"), [(9, "causal"), (10, "window")], ids=["odd", "window"])
def test_contiguous_rows_that_are_not_balanced(rows: int, mask: str) -> None:
    rings.check(2, rings.draw(2 * rows), layouts=["contiguous"], balance=True, **MASKS[mask])


def test_rows_that_devices_do_not_divide() -> None:
    """The caller pads the rows, and lengths hide the padding."""
    arrays, length = rings.draw(20), 17
    lengths = jnp.full(2, length)
    padded = arrays | {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    found, slopes = rings.gradients(rings.split(4, padded, **CAUSAL), padded)
    cut = {name: x[:, :length] for name, x in arrays.items()}
    expected, cut_slopes = rings.gradients(rings.whole(**CAUSAL), cut)
    calls.assert_same(found[:, :length], expected)
    calls.assert_same({name: slopes[name][:, :length] for name in cut_slopes}, cut_slopes)
    assert not any(x[:, length:].any() for x in (found, *slopes.values()) if x.ndim > 1)


def test_data_axis_and_one_batch_entry_each() -> None:
    arrays = rings.draw(20) | OPERANDS["sinks"] | OPERANDS["key-lengths"]
    rings.check(2, arrays, layouts=["zigzag"], data=2, **CAUSAL)


def test_rows_over_two_axes_and_heads_over_a_third() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    rows = P(None, ("a", "b"), "tensor")

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax_fastattn.ring_attention(q, k, v, axis_name=("a", "b"), is_causal=True)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)
    arrays = rings.draw(40, batch=1)
    found = rings.gradients(lambda x: mapped(x["query"], x["key"], x["value"]), arrays)
    calls.assert_same(jax.device_get(found), jax.device_get(rings.gradients(rings.whole(**CAUSAL), arrays)))


def test_bfloat16_is_as_exact_as_one_device() -> None:
    arrays = rings.draw(4 * 64, batch=1, heads=(4, 1), head_dims=(32, 32), dtype=jnp.bfloat16)
    exact = rings.gradients(rings.whole(**CAUSAL), {name: x.astype(jnp.float32) for name, x in arrays.items()})
    alone = rings.gradients(rings.whole(**CAUSAL), arrays)
    found = rings.gradients(rings.split(4, arrays, **CAUSAL), arrays)

    def error(x: jax.Array, y: jax.Array) -> float:
        return float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))

    for x, y, z in zip(*map(jax.tree.leaves, (found, alone, exact)), strict=True):
        assert error(x, z) < 1.5 * error(y, z)


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("name", "layout"),
    [("lengths", "zigzag"), ("lengths", "contiguous"), ("packed", "zigzag"), ("sinks", "contiguous")],
)
def test_what_is_invisible_may_be_nan(name: str, layout: str) -> None:
    arrays, sinks = rings.draw(20, batch=1), None
    if name == "packed":
        arrays = {x: array.at[:, 13:].set(jnp.nan) for x, array in arrays.items()}
        arrays["boundaries"] = jnp.array([[0, 4, 13]])
    else:
        arrays |= {x: arrays[x].at[:, 13:].set(jnp.nan) for x in ("key", "value")}
        arrays["key_value_seq_lengths"] = jnp.array([13])
    if name == "lengths":
        arrays |= {x: arrays[x].at[:, 13:].set(jnp.nan) for x in ("query", "dout")}
        arrays["query_seq_lengths"] = jnp.array([13])
    if name == "sinks":  # rows that see no key, and have a log-sum-exp
        sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
        arrays |= {x: arrays[x].at[:, :3].set(jnp.nan) for x in ("query", "dout")}
        arrays["query_offset"] = jnp.array([-3])
    found = rings.gradients(rings.split(2, arrays, layout=layout, sinks=sinks, **CAUSAL), arrays)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


ALL_TO_ALL: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": ((4, 2), {}),
    "one-key-head": ((4, 1), {}),
    "sinks": ((4, 2), OPERANDS["sinks"]),
    "segments": ((4, 2), OPERANDS["segments"]),
    "bias": ((4, 2), OPERANDS["bias"]),
    "bias-per-key-head": ((8, 4), {"bias": jax.random.normal(jax.random.key(1), (1, 4, 20, 20))}),
    "mask": ((4, 2), OPERANDS["mask"]),
    "mask-per-repeated-key-head": ((8, 2), {"mask": jax.random.bernoulli(jax.random.key(1), 0.7, (2, 2, 20, 20))}),
    "packed": ((4, 2), {"boundaries": jnp.array([[0, 3, 3, 16, 20], [2, 9, 11, 11, 18]])}),
}


REPEATED = ("one-key-head", "mask-per-repeated-key-head")  # on more devices than key heads
# It alone has a mask per key head where key heads are repeated.
EVERY_TURN = "mask-per-repeated-key-head"


@pytest.mark.numbers
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.whole] * (x == EVERY_TURN)) for x in ALL_TO_ALL])
def test_all_to_all(name: str) -> None:
    heads, extra = ALL_TO_ALL[name]
    arrays, size = rings.draw(20, heads=heads) | extra, 4 if name in REPEATED else 2
    found = rings.gradients(rings.split(size, arrays, attend=jax_fastattn.all_to_all_attention, **CAUSAL), arrays)
    calls.assert_same(jax.device_get(found), jax.device_get(rings.gradients(rings.whole(**CAUSAL), arrays)))


def test_all_to_all_with_every_operand() -> None:
    arrays, dlse = rings.draw_every_operand(keys=15), jax.random.normal(jax.random.key(3), (2, 24, 6))
    options: dict[str, Any] = {"local_window_size": (11, 6), "logits_soft_cap": 3.0, "return_residual": True}
    split = rings.split(3, arrays, attend=jax_fastattn.all_to_all_attention, **options)
    found, expected = (rings.gradients(x, arrays, dlse) for x in (split, rings.whole(**options)))
    calls.assert_same(jax.device_get(found), jax.device_get(expected))


@pytest.mark.numbers
@pytest.mark.parametrize("attend", ["ring_attention", "all_to_all_attention"])
@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (2, 4, 4, 4), (2, 1, 1, 4)], ids=["rows", "rows-of-heads", "columns"])
def test_one_row_on_each_device(attend: str, shape: tuple[int, ...]) -> None:
    """A bias with one row on a device may be that of its query, or that of all."""
    arrays = rings.draw(4) | {"bias": jax.random.normal(jax.random.key(1), shape)}
    found = rings.gradients(rings.split(4, arrays, attend=getattr(jax_fastattn, attend)), arrays)
    calls.assert_same(jax.device_get(found), jax.device_get(rings.gradients(rings.whole(), arrays)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (OPERANDS["mask"], "`boundaries` and `mask` are both given"),
        (OPERANDS["key-lengths"], "`boundaries` and `key_value_seq_lengths` are both given"),
        ({"boundaries": None, "sinks": jnp.ones(3)}, "`sinks` has shape .* expected N = 4 as in `query`"),
        ({"boundaries": None, "key": jnp.ones((2, 20))}, "`key` has shape .* expected 4 dimensions"),
    ],
    ids=["mask", "lengths", "sinks", "key"],
)
def test_all_to_all_names_what_does_not_fit(extra: dict[str, Any], message: str) -> None:
    arrays = rings.draw(20) | ALL_TO_ALL["packed"][1] | extra
    arrays = {name: x for name, x in arrays.items() if name != "dout" and x is not None}
    with pytest.raises(ValueError, match=message):
        rings.split(2, arrays, attend=jax_fastattn.all_to_all_attention)(arrays)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"boundaries": jnp.zeros((2, 0), int)}, "`boundaries` has C = 0 entries, expected one more"),
        ({"boundaries": jnp.array([0, 20])}, r"`boundaries` has shape \(2,\), expected 2 dimensions \(BC\)"),
        ({"bias": jnp.ones((10, 7))}, "`bias` .* with S = 7, expected 1 or S = 20 as in `key` on all devices; it must"),
    ],
    ids=["no-boundary", "boundaries", "bias"],
)
def test_a_ring_names_what_does_not_fit(extra: dict[str, Any], message: str) -> None:
    arrays = {name: x for name, x in rings.draw(20).items() if name != "dout"}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            jax.shard_map(
                lambda q, k, v: jax_fastattn.ring_attention(q, k, v, axis_name="seq", **extra),
                mesh=rings.make_mesh(2),
                in_specs=P(None, "seq"),
                out_specs=P(None, "seq"),
            ),
            *arrays.values(),
        )


CALLS: dict[str, Any] = {
    "ring_attention": lambda x, axis_name, **options: jax_fastattn.ring_attention(
        x, x, x, axis_name=axis_name, **options
    ),
    "all_to_all_attention": lambda x, axis_name: jax_fastattn.all_to_all_attention(x, x, x, axis_name=axis_name),
    "positions": lambda x, axis_name, **options: jax_fastattn.positions(axis_name, x.shape[1], **options),
}


def trace_on_two_devices(call: Any) -> None:
    """Traces a call of a device's rows `[1, 4, 2, 8]`, inside `shard_map` over the axis "seq"."""
    rows = P(None, "seq")
    mapped = jax.shard_map(call, mesh=rings.make_mesh(2), in_specs=rows, out_specs=P(), check_vma=False)
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.float32))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("axis_name", "kind", "message"),
    [
        (3, TypeError, "`axis_name` is 3, expected the name of a mesh axis, .* tuple of strings"),
        (("seq", None), TypeError, r"`axis_name` is \('seq', None\), expected the name"),
        (("seq", "seq"), ValueError, r"`axis_name` is \('seq', 'seq'\), expected names that differ"),
        (("seq", "batch"), ValueError, r"`axis_name` is \('seq', 'batch'\), expected axes of the mesh of"),
        ("batch", ValueError, "`axis_name` is 'batch', expected axes of the mesh of an enclosing `jax.shard_map`"),
    ],
    ids=["number", "none", "twice", "one-of-vmap", "vmap"],
)
def test_names_of_axes_are_those_of_the_mesh(name: str, axis_name: Any, kind: type[Exception], message: str) -> None:
    def call(x: jax.Array) -> Any:
        return jax.vmap(lambda x: CALLS[name](x, axis_name), axis_name="batch")(x[None])

    with pytest.raises(kind, match=message):
        trace_on_two_devices(call)


@pytest.mark.parametrize("name", CALLS)
def test_names_of_vmap_alone_are_refused(name: str) -> None:
    for mesh in (jax.sharding.AbstractMesh((), ()), rings.make_mesh(2).abstract_mesh):
        with (
            jax.sharding.use_abstract_mesh(mesh),
            pytest.raises(ValueError, match="`axis_name` is 'seq', expected axes of the mesh of an enclosing"),
        ):
            jax.vmap(lambda x: CALLS[name](x, "seq"), axis_name="seq")(jnp.ones((2, 1, 4, 2, 8)))


@pytest.mark.parametrize("name", ["ring_attention", "positions"])
@pytest.mark.parametrize(
    ("layout", "kind", "message"),
    [
        ("zig", ValueError, '`layout` is \'zig\', expected "contiguous" or "zigzag"'),
        (np.ones((2, 8)), TypeError, '`layout` is ndarray, expected "contiguous" or "zigzag"'),
        (None, TypeError, "`layout` is NoneType, expected"),
    ],
    ids=["word", "array", "none"],
)
def test_layouts_are_words(name: str, layout: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        trace_on_two_devices(lambda x: CALLS[name](x, "seq", layout=layout))


# What is no integer, or none that is known when a call is traced.
NO_INTEGERS = [2.0, True, "4", None, [1, 2], jnp.arange(1), np.float32(2), jnp.array(True)]
TOO_LARGE = "is 2147483648, expected a value that int32 holds"


def arguments_of_orders() -> list[Any]:
    """Wrong arguments of `zigzag`, as x, size, axis, kind of error and message."""
    rows = jnp.ones((2, 16))
    found = [
        (jnp.ones((2, 10)), 4, 1, ValueError, r"`x` has shape \(2, 10\) with 10 rows, expected a multiple of 8"),
        (jnp.ones(16), 4, 1, ValueError, r"`x` has shape \(16,\), expected an axis 1; pass .* as `axis`"),
        (rows, 0, 1, ValueError, "`size` is 0, expected at least 1; pass the devices"),
        (rows, 2**31, 1, ValueError, f"`size` {TOO_LARGE}"),
        (rows, 4, -(2**31) - 1, ValueError, "`axis` is -2147483649, expected a value that int32 holds"),
        ("rows", 4, 1, TypeError, "`x` is str, expected an array"),
        (jax.ShapeDtypeStruct((2, 16), jnp.float32), 4, 1, TypeError, "`x` is ShapeDtypeStruct, expected an array"),
        (np.ones((2, 16), ">f4"), 4, 1, TypeError, "`x` has dtype >f4, which is big-endian"),
    ]
    for x in NO_INTEGERS:
        kind = f"is {type(x).__name__}, expected an int"
        found += [(rows, x, 1, TypeError, f"`size` {kind}"), (rows, 4, x, TypeError, f"`axis` {kind}")]
    return found


@pytest.mark.parametrize("order", [jax_fastattn.zigzag, jax_fastattn.unzigzag])
def test_orders_say_what_does_not_fit(order: Any) -> None:
    for x, size, axis, kind, message in arguments_of_orders():
        with pytest.raises(kind, match=message):
            order(x, size, axis)
    for name, sizes in (("size", (4, 1)), ("axis", (1, 4))):
        traced, given = sizes
        with pytest.raises(TypeError, match=f"`{name}` is a traced value, expected a Python int; mark it static"):
            jax.jit(lambda x, name=name, given=given: order(jnp.ones((2, 16)), **{"size": given, name: x}))(traced)


def test_orders_take_integers_of_any_kind() -> None:
    x = jnp.arange(16)
    for size in (np.int64(2), np.array(2), jnp.int32(2)):
        assert (jax_fastattn.unzigzag(jax_fastattn.zigzag(x, size, jnp.int8(-1)), size, 0) == x).all()


def test_positions_say_what_length_they_take() -> None:
    cases = [(x, TypeError, f"is {type(x).__name__}, expected an int") for x in NO_INTEGERS]
    cases += [(-2, ValueError, "is -2, expected at least 0; pass the rows"), (2**31, ValueError, TOO_LARGE)]
    for layout in ("contiguous", "zigzag"):
        for length, kind, message in cases:
            with pytest.raises(kind, match=f"`length` {message}"):
                trace_on_two_devices(lambda x, n=length, layout=layout: jax_fastattn.positions("seq", n, layout))
    with pytest.raises(TypeError, match="`length` is a traced value, expected a Python int; mark it static"):
        trace_on_two_devices(lambda x: jax_fastattn.positions("seq", x[0, 0, 0, 0].astype(jnp.int32)))


@pytest.mark.parametrize("size", [2, 4])
def test_orders_and_positions(size: int) -> None:
    x = jnp.arange(size * 6)[None]
    ordered = jax_fastattn.zigzag(x, size)
    assert ordered[0, 3:6].tolist() == list(range(6 * size - 3, 6 * size))
    assert (jax_fastattn.unzigzag(ordered, size) == x).all()
    for layout, expected in (("contiguous", x), ("zigzag", ordered)):

        def where(x: jax.Array, layout: Any = layout) -> jax.Array:
            return x * 0 + jax_fastattn.positions("seq", x.shape[1], layout)[None]

        mapped = jax.shard_map(where, mesh=rings.make_mesh(size), in_specs=P(None, "seq"), out_specs=P(None, "seq"))
        assert (jax.jit(mapped)(x) == expected).all()
