# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The rule of the prepass against brute force, on small matrices."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tile_list_rule import Entry, TileList, classify

from jax_fastattn.kernels.choose import kernel_spec
from jax_fastattn.kernels.tiles import lists as tile_lists
from jax_fastattn.kernels.tiles.lists import PrepassConfig, Sizes, list_words, shapes
from jax_fastattn.kernels.tiles.plan import place_in_sections
from jax_fastattn.spec import QKV, AttentionSpec, Problem

TILES = tuple(
    PrepassConfig(rows, keys, transposed) for rows in (2, 3) for keys in (1, 2) for transposed in (False, True)
)


def matrices() -> Iterator[np.ndarray]:
    """Every 3 x 3 matrix, and random larger ones."""
    for bits in itertools.product((False, True), repeat=9):
        yield np.array(bits).reshape(3, 3)
    random = np.random.default_rng(0)
    for density in (0.2, 0.7, 0.95):
        yield random.random((7, 5)) < density


def own_side(config: PrepassConfig, seen: np.ndarray) -> np.ndarray:
    """Returns the matrix `[own, visited]`."""
    return seen.T if config.transposed else seen


def entries(each: TileList) -> list[Entry]:
    return each.edges + each.fulls


@pytest.mark.parametrize("config", TILES, ids=str)
def test_a_list_has_what_is_visible(config: PrepassConfig) -> None:
    for seen in matrices():
        matrix, lists = own_side(config, seen), classify(config, [seen])
        assert len(lists) == -(-len(matrix) // config.own)
        for own, each in enumerate(lists):
            rows = matrix[own * config.own :][: config.own]
            tiles = {i: rows[:, i : i + config.visited] for i in range(0, matrix.shape[1], config.visited)}
            visible = [i // config.visited for i, tile in tiles.items() if tile.any()]
            assert sorted(entry.tile for entry in entries(each)) == visible
            assert each.live == list(rows.any(1))
            for entry in entries(each):
                tile = tiles[entry.tile * config.visited]
                # Keys past the end of the array are hidden, queries past it are not looked at.
                keys = tile.shape[0] if config.transposed else tile.shape[1]
                assert (entry in each.fulls) == (tile.all() and keys == config.keys)
                assert entry.has_dead_rows == (entry in each.edges and not tile.any(0).all())


def test_edges_after_the_full_tiles() -> None:
    split = PrepassConfig(1, 2, transposed=True, splits_edges=True)
    for first, last, fulls in itertools.product(range(3), repeat=3):
        edge, full = (True, False), (True, True)
        seen = np.array([edge] * first + [full] * fulls + [edge] * last or [(False, False)])
        [found] = classify(split, [seen])
        assert found.last_edges(split) == (last if fulls else first + last)
        assert [x.tile for x in found.entries(split)] == list(range(first + fulls + last))
        whole = PrepassConfig(1, 2, transposed=True)
        assert found.last_edges(whole) == 0 and found.entries(whole) == found.edges + found.fulls
    seen = np.array([full, edge, full, edge])
    [found] = classify(split, [seen])
    assert [x.tile for x in found.entries(split)] == [1, 0, 2, 3]
    keys = PrepassConfig(2, 1)
    [found] = classify(keys, [seen.T])
    assert found.last_edges(keys) == 2 and found.entries(keys) == found.fulls + found.edges


def test_ranks_count_the_lists_before() -> None:
    for seen in matrices():
        config = PrepassConfig(2, 1, transposed=True)
        lists = [{entry.tile: entry for entry in entries(each)} for each in classify(config, [seen])]
        for tile in range(-(-len(seen) // config.rows)):
            found = [each[tile] for each in lists if tile in each]
            assert [entry.rank for entry in found] == list(range(len(found)))
            assert [entry.is_last for entry in found] == [i == len(found) - 1 for i in range(len(found))]


def _finishes(
    lists: list[TileList], config: PrepassConfig, order: list[tuple[int, int]], ctas: int, group: int
) -> bool:
    """Returns whether CTAs that take tiles of keys `(tile, head)` in order, and add in their turns, get through them.

    Heads are key/value heads; with a negative group a query tile is visited by all heads of the group before the next.
    """
    left, counts = iter(order), collections.Counter[tuple[int, int, int]]()

    def work() -> Iterator[bool]:
        """Says at each turn whether it has come."""
        for own, head in left:
            visited, members = lists[own].entries(config)[::-1], range(abs(group))
            turns = itertools.product(visited, members) if group < 0 else ((x, m) for m in members for x in visited)
            for entry, member in turns:
                place = head, member, entry.tile
                while counts[place] != entry.rank:
                    yield False
                counts[place] += 1
                yield True

    running = [work() for _ in range(ctas)]
    while True:
        came = [next(cta, None) for cta in running]
        if not any(came):
            return False not in came


def test_no_cta_waits_for_ever() -> None:
    """However few CTAs there are: turns wait for tiles of keys that CTAs have taken before."""
    config, random = PrepassConfig(2, 1, transposed=True, splits_edges=True), np.random.default_rng(1)
    matrices = [random.random((12, 6)) < density for density in (0.2, 0.5, 0.9)]
    documents = random.integers(0, 2, 12).cumsum()
    matrices.append((documents[:, None] == documents[::2]) & (np.arange(12)[:, None] >= np.arange(0, 12, 2)))
    for seen, ctas, section, group in itertools.product(matrices, (1, 2, 5), (1, 2, 3), (2, -2)):
        lists = classify(config, [seen])
        order = [place_in_sections(index, section, len(lists), 4) for index in range(4 * len(lists))]
        assert _finishes(lists, config, order, ctas, group)
        # Were the last tiles taken first, one CTA would wait for ever, unless no query tile is seen twice.
        several = any(entry.rank for each in lists for entry in each.entries(config))
        assert _finishes(lists, config, order[::-1], 1, group) == (not several)


def test_heads_that_share_a_list() -> None:
    config, some, none = PrepassConfig(2, 2, transposed=True), np.ones((2, 2), bool), np.zeros((2, 2), bool)
    assert classify(config, [some, some]) == [TileList([], [Entry(0, False, 0, True)], [True, True])]
    assert classify(config, [some, none]) == [TileList([Entry(0, True, 0, True)], [], [True, True])]
    assert classify(config, [none, none]) == [TileList([], [], [False, False])]


def test_padding_queries() -> None:
    seen = np.ones((4, 2), bool)
    queries = classify(PrepassConfig(4, 2), [seen], query_end=3)
    assert queries == [TileList([], [Entry(0, False)], [True, True, True, False])]
    keys = classify(PrepassConfig(4, 2, transposed=True), [seen], query_end=3)
    assert keys == [TileList([Entry(0, True, 0, True)], [], [True, True])]


def test_an_entry_is_read_as_it_is_written() -> None:
    assert Entry.of(5 | 1 << 15 | 3 << 16) == Entry(5, True, 3, False)
    assert Entry.of(0x7FFF - (1 << 31)) == Entry(0x7FFF, False, 0, True)


def test_shapes_are_those_of_the_kernels_tiles() -> None:
    found = shapes(PrepassConfig(64, 128, transposed=True), Sizes(2, 6, 3, 130, 300))
    assert found == {
        "lists": (2, 2, 3, list_words(3)),
        "bits": (2, 6, 3, 3, (1024 + 16) // 4),
        "classes": (2, 2, 3, 3),
        "live": (2, 2, 3, 3, 4),
        "counts": (2, 2, 3),
        "visitors": (2, 2, 3, 4),
    }
    assert list_words(3) == 12 and list_words(4) == 12 and list_words(5) == 16
    assert PrepassConfig(128, 80).tile_nbytes == 2064 and PrepassConfig(192, 128).bits_nbytes == 3072
    assert PrepassConfig(128, 80, bits=False).tile_nbytes == 16


def _compared(arch: str, length: int, mask: tuple[int, ...] | None = None, batch: int = 1) -> list[bool]:
    """Returns whether the kernels of forward and backward pass compare rows; without a mask there are ids."""
    given = ("query_segment_ids", "key_value_segment_ids") if mask is None else ("mask",)
    spec = AttentionSpec(present=(*QKV, *given), scale=1.0)
    problem = Problem(spec, "bfloat16", batch, length, length, 4, 2, 64, 64, mask_shape=mask)
    return [kernel_spec(problem, op, arch).compared for op in ("forward", "backward")]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_rows_are_compared_where_bits_would_take_too_much_memory(arch: str) -> None:
    k = 1024
    assert _compared(arch, 32 * k) == [False, False]
    assert _compared(arch, 64 * k) == [True, True]
    # A plane for each batch entry, or for each head of the mask.
    assert _compared(arch, 32 * k, batch=3) == [True, True]
    assert _compared(arch, 32 * k, (3, 2, 32 * k, 1), batch=3) == [True, True]
    # Tiles of queries share one list, and those of keys do not.
    assert _compared(arch, 64 * k, (1, 1, 1, 64 * k)) == [False, True]
    # A mask that is given whole is larger than its bits.
    assert _compared(arch, 64 * k, (1, 1, 64 * k, 64 * k)) == [False, False]


def test_live_keys_say_everything_if_all_queries_see_the_same_keys() -> None:
    def alike(mask: tuple[int, ...], op: Any = "backward", arch: str = "sm_90a", dims: int = 64, **more: Any) -> bool:
        present = (*QKV, "mask", *more.pop("present", ()))
        spec = AttentionSpec(present=present, scale=1.0, **more)
        problem = Problem(spec, "bfloat16", 3, 200, 300, 4, 2, dims, dims, mask_shape=mask)
        return kernel_spec(problem, op, arch).alike

    assert alike((3, 1, 1, 300)) and alike((1, 2, 1, 300)) and alike((3, 1, 1, 1), dims=128)
    assert alike((3, 1, 1, 300), present=("key_value_seq_lengths",))
    # Query heads of a group share a list, and a query may see other keys than another one.
    assert not alike((1, 4, 1, 300)) and not alike((3, 1, 200, 300))
    assert not alike((3, 1, 1, 300), is_causal=True, window=(None, 0))
    for name in ("query_seq_lengths", "query_offset"):
        assert not alike((3, 1, 1, 300), present=(name,))
    assert not alike((3, 1, 1, 300), present=("query_segment_ids", "key_value_segment_ids"))
    # Other kernels read bits.
    assert not alike((3, 1, 1, 300), dims=192) and not alike((3, 1, 1, 300), arch="sm_80")
    assert not alike((3, 1, 1, 300), op="forward")


def test_the_limit_is_that_of_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sizes = PrepassConfig(64, 128, transposed=True), Sizes(2, 3, 1, 130, 300)
    nbytes = 2 * 3 * (3 * 3) * (64 * 128 // 8 + 16)
    monkeypatch.setattr(tile_lists, "MAX_BITS_NBYTES", nbytes)
    assert not tile_lists.has_too_many_bits(config, sizes)
    monkeypatch.setattr(tile_lists, "MAX_BITS_NBYTES", nbytes - 1)
    assert tile_lists.has_too_many_bits(config, sizes)
