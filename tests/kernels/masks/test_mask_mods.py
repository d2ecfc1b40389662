# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of positions in the kernels: lists and bits of the prepass, and calls of both families; emulated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_ops
import emulated_prepass
import jax
import jax.numpy as jnp
import mods
import numpy as np
from resources import kept_resources

from jax_fastattn.canonical import packed
from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.kernels import choose
from jax_fastattn.kernels.choose import forward_spec, kernel_spec, list_sizes, prepass_spec
from jax_fastattn.kernels.sm90.backward.config import LONG_LENGTH
from jax_fastattn.kernels.tiles import lists as layout
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.ops import block_mask
from jax_fastattn.ops.cuda import passes as cuda
from jax_fastattn.ops.cuda import prepass
from jax_fastattn.reference import attention_reference, visible_pairs
from jax_fastattn.spec import QKV, AttentionSpec, Operands, Problem

B, T, S, N, K = 2, 133, 201, 4, 2

_random = np.random.default_rng(3)
IDS = jnp.asarray(np.sort(_random.integers(0, 4, (B, S)), 1), jnp.int32)
WINDOWS = jnp.asarray([3, 40, 90, 200], jnp.int32)
SHOWN = jnp.asarray(_random.random((N, 2 * S)) < 0.7)
BLOCKS = jnp.asarray(_random.random((B, N, -(-T // 16), -(-S // 32))) < 0.6)
PAIRS = jnp.asarray(_random.random((T, S)) < 0.6)
WEIGHTS = jnp.asarray(_random.standard_normal((B, S)), jnp.float32)

Mod = Callable[..., Any]

# Each reads something else: positions, a number of a head, rows and keys of an entry, distances of a head, tables.
MODS: dict[str, Mod] = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q >= k),
    "windows": lambda b, h, q, k: (q - k < WINDOWS[h]) & (k - q <= 9) | (k < 4),
    "distances": lambda b, h, q, k: SHOWN[h, k - q + T],
    "blocks": lambda b, h, q, k: BLOCKS[b, h, q // 16, k // 32],
    "pairs": lambda b, h, q, k: PAIRS[q, k] | (k == q) | (k == 200),
    "dilated": lambda b, h, q, k: ((q - k) % 3 == 0) | (q // 64 == k // 64),
    "floats": lambda b, h, q, k: WEIGHTS[b, q] * 2 + jnp.abs(WEIGHTS[0, k]) > 0.01 * (q - k),
    "booleans": lambda b, h, q, k: jnp.where(IDS[b, k] > 1, q > k, ~(k - q > 20) ^ (q < 7)),
    "nothing": lambda b, h, q, k: q < 0,
    "far": lambda b, h, q, k: (q - jnp.int32(2**31 - 1) < k) & (k - 2**30 < q),
}
TILES = {
    "64x64": PrepassConfig(64, 64),
    "192x96": PrepassConfig(192, 96),
    "64x128-transposed": PrepassConfig(64, 128, transposed=True, splits_edges=True),
    "32x48-transposed": PrepassConfig(32, 48, transposed=True),
}


def draw(head_dim: int = 8) -> list[jax.Array]:
    """Returns query, key and value."""
    random = np.random.default_rng(0)
    shapes = ((B, T, N, head_dim), (B, S, K, head_dim), (B, S, K, head_dim))
    return [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def results(arrays: list[jax.Array] | None = None, **options: Any) -> list[np.ndarray]:
    """Returns output, log-sum-exp and gradients of an emulated call."""
    spec, operands = canonicalize(*(arrays or draw(64)), deterministic=True, **options)
    out, lse = cuda.forward(spec, operands)
    gradients = cuda.backward(spec, operands, out, lse, jnp.ones_like(out), None)
    return [np.asarray(x) for x in (out, lse, gradients.query, gradients.key, gradients.value)]


def by_prepass(spec: AttentionSpec, operands: Operands, config: PrepassConfig) -> list[jax.Array]:
    """Returns lists, bits and counts."""
    lists = prepass.tile_lists(spec, operands, config)
    return [x for x in (lists.lists, lists.bits, lists.counts) if x is not None]


def xla_lists(spec: AttentionSpec, operands: Operands, config: PrepassConfig) -> list[jax.Array]:
    """Returns lists, bits and counts of a `BlockMask`."""
    names = [name for name in prepass.PREDICATE if getattr(operands, name) is not None]
    shapes = tuple((name, getattr(operands, name).shape, "bfloat16") for name in QKV)
    make = functools.partial(block_mask.by_xla, names=names, shapes=shapes, spec=spec, config=config)
    found = jax.jit(make)(*(getattr(operands, name) for name in names))
    wanted = layout.shapes(config, list_sizes(Problem.of(spec, operands), config))
    return [x.reshape(wanted[name]) for x, name in zip(found, ("lists", "bits", "counts"), strict=False)]


def check_lists(mod: Mod, config: PrepassConfig, by: Any = by_prepass, **options: Any) -> None:
    """Compares what the prepass writes with the function of every pair, with other arguments."""
    spec, operands = canonicalize(*draw(), mask_mod=mod, **options)
    plain, others = canonicalize(*draw(), **options)
    lengths = options.get("query_seq_lengths", ())
    shown = others._replace(query_seq_lengths=None)
    seen = visible_pairs(plain, shown) & mods.of_pairs(mod)(*map(jnp.asarray, np.indices((B, N, T, S), np.int32)))
    made = by(spec, operands, config)
    found = {name: np.asarray(x) for name, x in zip(("lists", "bits", "counts"), made, strict=False)}
    sizes = list_sizes(Problem.of(spec, operands), config)
    emulated_prepass.compare(config, sizes, found, np.asarray(seen), [int(x) for x in lengths])


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions of users rely on JAX's promotion."""
    emulated_ops.emulate(monkeypatch)
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("name", MODS)
def test_lists_of_a_function(name: str, tiles: PrepassConfig) -> None:
    check_lists(MODS[name], tiles)


@pytest.mark.slow
@pytest.mark.whole
def test_lists_of_all_kinds_of_planes() -> None:
    """Numbers of heads, queries, keys and distances, and tables, of entries and heads of their own, in one function."""
    check_lists(_all_kinds, TILES["64x128-transposed"])


@pytest.mark.slow
@pytest.mark.whole
def test_tiles_that_are_decided_for_some_heads() -> None:
    """All pairs of most tiles count for the second head of a group, and some for the first head."""
    check_lists(lambda b, h, q, k: jnp.where(h % 2 == 1, k - q < 170, k - q > 60), TILES["64x128-transposed"])


def _all_kinds(b: Any, h: Any, q: Any, k: Any) -> Any:
    same = IDS[b, q] == IDS[b, k]
    return (same & SHOWN[h, k - q + T] & (q - k < WINDOWS[h])) | BLOCKS[b, h, q // 16, k // 32] & ((q - k) % 3 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", ["192x96", "64x128-transposed"])
def test_rich_functions_spill_little(tiles: str) -> None:
    """Numbers of keys that two queries of a lane shared took 568 bytes."""
    spec, _ = canonicalize(*draw(), mask_mod=_all_kinds)
    found = kept_resources(prepass_spec(spec, TILES[tiles], "sm_90a"))
    assert max(kernel.local_bytes for kernel in found) <= 64, found


# Arguments that hide pairs too.
OTHERS: dict[str, dict[str, Any]] = {
    "window": {"is_causal": True, "local_window_size": (70, None), "query_offset": jnp.array([20, -9])},
    "lengths": {"query_seq_lengths": jnp.array([100, T]), "key_value_seq_lengths": jnp.array([S, 90])},
    "ids": {"segment_ids": (IDS[:, :T] // 2, IDS // 2)},
    "mask of heads": {"mask": jnp.asarray(_random.random((1, N, T, S)) < 0.7)},
    "mask of key/value heads": {"mask": jnp.asarray(_random.random((B, K, T, S)) < 0.7)},
    "mask of keys": {"mask": jnp.asarray(_random.random((B, 1, 1, S)) < 0.7)},
}


@pytest.mark.slow
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize(("name", "tiles"), [("windows", "64x128-transposed"), ("documents", "64x64")])
def test_lists_of_a_function_with_other_arguments(name: str, tiles: str, others: str) -> None:
    check_lists(MODS[name], TILES[tiles], **OTHERS[others])


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("others", ["nothing", *OTHERS])
def test_xla_makes_the_same_lists(others: str, tiles: PrepassConfig) -> None:
    """Those of a `BlockMask` that is lowered for another platform."""
    options = OTHERS.get(others, {})
    for name in ("windows", "documents", "far"):
        check_lists(MODS[name], tiles, by=xla_lists, **options)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_function_gives_the_bits_of_a_mask_and_of_the_flag(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, log-sum-exp and all gradients; next to the flag, the sum of dq may have another order."""
    emulated_ops.emulate(monkeypatch, arch)
    shown = jnp.asarray(np.tri(T, S, dtype=bool))[None, None]
    by_function, by_mask = results(mask_mod=lambda b, h, q, k: q >= k), results(mask=shown)
    by_flag = results(is_causal=True)
    for i, (x, y, z) in enumerate(zip(by_function, by_mask, by_flag, strict=True)):
        np.testing.assert_array_equal(x, y)
        if i != 2:
            np.testing.assert_array_equal(x, z)


@pytest.mark.parametrize(
    ("head_dim", "length"), [(64, 320), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((96, 300), (256, 200)))]
)
def test_long_calls_of_a_function_have_the_bits_of_the_flag(
    head_dim: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiles of more queries than keys, where one warpgroup may see all of an edge tile of its CTA, or none."""
    emulated_ops.emulate(monkeypatch, "sm_90a")
    monkeypatch.setattr(choose, "SHORT_LENGTH", 0)
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal((1, length, 1, head_dim)), jnp.bfloat16) for _ in range(3)]
    by_function, by_flag = results(arrays, mask_mod=MODS["causal"]), results(arrays, is_causal=True)
    for i, (x, y) in enumerate(zip(by_function, by_flag, strict=True)):
        if i != 2:
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [300, 2176, 8192])
def test_kernels_of_a_function_add_as_with_the_flag(length: int, head_dim: int, arch: str) -> None:
    """Tiles and the order of heads; without `deterministic` Hopper's order of heads in groups may differ."""
    for kv_heads, deterministic in ((1, True), (2, True), (4, True), (4, False)):
        arrays = [jnp.zeros((2, length, n, head_dim), jnp.bfloat16) for n in (4, kv_heads, kv_heads)]

        def configs(arrays: Any = arrays, deterministic: bool = deterministic, **options: Any) -> list[Any]:
            spec, operands = canonicalize(*arrays, deterministic=deterministic, **options)
            problem = Problem.of(spec, operands)
            return [kernel_spec(problem, "backward", arch).config, forward_spec(problem, arch).config]

        (backward, forward), (wanted, flagged) = configs(mask_mod=MODS["causal"]), configs(is_causal=True)
        # These gradients of the flag visit tiles in the other order, as docs/programs.md says.
        mirrors = arch == "sm_90a" and (head_dim, kv_heads, deterministic) == (64, 4, True) and length > LONG_LENGTH
        assert (backward == wanted) != mirrors and (forward.rows, forward.keys) == (flagged.rows, flagged.keys)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", ["windows", "blocks"])
def test_calls_of_a_function_of_heads(name: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a group have bits of their own, and share lists of queries."""
    emulated_ops.emulate(monkeypatch, arch)
    sinks = jnp.asarray([0.1, -0.3, 0.7, 0.2])
    emulated_ops.compare_with_reference(*canonicalize(*draw(64), mask_mod=MODS[name], sinks=sinks))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_calls_of_packed_sequences(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows of padding, which sinks do not reach, an empty sequence, and offsets."""
    emulated_ops.emulate(monkeypatch, arch)
    starts = jnp.array([3, 40, 40, 110, 125]), jnp.array([0, 50, 60, 100, 160])
    query, key, value = (x[0] for x in draw(64))
    spec, operands = packed.canonicalize(
        query, key, value, *starts,
        mask_mod=lambda b, h, q, k: ((q - k) % 3 != 0) & (k - q < WINDOWS[b]) | (h == 2) & (k < 9),
        is_causal=True, local_window_size=(45, None), query_offset=jnp.array([13, 0, 5, -20]),
        sinks=jnp.asarray([0.1, -0.3, 0.7, 0.2]),
    )  # fmt: skip
    dlse = jnp.asarray(np.random.default_rng(2).standard_normal((1, T, N)), jnp.float32)
    emulated_ops.compare_with_reference(spec, operands, dlse)


@pytest.mark.slow
def test_few_queries_have_bits_of_rows() -> None:
    query, key, value = draw(64)
    spec, operands = canonicalize(query[:, :3], key, value, mask_mod=MODS["windows"])
    out, _ = cuda.forward(spec, operands)
    single = [x.astype(jnp.float32) for x in operands[:3]]
    wanted, _ = attention_reference(spec, operands._replace(**dict(zip(QKV, single, strict=True))))
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(wanted), atol=2**-7)
