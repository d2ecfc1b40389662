# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`block_mask`: a pytree of arrays that calls take in the place of a function, with lists for the kernels of a GPU.

On a CPU XLA makes the lists, and calls do not read them. `tests/kernels/masks/test_mask_mods.py` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fastattn import attention, attention_varlen, block_mask, causal, explain, target_arch
from jax_fastattn.ffi import TARGET_NAME

B, T, N, K, H = 2, 160, 4, 2, 16
IDS = jnp.arange(B * T).reshape(B, T) // 50
Q, KEY = (jax.random.normal(jax.random.key(i), (B, T, heads, H), jnp.bfloat16) for i, heads in ((0, N), (1, K)))


@pytest.fixture(autouse=True)
def _arch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Lists are for a Hopper GPU, and lowering for CUDA compiles nothing."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    with target_arch("sm_90a"):
        yield


def documents(ids: jax.Array) -> Any:
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)


def made(**options: Any) -> Any:
    return block_mask(documents(IDS), Q, KEY, KEY, **options)


def expected(query: jax.Array = Q, **options: Any) -> jax.Array:
    return attention(query, KEY, KEY, mask_mod=documents(IDS), **options)


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def test_it_holds_arrays_and_no_function() -> None:
    leaves, structure = jax.tree.flatten(made())
    assert leaves and all(type(x) is type(Q) for x in leaves)
    assert len(made().lists) == 5  # lists and bits forward, and with counts backward
    other = jax.tree.structure(block_mask(documents(IDS + 1), Q, KEY, KEY))
    assert structure == other and hash(structure) == hash(other)
    assert structure != jax.tree.structure(block_mask(causal(), Q, KEY, KEY))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (Q, KEY, KEY)]
    for x, y in zip(leaves, jax.tree.leaves(block_mask(documents(IDS), *shapes)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_sizes_allocate_nothing() -> None:
    """Arrays of these sizes would take 2^60 bytes."""
    query, key = (jax.ShapeDtypeStruct((1 << 19, T, heads, 1 << 29), jnp.bfloat16) for heads in (N, K))
    mask = block_mask(causal(), query, key, key, key_value_seq_lengths=jnp.full(1 << 19, 3))
    assert mask.sizes == (1 << 19, N, T, T) and not mask.lists  # no kernel takes this head dim
    with pytest.raises(TypeError, match="`query` is ShapeDtypeStruct, expected an array"):
        attention(query, key, key)  # pyright: ignore[reportArgumentType]
    unbatched = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (Q, KEY, KEY)]
    same(
        attention(Q[0], KEY[0], KEY[0], mask_mod=block_mask(causal(), *unbatched)),
        attention(Q, KEY, KEY, is_causal=True)[0],
    )


def test_it_travels_between_programs() -> None:
    """Out of one jitted function, into another one, donated, and carried by a scan."""
    mask = jax.jit(lambda ids: block_mask(documents(ids), Q, KEY, KEY))(IDS)
    call = jax.jit(lambda mask: attention(Q, KEY, KEY, mask_mod=mask))
    same(call(mask), expected())
    same(call(block_mask(documents(IDS + 1), Q, KEY, KEY)), expected())
    assert call._cache_size() == 1

    def layer(carry: Any, _: Any) -> Any:
        x, mask = carry
        return (attention(x, KEY, KEY, mask_mod=mask), mask), None

    (out, kept), _ = jax.lax.scan(layer, (Q, mask), length=2)
    same(out, attention(expected(), KEY, KEY, mask_mod=mask))
    for x, y in zip(jax.tree.leaves(mask), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(x, y)
    consume = jax.jit(lambda mask: (mask, attention(Q, KEY, KEY, mask_mod=mask)), donate_argnums=0)
    returned, out = consume(mask)
    same(out, expected())
    same(call(returned), expected())


def test_gradients_are_those_of_the_function() -> None:
    def loss(query: jax.Array, mask: Any) -> jax.Array:
        return attention(query, KEY, KEY, mask_mod=mask).astype(jnp.float32).sum()

    found, wanted = (jax.jit(jax.grad(loss))(Q, mask) for mask in (made(), made()))
    same(found, wanted)
    same(wanted, jax.grad(lambda query: loss(query, documents(IDS)))(Q))


def test_queries_are_mapped_and_lists_are_not() -> None:
    mask = made()
    mapped = jax.vmap(lambda query: attention(query, KEY, KEY, mask_mod=mask))(jnp.stack([Q, Q]))
    same(mapped[1], expected())
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), mask)
    with pytest.raises(NotImplementedError, match=r"the lists of a BlockMask cannot be mapped by `jax\.vmap`"):
        jax.vmap(lambda mask: attention(Q, KEY, KEY, mask_mod=mask))(stacked)
    with pytest.raises(NotImplementedError, match="`block_mask` and the lists of a BlockMask cannot be mapped"):
        jax.vmap(lambda ids: block_mask(documents(ids), Q, KEY, KEY))(jnp.stack([IDS, IDS]))


def test_it_holds_all_that_hides_pairs() -> None:
    options: dict[str, Any] = {
        "local_window_size": (30, None),
        "query_offset": jnp.array([2, 0]),
        "key_value_seq_lengths": jnp.array([100, 150]),
        "segment_ids": IDS // 2,
        "mask": jax.random.bernoulli(jax.random.key(0), 0.9, (B, K, T, T)),
    }
    same(attention(Q, KEY, KEY, mask_mod=made(**options)), expected(**options))
    for name, x in options.items():
        with pytest.raises(ValueError, match=f"`{name}` is given with a BlockMask, .* pass it to `block_mask`"):
            attention(Q, KEY, KEY, mask_mod=made(), **{name: x})
    with pytest.raises(ValueError, match="a BlockMask for B = 2, N = 4, T = 160, S = 160, and the call has B = 2"):
        attention(Q[:, :9], KEY, KEY, mask_mod=made())
    with pytest.raises(TypeError, match="`mask_mod` is a BlockMask, which `attention` alone takes"):
        attention_varlen(Q[0], KEY[0], KEY[0], jnp.array([0, T]), jnp.array([0, T]), mask_mod=made())  # pyright: ignore
    with pytest.raises(TypeError, match="unexpected keyword argument 'window_size'"):
        made(window_size=3)


@pytest.mark.parametrize(("head_dim", "prepasses"), [(64, 2), (192, 3)])
def test_a_call_runs_no_prepass_of_its_own(head_dim: int, prepasses: int) -> None:
    q, key = (jax.ShapeDtypeStruct((B, T, heads, head_dim), jnp.bfloat16) for heads in (N, K))
    mask = jax.eval_shape(lambda: block_mask(documents(IDS), q, key, key))

    def step(query: jax.Array, key: jax.Array, mask: Any, **options: Any) -> Any:
        return jax.grad(lambda x: attention(x, key, key, mask_mod=mask, **options).astype(jnp.float32).sum())(query)

    assert calls.count_launches(calls.cuda_text(step, q, key, mask)) == 2
    made_inside = lambda q, key: step(q, key, documents(IDS))
    assert calls.count_launches(calls.cuda_text(made_inside, q, key)) == 2 + prepasses
    assert calls.count_launches(calls.cuda_text(lambda: block_mask(documents(IDS), q, key, key).lists)) == prepasses


def test_other_tiles_have_lists_of_their_own() -> None:
    """So has one entry of a batch whose entries had lists of their own, as a device may have it."""
    q, key = (jax.ShapeDtypeStruct((B, T, heads, 64), jnp.bfloat16) for heads in (N, K))
    mask = block_mask(documents(IDS), q, key, key)
    said = explain(q, key, key, mask_mod=mask).note
    assert said.count(", kept") == 2 and "made in the call" not in said
    wide = [jax.ShapeDtypeStruct((*x.shape[:3], 256), jnp.bfloat16) for x in (q, key, key)]
    said = explain(*wide, mask_mod=mask).note
    assert "made in the call, since kept ones have other tiles" in said
    call = lambda q, k, v, mask: attention(q, k, v, mask_mod=mask)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mask)
    mapped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (q, key, key)]
    text = calls.cuda_text(jax.vmap(call, in_axes=(0, 0, 0, None)), *mapped, shapes)
    assert calls.count_launches(text) == 2
    assert calls.count_launches(calls.cuda_text(call, q, key, key, shapes)) == 1


@pytest.mark.parametrize("inside", [False, True], ids=["passed", "made inside"])
def test_exports_for_several_platforms_take_it(inside: bool) -> None:
    """Lists for a GPU are leaves of it; a program for two platforms makes or passes them on either."""
    leaves, structure = jax.tree.flatten(made())

    def loss(query: jax.Array, given: Any) -> jax.Array:
        mask = block_mask(documents(given), Q, KEY, KEY) if inside else jax.tree.unflatten(structure, given)
        return attention(query, KEY, KEY, mask_mod=mask).astype(jnp.float32).sum()

    given = IDS if inside else leaves
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    export = jax.export.export(jax.jit(jax.value_and_grad(loss)), platforms=("cpu", "cuda"), disabled_checks=checks)
    exported = jax.export.deserialize(export(Q, given).serialize())
    assert exported.platforms == ("cpu", "cuda")
    wanted = jax.jit(jax.value_and_grad(lambda query: expected(query).astype(jnp.float32).sum()))(Q)
    for x, y in zip(exported.call(Q, given), wanted, strict=True):
        same(x, y)


def test_devices_have_a_share_of_entries_and_heads() -> None:
    """Each device has all lists, and makes its own for its share."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    arrays = [jax.device_put(x, sharding) for x in (Q, KEY, KEY)]

    def gradients(arrays: Any, mask: Any) -> Any:
        return jax.grad(lambda x: attention(*x, mask_mod=mask).astype(jnp.float32).sum())(arrays)

    found = jax.jit(gradients)(arrays, made())
    wanted = jax.jit(lambda arrays: gradients(arrays, documents(IDS)))([Q, KEY, KEY])
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=1e-2)
