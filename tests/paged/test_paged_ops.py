# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`paged_attention` under transformations and meshes, and as it is lowered; `test_paged.py` has its contract."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_paged import NAMES, draw
from test_sharding import JAX_VERSION, collectives

from jax_fastattn import attention, explain, paged_attention, target_arch
from jax_fastattn.ffi import TARGET_NAME

PAGES = NAMES[1:3]
CAUSAL = {"is_causal": True, "local_window_size": (30, None), "return_residual": True}


def attend(arguments: dict[str, Any]) -> Any:
    return paged_attention(**arguments, **CAUSAL)


# Derivatives.

DERIVATIVES: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "linearize": jax.linearize,
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "grad of scan": lambda f, x: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c)[:1], None), x, length=2)[0].sum())(
        x
    ),
}
REFUSED = "`paged_attention` is differentiated, expected a call without derivatives; call `attention` with dense keys"


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_are_refused(derivative: str) -> None:
    arguments = draw()
    arguments = {name: x[:1] if name in ("query", "page_table", "lengths") else x for name, x in arguments.items()}
    pages = arguments["key_pages"]

    def run(query: jax.Array) -> jax.Array:
        return paged_attention(**arguments | {"query": query, "value_pages": pages})

    with pytest.raises(NotImplementedError, match=re.escape(REFUSED)):
        DERIVATIVES[derivative](run, arguments["query"])


@pytest.mark.parametrize("name", ["key_pages", "value_pages", "sinks", "scale"])
def test_no_argument_has_a_derivative(name: str) -> None:
    arguments = draw() | {"sinks": jnp.ones(6), "scale": jnp.float32(0.3)}
    with pytest.raises(NotImplementedError, match=re.escape(REFUSED)):
        jax.grad(lambda x: paged_attention(**arguments | {name: x}).sum())(arguments[name])


def test_a_stopped_gradient_is_no_derivative() -> None:
    arguments, factor = draw(), jnp.float32(2.0)

    def run(factor: jax.Array) -> jax.Array:
        return jnp.sum(
            factor * paged_attention(**arguments | {"query": jax.lax.stop_gradient(factor * arguments["query"])})
        )

    expected = paged_attention(**arguments | {"query": 2.0 * arguments["query"]}).sum()
    calls.assert_same(jax.grad(run)(factor), expected)


# Batching.

OTHERS = {"sinks": jnp.arange(6.0), "scale": jnp.float32(0.4), "query_offset": jnp.array([5, 0, 38, 31, 40])}
SUBSETS = {name: (name,) for name in ("query", "page_table", "lengths", "query_offset", "sinks", "scale")} | {
    "all but pages": ("query", "page_table", "lengths", "query_offset", "sinks", "scale"),
    "batch": ("query", "page_table", "lengths"),
}


def mapped_arguments(mapped: tuple[str, ...]) -> dict[str, Any]:
    """Three examples of what is mapped."""
    arguments = draw() | OTHERS
    shift = lambda x: jnp.stack(
        [jnp.roll(x, i, axis=tuple(range(x.ndim))) * (1 if x.ndim else i + 1) for i in range(3)]
    )
    return {name: shift(x) if name in mapped else x for name, x in arguments.items()}


@pytest.mark.parametrize("subset", SUBSETS)
def test_vmap_is_a_loop_with_one_call(subset: str) -> None:
    mapped = SUBSETS[subset]
    arguments = mapped_arguments(mapped)
    axes = {name: 0 if name in mapped else None for name in arguments}
    found = jax.vmap(attend, in_axes=(axes,))(arguments)
    for i in range(3):
        one = {name: x[i] if name in mapped else x for name, x in arguments.items()}
        calls.assert_same(jax.tree.map(lambda x, i=i: x[i], found), attend(one))
    text = str(jax.make_jaxpr(jax.vmap(attend, in_axes=(axes,)))(arguments))
    assert text.count("= jax_fastattn_paged[") == 1


def test_vmap_over_other_axes_and_twice() -> None:
    arguments = mapped_arguments(SUBSETS["batch"])
    moved = {name: jnp.moveaxis(x, 0, -1) if name in SUBSETS["batch"] else x for name, x in arguments.items()}
    axes = {name: -1 if name in SUBSETS["batch"] else None for name in arguments}
    calls.assert_same(
        jax.vmap(attend, in_axes=(axes,))(moved),
        jax.vmap(attend, in_axes=(axes | dict.fromkeys(SUBSETS["batch"], 0),))(arguments),
    )
    outer = jax.vmap(
        jax.vmap(attend, in_axes=({name: 0 if name == "query" else None for name in arguments},)),
        in_axes=({name: 0 if name == "page_table" else None for name in arguments},),
    )
    both = draw() | OTHERS
    both |= {name: jnp.stack([both[name], both[name][::-1]]) for name in ("query", "page_table")}
    found = outer(both)
    for i in range(2):
        for j in range(2):
            one = both | {"page_table": both["page_table"][i], "query": both["query"][j]}
            calls.assert_same(jax.tree.map(lambda x, i=i, j=j: x[i, j], found), attend(one))


@pytest.mark.parametrize("name", PAGES)
def test_vmap_over_pages_is_refused(name: str) -> None:
    arguments = mapped_arguments((name,))
    axes = {key: 0 if key == name else None for key in arguments}
    with pytest.raises(NotImplementedError, match=f"`{name}` is mapped by vmap, expected one array of pages"):
        jax.vmap(attend, in_axes=(axes,))(arguments)


# Decoding.


def test_decodes_in_a_scan_with_a_donated_cache() -> None:
    """Each step appends a row by a scatter; the outputs are those of causal attention over all tokens."""
    steps, keys = 35, jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(key, (2, steps, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True))
    table = jnp.array([[5, 0, 3], [1, 6, 2]], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(cache: tuple[jax.Array, jax.Array]) -> Any:
        def step(cache: tuple[jax.Array, jax.Array], t: jax.Array) -> Any:
            page = table[:, t // 16]
            cache = tuple(pages.at[page, t % 16].set(x[:, t]) for pages, x in zip(cache, (k, v), strict=True))
            lengths = jnp.full(2, t + 1, jnp.int32)
            return cache, paged_attention(q[:, t, None], *cache, table, lengths, is_causal=True)[:, 0]

        return jax.lax.scan(step, cache, jnp.arange(steps, dtype=jnp.int32))

    _, found = decode(tuple(jnp.full((7, 16, 2, 8), jnp.nan) for _ in range(2)))
    calls.assert_same(jnp.moveaxis(found, 0, 1), attention(q, k, v, is_causal=True))


# Meshes.


def split_arguments(kind: AxisType, query: P, pages: P) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A mesh, a batch of 6 with 4 key/value heads on it, and the same as plain arrays."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    keys = jax.random.split(jax.random.key(0), 4)
    plain = {
        "query": jax.random.normal(keys[0], (6, 2, 8, 8)),
        "key_pages": jax.random.normal(keys[1], (16, 16, 4, 8)),
        "value_pages": jax.random.normal(keys[2], (16, 16, 4, 8)),
        "page_table": jax.random.randint(keys[3], (6, 3), 0, 16, jnp.int32),
        "lengths": jnp.array([40, 17, 0, 1, 48, 31], jnp.int32),
    }
    batch = P(*query[:1])
    specs = {"query": query, "page_table": batch, "lengths": batch} | dict.fromkeys(PAGES, pages)
    return mesh, {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in plain.items()}, plain


KINDS = [AxisType.Auto, *([AxisType.Explicit] if JAX_VERSION >= (0, 9) else [])]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("query", "pages"),
    [
        (P("data", None, "model"), P(None, None, "model")),
        (P("data", None, None), P()),
        (P(None, None, "model"), P(None, None, "model")),
        (P(None, None, "model"), P()),
    ],
    ids=["batch and heads", "batch", "heads", "heads of the query"],
)
def test_a_mesh_splits_batch_and_heads_and_gathers_nothing(kind: AxisType, query: P, pages: P) -> None:
    mesh, split, plain = split_arguments(kind, query, pages)
    with jax.set_mesh(mesh):
        compiled = jax.jit(attend).lower(split).compile()
        found = compiled(split)
    assert collectives(compiled) == []
    assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, query), 4)
    calls.assert_same(jax.device_get(found), jax.device_get(attend(plain)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize(
    ("query", "pages"),
    [
        (P("data", None, None), P("data")),
        (P("data", None, None), P("model")),
        (P(None, None, None), P(None, "data")),
        (P("data", None, "model"), P(None, None, None, "model")),
        (P(None, None, None), P(None, None, "model")),
    ],
    ids=["pages", "pages by another axis", "rows", "head dim", "heads of keys alone"],
)
def test_pages_that_a_call_would_gather_are_refused(kind: AxisType, how: str, query: P, pages: P) -> None:
    mesh, split, _ = split_arguments(kind, query, pages)
    run = jax.jit(attend) if how == "jit" else attend
    is_known = pages[2:3] != ("model",) and (how == "eager" or kind == AxisType.Explicit)  # before XLA compiles
    error = ValueError if is_known else jax.errors.JaxRuntimeError
    with jax.set_mesh(mesh), pytest.raises(error, match=r"_pages` is split over a mesh as .*replicate the pages"):
        run(split)


def test_shard_map_with_pages_of_each_device() -> None:
    """Ids count from each device's first page. The batch and the pages are split by one mesh axis."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    _, _, plain = split_arguments(AxisType.Auto, P(None), P())
    plain["page_table"] %= 8
    run = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=True)
    halves = [attend({name: x[i * len(x) // 2 : (i + 1) * len(x) // 2] for name, x in plain.items()}) for i in range(2)]
    expected = jax.tree.map(lambda *x: jnp.concatenate(x), *halves)
    for function in (jax.jit(run), run):
        calls.assert_same(jax.device_get(function(plain)), jax.device_get(expected))


def test_shard_map_with_shared_pages() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    _, _, plain = split_arguments(AxisType.Auto, P(None), P())
    specs = {name: P() if name in PAGES else P("data") for name in plain}
    run = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=P("data"), check_vma=True)
    calls.assert_same(jax.device_get(jax.jit(run)(plain)), jax.device_get(attend(plain)))


# Export and lowering.


def test_export_runs_elsewhere() -> None:
    arguments = draw()
    loaded = jax.export.deserialize(jax.export.export(jax.jit(attend))(arguments).serialize())
    calls.assert_same(loaded.call(arguments), attend(arguments))


def test_export_of_symbolic_sizes() -> None:
    b, t, m, p = jax.export.symbolic_shape("b, t, m, p")
    like = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    shapes = (
        like((b, t, 6, 8)),
        like((p, 16, 3, 8)),
        like((p, 16, 3, 4)),
        like((b, m), jnp.int32),
        like((b,), jnp.int32),
    )
    export = jax.export.export(jax.jit(attend))(dict(zip(NAMES, shapes, strict=True)))
    calls.assert_same(jax.export.deserialize(export.serialize()).call(draw()), attend(draw()))
    shapes = (shapes[0], like((p, m, 3, 8)), like((p, m, 3, 4)), *shapes[3:])
    with pytest.raises(ValueError, match="`key_pages` has the symbolic size R = m, expected a number"):
        jax.export.export(jax.jit(attend))(dict(zip(NAMES, shapes, strict=True)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("queries", [1, 100])
def test_cuda_gathers_and_launches_one_kernel(
    arch: str, queries: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel is that of the dense call, under vmap too."""
    calls.lower_for_cuda(monkeypatch, tmp_path, arch)
    arguments = draw(128, queries, jnp.bfloat16)
    run = lambda arguments: paged_attention(**arguments, is_causal=True, implementation="cuda")
    assert calls.count_launches(calls.cuda_text(run, arguments)) == 1
    axes = {name: None if name in PAGES else 0 for name in arguments}
    batch = {name: x if name in PAGES else jnp.stack([x, x]) for name, x in arguments.items()}
    assert calls.count_launches(calls.cuda_text(jax.vmap(run, in_axes=(axes,)), batch)) == 1
    table = {name: arguments[name] for name in ("page_table", "lengths")}
    with target_arch(arch):
        found = explain(*(arguments[name] for name in NAMES[:3]), **table, is_causal=True)
    dense = [jnp.zeros((5, 384, 3, x), jnp.bfloat16) for x in (8, 4)]
    with target_arch(arch):
        expected = explain(
            arguments["query"],
            *dense,
            is_causal=True,
            key_value_seq_lengths=arguments["lengths"],
            query_offset=arguments["lengths"],
        )
    forward = [part.split(separator)[0] for part, separator in ((expected.kernel, ","), (expected.variant, ";"))]
    assert (found.implementation, found.kernel, found.variant) == ("cuda", *forward)
    assert found.tile == expected.tile.split(",")[0]


# Shapes of a query and of values, and the kernel of the call; None if pages are gathered.
READ: dict[str, tuple[tuple[int, ...], int, bool]] = {
    "one query": ((5, 1, 6, 8), 8, True),
    "64 rows": ((5, 32, 6, 8), 8, True),
    "65 rows": ((5, 65, 3, 8), 8, False),
    "a head dim that is padded": ((5, 1, 6, 8), 4, False),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", READ)
def test_cuda_reads_pages_for_few_queries(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No copy of the pages is made, under vmap too, and `explain` says so."""
    calls.lower_for_cuda(monkeypatch, tmp_path, arch)
    shape, v_head_dim, is_read = READ[name]
    arguments = draw(32, dtype=jnp.bfloat16, query=jnp.ones(shape, jnp.bfloat16))
    arguments["value_pages"] = jnp.ones((19, 32, 3, v_head_dim), jnp.bfloat16)
    run = lambda arguments: paged_attention(**arguments, is_causal=True, implementation="cuda")
    axes = {name: None if name in PAGES else 0 for name in arguments}
    batch = {name: x if name in PAGES else jnp.stack([x, x]) for name, x in arguments.items()}
    for text in (calls.cuda_text(run, arguments), calls.cuda_text(jax.vmap(run, in_axes=(axes,)), batch)):
        assert calls.count_launches(text) == 1
        assert ("stablehlo.gather" in text) == (not is_read)
    arrays = [arguments.pop(x) for x in NAMES[:3]]
    with target_arch(arch):
        found = explain(*arrays, **arguments, is_causal=True)
    family = "sm90" if arch == "sm_90a" else "sm80"
    if is_read:
        assert (found.implementation, found.kernel) == ("cuda", f"{family} decode")
        assert found.tile is not None and re.fullmatch(r"decode (16|64)x\d+", found.tile)
        assert found.variant == "forward with keys of whole heads in turn"
        assert found.note.endswith("the pages are read where they lie; there is no gradient")
    else:
        assert (found.implementation, found.kernel) == ("cuda", f"{family} forward")
        assert "backward" not in str(found) and found.note.endswith("; there is no gradient")
        assert "the pages are first gathered" in found.note


def test_a_deterministic_call_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its tables have room for 129 * 16 keys, more than one portion."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    query, pages = jnp.ones((1, 1, 8, 64), jnp.bfloat16), jnp.ones((2, 16, 2, 64), jnp.bfloat16)
    arguments = {"page_table": jnp.zeros((1, 129), jnp.int32), "lengths": jnp.ones(1, jnp.int32)}
    found = [explain(query, pages, pages, **arguments, deterministic=x, arch="sm_90a").variant for x in (False, True)]
    assert found == [
        "forward with keys split over all multiprocessors",
        "forward with keys split at every 2048, the same bits in every batch",
    ]
    calls.assert_same(paged_attention(**draw(), deterministic=True), paged_attention(**draw()))


def test_export_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    arguments = draw(dtype=jnp.bfloat16)
    for pages in (arguments["value_pages"], arguments["key_pages"]):  # gathered, and read
        export = jax.export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=checks)
        loaded = jax.export.deserialize(export(arguments | {"value_pages": pages}).serialize())
        assert loaded.mlir_module().count(f"stablehlo.custom_call @{TARGET_NAME}") == 1


def test_export_for_two_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One program has the launch and, for a CPU, the gather."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    arguments = draw(dtype=jnp.bfloat16)
    arguments |= {"value_pages": arguments["key_pages"]}
    export = jax.export.export(jax.jit(attend), platforms=["cuda", "cpu"], disabled_checks=checks)(arguments)
    loaded = jax.export.deserialize(export.serialize())
    assert loaded.mlir_module().count(f"stablehlo.custom_call @{TARGET_NAME}") == 1
    calls.assert_same(loaded.call(arguments), attend(arguments))


def test_cuda_alone_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="the platform is not CUDA"):
        paged_attention(**draw(), implementation="cuda")
    calls.lower_for_cuda(monkeypatch, tmp_path)
    calls.refuse_float32(monkeypatch)
    with pytest.raises(NotImplementedError, match="the dtype is float32"):
        calls.cuda_text(lambda x: paged_attention(**x, implementation="cuda"), draw())


def test_a_fallback_names_the_line_of_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls.lower_for_cuda(monkeypatch, tmp_path)
    calls.refuse_float32(monkeypatch)
    with pytest.warns(UserWarning, match=f"for the call at {re.escape(__file__)}:[0-9]+: the dtype is float32"):
        calls.cuda_text(attend, draw())
