# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`score_mod` and `mask_mod` of rows that devices split: functions count rows of the whole sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import collectives
from testing.score_functions import random_score

import jax_fastattn
from jax_fastattn import all_to_all_attention, attention, block_mask, causal, ring_attention

B, N, K, D = 2, 4, 2, 8
CAUSAL: dict[str, Any] = {"is_causal": True}
# `jax.vmap` of jax 0.8 fails at the sum over devices that `check_vma` puts into a gradient.
MAPS_CHECKS = jax.__version_info__ >= (0, 9)
Mod = Callable[..., Any]
Arrays = calls.Arrays


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def every_plane(x: Arrays) -> Mod:
    """ALiBi with learned slopes, T5's distances, numbers of keys and of queries, and the number of a row."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s = s - x["slopes"][h] * jnp.abs(q - k) + x["table"][jnp.clip(k - q, -8, 7) + 8, h]
        return s * (1 + x["rows"][b, q] / 4) + x["keys"][h, k] + 0.02 * (q + 2 * k)

    return mod


def alibi(x: Arrays) -> Mod:
    return lambda s, b, h, q, k: s - x["slopes"][h] * (q - k)


def without_code(x: Arrays) -> Mod:
    return lambda s, b, h, q, k: jax.lax.erf(s + x["slopes"][h] * (q % 5) + x["pairs"][q, k])


SCORES = {"every plane": every_plane, "alibi": alibi, "without code": without_code, "none": lambda x: None}


def documents(x: Arrays) -> Mod:
    return lambda b, h, q, k: x["ids"][b, q] == x["ids"][b, k]


def window(x: Arrays) -> Mod:
    """Asks for both rows, for a head, and for a table of pairs."""
    return lambda b, h, q, k: ((q - k < 9 + h) & (k - q < 5)) | (k < x["count"]) | x["blocks"][q // 4, k // 4]


def unsorted(x: Arrays) -> Mod:
    """Has no code."""
    return lambda b, h, q, k: jnp.sort(jnp.stack([q, k + x["count"], 2 * b]))[1] % 3 > 0


MASKS = {"documents": documents, "window": window, "unsorted": unsorted, "none": lambda x: None}
DIFFERENTIABLE = ("slopes", "table", "rows", "keys", "pairs")
EVERY_PLANE = DIFFERENTIABLE[:4]


def captured(rows: int, keys: int) -> Arrays:
    """Returns the arrays that functions capture, of the whole sequence."""
    shapes = {"slopes": (N,), "table": (16, N), "rows": (B, rows), "keys": (N, keys), "pairs": (rows, keys)}
    draws = jax.random.split(jax.random.key(1), len(shapes) + 2)
    found = {name: jax.random.normal(key, shape) / 4 for key, (name, shape) in zip(draws, shapes.items(), strict=False)}
    ids = jnp.sort(jax.random.randint(draws[-1], (B, max(rows, keys)), 0, 4))
    blocks = jax.random.bernoulli(draws[-2], 0.3, (-(-rows // 4), -(-keys // 4)))
    return found | {"ids": ids, "count": jnp.int32(3), "blocks": blocks}


def options_of(score: str, mask: str, x: Arrays) -> dict[str, Any]:
    return {"score_mod": SCORES[score](x), "mask_mod": MASKS[mask](x)}


def on_devices(
    size: int,
    functions: Callable[[Arrays], dict[str, Any]],
    *,
    layout: str = "contiguous",
    attend: Any = ring_attention,
    checks: bool = True,
    data: int = 1,
    closes_over: bool = False,
    **options: Any,
) -> Callable[[Arrays, Arrays], Any]:
    """Returns a function of the arrays of a call and of captured arrays, all of them whole and in order.

    Args:
        size: how many devices split the rows.
        functions: returns the functions for captured arrays.
        layout, attend: the order of rows, and what a device calls.
        checks: whether `shard_map` checks how values vary.
        data: how many devices split the batch; captured arrays are split with it where they have a batch axis.
        closes_over: whether the body of `shard_map` closes over captured arrays, instead of taking them.
    """
    of_layout = {"layout": layout} if attend is ring_attention else {}
    rows = P("data", "seq")

    def run(given: Arrays, x: Arrays) -> Any:
        def local(given: Arrays, own: Arrays) -> Any:
            return attend(**given, axis_name="seq", **of_layout, **functions(x | own), **options)

        passed = {} if closes_over else x
        specs = {name: P("data") if name in ("rows", "ids") else P() for name in passed}
        share = jax.shard_map(
            local, mesh=rings.make_mesh(size, data), in_specs=(rows, specs), out_specs=rows, check_vma=checks
        )
        if layout == "contiguous":
            return share(given, passed)
        ordered = {name: jax_fastattn.zigzag(array, size) for name, array in given.items()}
        return jax.tree.map(lambda array: jax_fastattn.unzigzag(array, size), share(ordered, passed))

    return run


def on_one(functions: Callable[[Arrays], dict[str, Any]], **options: Any) -> Callable[[Arrays, Arrays], Any]:
    return lambda given, x: attention(**given, **functions(x), **options)


def derivatives(run: Callable[..., Any], names: tuple[str, ...], *arrays: Arrays) -> Any:
    """Returns output, log-sum-exp, and gradients of query, key, value and captured arrays."""
    given, x = arrays

    def loss(given: Arrays, moved: Arrays) -> Any:
        out, lse = run(given, x | moved)
        dout, dlse = (jax.random.normal(jax.random.key(i), y.shape) for i, y in enumerate((out, lse)))
        return jnp.sum(out * dout) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0) * dlse), (out, lse)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(given, {name: x[name] for name in names})


def draw(rows: int, keys: int | None = None) -> Arrays:
    found = rings.draw(rows, batch=B, heads=(N, K), keys=keys)
    return {name: found[name] for name in ("query", "key", "value")}


# Devices, layout, score, mask, other options. A device has 6 rows, and 10 keys if their numbers differ.
CASES: dict[str, tuple[int, str, str, str, dict[str, Any]]] = {
    "zigzag": (2, "zigzag", "every plane", "documents", {}),
    "helped": (4, "contiguous", "every plane", "window", CAUSAL | {"checks": False}),
    "three helped": (3, "contiguous", "alibi", "documents", CAUSAL | {"closes_over": True}),
    "not helped": (3, "contiguous", "every plane", "window", CAUSAL | {"balance": False}),
    "cross": (2, "zigzag", "every plane", "window", {"keys": 10, "closes_over": True, "checks": False}),
    "no code": (2, "zigzag", "without code", "unsorted", {}),
    "no code, helped": (2, "contiguous", "without code", "unsorted", CAUSAL),
    "data": (2, "contiguous", "every plane", "documents", {"data": 2}),
    "window, cap and offset": (
        2,
        "zigzag",
        "every plane",
        "none",
        {"local_window_size": (7, 3), "logits_soft_cap": 2.0, "query_offset": 2},
    ),
}
ALWAYS = ("data", "helped")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in ALWAYS else pytest.mark.numbers) for x in CASES])
def test_a_ring_computes_what_one_device_does(name: str) -> None:
    size, layout, score, mask, options = CASES[name]
    own = {x: y for x, y in options.items() if x in ("checks", "closes_over", "data", "balance")}
    keys, others = options.get("keys", 6), {x: y for x, y in options.items() if x not in (*own, "keys")}
    arrays = draw(6 * size, keys * size), captured(6 * size, keys * size)
    names = {"every plane": EVERY_PLANE, "without code": ("slopes", "pairs")}.get(score, ("slopes",))
    functions = functools.partial(options_of, score, mask)
    split = on_devices(size, functions, layout=layout, return_residual=True, **own, **others)
    found, expected = (
        calls.quick_jit(functools.partial(derivatives, x, names))(*arrays)
        for x in (split, on_one(functions, return_residual=True, **others))
    )
    calls.assert_same(jax.device_get(found), jax.device_get(expected), 5e-5)


@pytest.mark.numbers
@pytest.mark.parametrize(("size", "layout"), [(1, "zigzag"), (8, "contiguous"), (8, "zigzag")])
def test_outputs_of_other_numbers_of_devices(size: int, layout: str) -> None:
    arrays, functions = (
        (draw(4 * size), captured(4 * size, 4 * size)),
        functools.partial(options_of, "every plane", "window"),
    )
    found, expected = (
        calls.quick_jit(run)(*arrays) for run in (on_devices(size, functions, layout=layout), on_one(functions))
    )
    calls.assert_same(jax.device_get(found), jax.device_get(expected))


@pytest.mark.numbers
@pytest.mark.parametrize("checks", [pytest.param(True, marks=pytest.mark.whole), False], ids=["checks", "unchecked"])
@pytest.mark.parametrize(("size", "score"), [(2, "every plane"), (4, "every plane"), (2, "without code")], ids=str)
def test_all_to_all_computes_what_one_device_does(size: int, score: str, checks: bool) -> None:
    """Each device has half or a quarter of the heads, of which the functions get the numbers."""
    arrays, mask = (draw(3 * size), captured(3 * size, 3 * size)), "unsorted" if score == "without code" else "window"
    names = EVERY_PLANE if score == "every plane" else ("slopes", "pairs")
    functions = functools.partial(options_of, score, mask)
    split = on_devices(size, functions, attend=all_to_all_attention, checks=checks, return_residual=True)
    found, expected = (
        calls.quick_jit(functools.partial(derivatives, x, names))(*arrays)
        for x in (split, on_one(functions, return_residual=True))
    )
    calls.assert_same(jax.device_get(found), jax.device_get(expected), 5e-5)


# Where rows are split, as in the table of docs/programs.md.
ROWS: dict[str, Any] = {
    "ring": functools.partial(on_devices, 3),
    "ring in zigzag order": functools.partial(on_devices, 2, layout="zigzag"),
    "all-to-all": functools.partial(on_devices, 2, attend=all_to_all_attention),
    "jit": None,
}


# Rows and keys of a call, how keys are split, other options, and the collectives.
UNDER_JIT: dict[str, tuple[int, int, Any, dict[str, Any], set[str]]] = {
    "padding": (11, 7, "seq", {}, {"collective-permute", "all-reduce"}),
    "helped with padding": (11, 11, "seq", CAUSAL, {"collective-permute", "all-reduce"}),
    "whole keys": (12, 10, None, {}, {"all-reduce"}),
}


SPLIT_BY_JIT = [("padding", "every plane"), ("helped with padding", "without code"), ("whole keys", "every plane")]


@pytest.mark.parametrize(
    ("name", "score"), [pytest.param(*x, marks=[pytest.mark.numbers] * (x != SPLIT_BY_JIT[0])) for x in SPLIT_BY_JIT]
)
def test_rows_that_jit_splits_travel(name: str, score: str) -> None:
    """Nothing is gathered. Rows that the devices do not divide are cut from others, as in a program."""
    rows, keys, axis, options, collective = UNDER_JIT[name]
    given, x, size = draw(12, -(-keys // 2) * 2), captured(rows, keys), {"query": rows, "key": keys, "value": keys}
    mask, names = ("window", EVERY_PLANE) if score == "every plane" else ("unsorted", ("slopes", "pairs"))
    run = on_one(functools.partial(options_of, score, mask), **options)
    given = {name: array.at[:, size[name] :].set(jnp.nan) for name, array in given.items()}

    def loss(given: Arrays, moved: Arrays) -> jax.Array:
        out = run({name: array[:, : size[name]] for name, array in given.items()}, x | moved)
        return jnp.sum(jnp.sin(out))

    gradient = calls.quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))
    moved, mesh = {name: x[name] for name in names}, rings.make_mesh(2)
    specs = {"query": P(None, "seq"), "key": P(None, axis), "value": P(None, axis)}
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in given.items()}
    compiled = gradient.lower(placed, moved).compile()
    assert set(collectives(compiled)) == collective
    calls.assert_same(jax.device_get(compiled(placed, moved)), jax.device_get(gradient(given, moved)), 5e-5)


def under_jit(run: Any, given: Arrays) -> Any:
    """Computes a call of `attention` whose rows a mesh splits."""
    rows = NamedSharding(rings.make_mesh(4), P("data", "seq"))
    return jax.jit(lambda given: run(given, {}))({name: jax.device_put(x, rows) for name, x in given.items()})


@pytest.mark.parametrize("where", ROWS)
def test_a_query_is_not_before_a_key_where_is_causal_says_so(where: str) -> None:
    """Nothing tells the ring which blocks the function hides: it visits all of them."""
    given = draw(24)
    make = on_one if ROWS[where] is None else ROWS[where]
    as_function, as_flag = (
        make(lambda _: {"mask_mod": lambda b, h, q, k: q >= k}),
        make(lambda _: {}, is_causal=True),
    )
    run = under_jit if ROWS[where] is None else lambda f, given: calls.quick_jit(f)(given, {})
    found, expected = run(as_function, given), run(as_flag, given)
    calls.assert_same(jax.device_get(found), jax.device_get(expected))
    calls.assert_same(jax.device_get(found), jax.device_get(attention(**given, is_causal=True)))


def test_a_function_without_code_counts_rows_of_the_whole_sequence() -> None:
    """Forward alone, which is cheap."""
    arrays, functions = (draw(12), captured(12, 12)), functools.partial(options_of, "without code", "unsorted")
    split = on_devices(2, functions, layout="zigzag")
    found, expected = (calls.quick_jit(run)(*arrays) for run in (split, on_one(functions)))
    calls.assert_same(jax.device_get(found), jax.device_get(expected))


@pytest.mark.parametrize("attend", [ring_attention, all_to_all_attention], ids=["ring", "all-to-all"])
def test_forward_mode_remat_and_vmap(attend: Any) -> None:
    """Of three examples with a table each: the tangents, and the gradient of a call that is computed twice."""
    given, x = draw(8), captured(8, 8)
    tables = jnp.stack([x["table"], -x["table"], 2 * x["table"]])
    moved = jax.tree.map(jnp.cos, given)

    def both(run: Any) -> Any:
        def loss(given: Arrays, table: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(run(given, x | {"table": table})))

        def one(table: jax.Array) -> Any:
            tangent = jax.jvp(loss, (given, table), (moved, jnp.cos(table)))
            return tangent, jax.grad(jax.checkpoint(loss), argnums=(0, 1))(given, table)

        return calls.quick_jit(jax.vmap(one))

    functions = functools.partial(options_of, "every plane", "documents")
    split = on_devices(2, functions, attend=attend, checks=MAPS_CHECKS)
    found, expected = (both(run)(tables) for run in (split, on_one(functions)))
    calls.assert_same(jax.device_get(found), jax.device_get(expected), 5e-5)


@pytest.mark.numbers
@pytest.mark.parametrize("where", ["contiguous", "zigzag", "all-to-all"])
def test_next_to_every_other_argument(where: str) -> None:
    """Of a call of three devices, dropout included."""
    arrays, x = rings.draw_every_operand(keys=24), captured(24, 24)
    x |= {"slopes": jnp.resize(x["slopes"], 6), "table": jnp.resize(x["table"], (16, 6))}
    x |= {"keys": jnp.resize(x["keys"], (6, 24))}
    options = options_of("every plane", "window", x) | {"local_window_size": (15, 9), "logits_soft_cap": 3.0}
    options |= {"return_residual": True, "dropout_rate": 0.3, "dropout_key": jax.random.key(5)}
    place: dict[str, Any] = {"attend": all_to_all_attention} if where == "all-to-all" else {"layout": where}
    dlse = jax.random.normal(jax.random.key(3), (2, 24, 6))
    found = rings.gradients(rings.split(3, arrays, **place, **options), arrays, dlse)
    calls.assert_same(jax.device_get(found), jax.device_get(rings.gradients(rings.whole(**options), arrays, dlse)))


def test_second_derivatives_of_all_to_all() -> None:
    given, x = draw(6), captured(6, 6)
    functions = functools.partial(options_of, "alibi", "documents")

    def second(run: Any) -> Any:
        loss = lambda slopes: jnp.sum(jnp.sin(run(given, x | {"slopes": slopes})))
        return calls.quick_jit(jax.hessian(loss))(x["slopes"])

    split = on_devices(2, functions, attend=all_to_all_attention, checks=MAPS_CHECKS)
    found, expected = (second(x) for x in (split, on_one(functions)))
    calls.assert_same(jax.device_get(found), jax.device_get(expected))


@pytest.mark.parametrize("where", ["contiguous", "zigzag", "all-to-all"])
def test_kernels_run_blocks_with_functions(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """In both passes, with the gradient of slopes; `implementation="cuda"` would refuse another path."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    x = captured(256, 256)
    functions = functools.partial(options_of, "alibi", "documents")
    place: dict[str, Any] = {"attend": all_to_all_attention} if where == "all-to-all" else {"layout": where}
    run = on_devices(2, functions, **place, is_causal=True, implementation="cuda")

    def loss(given: Arrays, slopes: jax.Array) -> jax.Array:
        return jnp.sum(run(given, x | {"slopes": slopes}).astype(jnp.float32))

    shape = jax.ShapeDtypeStruct((B, 256, N, 64), jnp.bfloat16)
    text = calls.cuda_text(jax.grad(loss, argnums=(0, 1)), dict.fromkeys(("query", "key", "value"), shape), x["slopes"])
    # Calls of a program that are equal share a function. Prepasses of both passes are launches, too.
    assert text.count("stablehlo.custom_call @jax_fastattn_launch") >= 4


@pytest.mark.numbers
@pytest.mark.parametrize("seed", range(5))
def test_random_functions(seed: int) -> None:
    """In either layout, some of them causal, so that devices help each other."""
    random = np.random.default_rng(seed)
    size, rows = int(random.integers(2, 4)), 2 * int(random.integers(1, 5))
    mod = random_score(random, {"B": B, "N": N, "T": size * rows, "S": size * rows})
    layout, is_causal = ("zigzag", "contiguous")[seed % 2], bool(random.integers(2))
    given = draw(size * rows)
    run_on = functools.partial(on_devices, size, layout=layout), on_one
    found, expected = (
        calls.quick_jit(functools.partial(derivatives, x, ()))(given, {})
        for x in (make(lambda _: {"score_mod": mod}, is_causal=is_causal, return_residual=True) for make in run_on)
    )
    calls.assert_same(jax.device_get(found), jax.device_get(expected), 1e-4)


@pytest.mark.numbers
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_nan_at_a_key_that_nobody_sees_reaches_nothing(layout: str) -> None:
    given, x, lengths = draw(12), captured(12, 12), {"key_value_seq_lengths": jnp.full(B, 9)}
    split = on_devices(2, functools.partial(options_of, "every plane", "none"), layout=layout, **lengths)
    run = calls.quick_jit(jax.value_and_grad(lambda x: jnp.sum(split(given, x) ** 2), allow_int=True))
    found, expected = run(x | {"keys": x["keys"].at[:, 9:].set(jnp.nan)}), run(x)
    for name in EVERY_PLANE:
        calls.assert_same(found[1][name], expected[1][name])
    calls.assert_same(found[0], expected[0])


@pytest.mark.parametrize("attend", [ring_attention, all_to_all_attention])
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"score_mod": jnp.ones(2)},
            TypeError,
            r"`score_mod` is an array, expected a function of \(score, b, h, q, k\)",
        ),
        (
            {"boundaries": jnp.array([[0, 6]] * B), "mask_mod": causal()},
            ValueError,
            "`boundaries` and `mask_mod` are both",
        ),
        ({"boundaries": jnp.array([[0, 6]] * B), "score_mod": 3}, ValueError, "`boundaries` and `score_mod` are both"),
    ],
    ids=["array", "boundaries-mask", "boundaries-score"],
)
def test_what_is_no_function_or_excludes_one(attend: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        jax.eval_shape(on_devices(2, lambda _: {}, attend=attend, **options), draw(6), {})


@pytest.mark.parametrize("attend", [ring_attention, all_to_all_attention])
@pytest.mark.parametrize(
    "mods",
    [
        lambda x: {"mask_mod": lambda b, h, q, k: x[b, q] == x[b, k]},
        lambda x: {"score_mod": lambda s, b, h, q, k: s + 0.1 * x[1, k]},
    ],
    ids=["queries", "keys"],
)
def test_an_array_of_the_share_is_refused(mods: Any, attend: Any) -> None:
    """JAX would clamp the index. An array that another number indexes may have any size."""
    message = r"_mod` reads axis 1 of an array of shape \(2, 3\) by `[qk]`, one of 6 rows of the whole sequence"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            on_devices(2, lambda x: mods(x["ids"][:, :3]), attend=attend), draw(6), {"ids": jnp.zeros((B, 6))}
        )
    table = {"ids": jnp.zeros((B, 3))}
    others = lambda x: {"score_mod": lambda s, b, h, q, k: s + x["ids"][b, q % 3] + x["ids"][b, (k - q) // 4]}
    jax.eval_shape(on_devices(2, others, attend=attend), draw(6), table)


@pytest.mark.parametrize("attend", [ring_attention, all_to_all_attention])
def test_lists_that_are_kept_are_of_one_device(attend: Any) -> None:
    given = draw(6)
    mask = block_mask(causal(), given["query"], given["key"], given["value"])
    with pytest.raises(TypeError, match="`mask_mod` is a BlockMask, which `attention` alone takes; pass the function"):
        jax.eval_shape(on_devices(2, lambda _: {"mask_mod": mask}, attend=attend), given, {})
