# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the prepass, runs its PTX in `warp_emulator`, and compares lists and bits with a brute-force predicate."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tile_list_rule
from emulated_launch import compile_kernel, place, start
from tile_list_rule import Entry, TileList

from jax_fastattn.kernels.arguments.prepass import PrepassScalars
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.prepass.kernel import PrepassKernel
from jax_fastattn.kernels.tiles import lists as tile_lists
from jax_fastattn.kernels.tiles.lists import PrepassConfig
from jax_fastattn.limits import UNBOUNDED


@dataclass(frozen=True)
class Predicate:
    """What hides pairs of queries and keys, with sizes of their own.

    Attributes:
        batch, query_heads, group, queries, keys: sizes of the call.
        mask: its shape; None without one.
        density: how many of its elements are True.
        blocks: how many neighbors of the mask, in both directions, are alike, so that there are full and empty tiles.
        left, right: the window.
        offsets, query_lengths, key_lengths: one for each batch entry, or none.
        segments: ids of queries and keys run from 0 to this; 0 without ids.
        sorted_ids: whether they ascend.
        document: rows of the same id; by default ids are drawn.
        shown: rectangles of the mask that are True, each first query, end, first key and end; by default it is drawn.
        seed: of the draw.
    """

    batch: int = 2
    query_heads: int = 2
    group: int = 1
    queries: int = 133
    keys: int = 201
    mask: tuple[int, int, int, int] | None = None
    density: float = 0.5
    blocks: int = 1
    left: int | None = None
    right: int | None = None
    offsets: tuple[int, ...] = ()
    query_lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    segments: int = 0
    sorted_ids: bool = True
    document: int | None = None
    shown: tuple[tuple[int, int, int, int], ...] = ()
    seed: int = 0

    def draw(self) -> dict[str, np.ndarray]:
        """Returns the operands by name."""
        random = np.random.default_rng(self.seed)
        found: dict[str, np.ndarray] = {}
        if self.mask is not None:
            coarse = random.random((*self.mask[:2], *(-(-n // self.blocks) for n in self.mask[2:]))) < self.density
            fine = coarse.repeat(self.blocks, 2).repeat(self.blocks, 3)
            found["mask"] = fine[:, :, : self.mask[2], : self.mask[3]].copy()
            if self.shown:
                found["mask"][:] = False
            for query, query_end, key, key_end in self.shown:
                found["mask"][..., query:query_end, key:key_end] = True
        if self.segments:
            for name, length in (("query_segment_ids", self.queries), ("key_value_segment_ids", self.keys)):
                ids = random.integers(-1, self.segments, (self.batch, length)).astype(np.int32)
                found[name] = np.sort(ids, 1) if self.sorted_ids else ids
                if self.document is not None:
                    found[name][:] = np.arange(length) // self.document
        for name, values in (
            ("query_offset", self.offsets),
            ("query_seq_lengths", self.query_lengths),
            ("key_value_seq_lengths", self.key_lengths),
        ):
            if values:
                found[name] = np.array(values, np.int32)
        return found

    def seen(self, operands: dict[str, np.ndarray]) -> np.ndarray:
        """Returns `[B, N, T, S]`: which query sees which key. Lengths of queries hide nothing here."""
        shape = (self.batch, self.query_heads, self.queries, self.keys)
        seen = np.ones(shape, bool)
        if "mask" in operands:
            mask = operands["mask"]
            if mask.shape[1] not in (1, self.query_heads):
                mask = mask.repeat(self.group, 1)
            seen &= mask
        i, j = np.arange(self.queries)[:, None], np.arange(self.keys)
        position = i + operands.get("query_offset", np.zeros(self.batch, np.int32))[:, None, None]
        hidden = np.zeros((self.batch, self.queries, self.keys), bool)
        if self.left is not None:
            hidden |= j < position - self.left
        if self.right is not None:
            hidden |= j > position + self.right
        if self.key_lengths:
            hidden |= j >= operands["key_value_seq_lengths"][:, None, None]
        if self.segments:
            hidden |= operands["query_segment_ids"][:, :, None] != operands["key_value_segment_ids"][:, None]
        return seen & ~hidden[:, None]

    @property
    def heads(self) -> int:
        """Heads with bits of their own."""
        return 1 if self.mask is None else self.mask[1]

    @property
    def entries(self) -> int:
        """Batch entries with bits of their own."""
        per_entry = self.offsets or self.query_lengths or self.key_lengths or self.segments
        return self.batch if per_entry or (self.mask is not None and self.mask[0] > 1) else 1

    def members(self, config: PrepassConfig) -> int:
        """Heads that share a list."""
        return self.group if config.transposed and self.heads == self.query_heads and self.heads > 1 else 1

    def sizes(self, config: PrepassConfig, *, one_row: bool = False) -> tile_lists.Sizes:
        """Returns the sizes that the results depend on; with `one_row` those of the first tile of queries."""
        queries = config.rows if one_row else self.queries
        return tile_lists.Sizes(self.entries, self.heads, self.members(config), queries, self.keys)

    def spec(self, config: PrepassConfig, arch: str) -> KernelSpec:
        """Returns the compile key."""
        return KernelSpec(
            op="prepass",
            arch=arch,
            operand_dtype="bfloat16",
            head_dim=64,
            v_head_dim=64,
            mask=self.mask is not None,
            segment_ids=self.segments > 0,
            window_left=self.left is not None,
            window_right=self.right is not None,
            query_offset=bool(self.offsets),
            query_seq_lengths=bool(self.query_lengths),
            key_value_seq_lengths=bool(self.key_lengths),
            config=config,
        )

    def scalars(self, config: PrepassConfig, *, one_row: bool = False) -> PrepassScalars:
        """Returns the scalars of a launch."""
        mask = self.mask or (1, 1, 1, 1)
        return PrepassScalars(
            **self.sizes(config, one_row=one_row)._asdict(),
            mask_batch=mask[1] if mask[0] > 1 else 0,
            mask_rows=mask[2],
            mask_keys=mask[3],
            window_left=UNBOUNDED if self.left is None else self.left,
            window_right=UNBOUNDED if self.right is None else self.right,
        )


@functools.cache
def texts(spec: KernelSpec, ctas: int) -> dict[str, str]:
    """Returns the PTX of the kernels; see `compile_kernel`."""
    return compile_kernel(PrepassKernel(spec, ctas), spec)


def run(
    predicate: Predicate,
    config: PrepassConfig,
    operands: dict[str, np.ndarray],
    *,
    arch: str = "sm_90a",
    one_row: bool = False,
    ctas: int = 1056,
) -> dict[str, np.ndarray]:
    """Returns what the prepass writes, by name; what it does not write is -77.

    Args:
        predicate: what hides pairs.
        config: sizes of the tiles.
        operands: of the call; those that the prepass lacks are ignored.
        arch: the architecture; on Hopper the second launch begins early.
        one_row: whether all tiles of queries share a list.
        ctas: how many CTAs share the tiles, about.
    """
    spec = predicate.spec(config, arch)
    shapes = tile_lists.shapes(config, predicate.sizes(config, one_row=one_row))
    arrays: dict[str, Any] = {name: x.astype(np.uint8) if x.dtype == bool else x for name, x in operands.items()}
    arrays |= {name: np.full(shape, -77, np.int32) for name, shape in shapes.items()}
    memory, buffers = place(spec, arrays)
    for launch in PrepassKernel(spec, ctas).launches(buffers, predicate.scalars(config, one_row=one_row)):
        start(launch, texts(spec, ctas), memory, finds_races=True)
    return {name: memory.read(getattr(buffers, name), shape, np.int32) for name, shape in shapes.items()}


def fragment_bits(config: PrepassConfig, words: np.ndarray) -> np.ndarray:
    """Returns the matrix `[own, columns]` that the words of a tile stand for."""
    words = words.reshape(config.own // 16, config.words, 32).view(np.uint32)
    found = np.zeros((config.own, 64 * config.words), bool)
    for fragment, word, lane in np.ndindex(words.shape):
        for i, n, e in np.ndindex(2, 8, 2):
            row, column = 16 * fragment + 8 * i + lane // 4, 64 * word + 8 * n + lane % 4 * 2 + e
            found[row, column] = words[fragment, word, lane] >> (16 * i + 2 * n + e) & 1
    return found[:, : config.visited]


def check(predicate: Predicate, config: PrepassConfig, *, ctas: int = 1056) -> None:
    """Runs the prepass and compares lists, ranks, counts, live rows and bits with the predicate.

    Args:
        predicate: what hides pairs.
        config: sizes of the tiles.
        ctas: see `run`.
    """
    operands = predicate.draw()
    seen = predicate.seen(operands)
    found = run(predicate, config, operands, ctas=ctas)
    compare(config, predicate.sizes(config), found, seen, predicate.query_lengths)


def compare(
    config: PrepassConfig,
    sizes: tile_lists.Sizes,
    found: dict[str, np.ndarray],
    seen: np.ndarray,
    query_lengths: Sequence[int] = (),
) -> None:
    """Compares lists, ranks, counts, live rows and bits with what is visible.

    Args:
        config: sizes of the tiles.
        sizes: which batch entries and heads have lists of their own.
        found: what the prepass has written, by name.
        seen: `[B, N, T, S]`; lengths of queries hide nothing in it.
        query_lengths: one for each batch entry, or none.
    """
    step = seen.shape[1] // sizes.heads
    for entry, plane in np.ndindex(sizes.batch, sizes.heads // sizes.members):
        heads = [plane * sizes.members + k for k in range(sizes.members)]
        end = query_lengths[entry] if query_lengths else seen.shape[2]
        planes = [seen[entry, head * step] for head in heads]
        wanted = tile_list_rule.classify(config, planes, end)
        _check_lists(config, found, (entry, plane), wanted)
        for head, matrix in zip(heads, planes, strict=True):
            _check_bits(config, found["bits"][entry, head], matrix, end, wanted)


def _check_lists(
    config: PrepassConfig, found: dict[str, np.ndarray], at: tuple[int, int], wanted: list[TileList]
) -> None:
    for own, (got, want) in enumerate(zip(found["lists"][at], wanted, strict=True)):
        count = len(want.edges) + len(want.fulls)
        entries = want.entries(config)
        assert list(got[:2]) == [len(want.edges), len(want.fulls)], (at, own)
        assert got[tile_lists.LAST_EDGES] == want.last_edges(config), (at, own)
        first = tile_lists.HEADER_WORDS
        assert [Entry.of(int(x)) for x in got[first : first + count]] == entries, (at, own)
        if config.own <= tile_lists.MAX_LIVE_ROWS:
            live = want.live + [True] * (128 - len(want.live))
            words = got[tile_lists.LIVE : tile_lists.LIVE + 4].view(np.uint32)
            assert [bool(words[i // 32] >> (i % 32) & 1) for i in range(128)] == live, (at, own)
            assert got[tile_lists.HAS_DEAD_ROWS] == (not all(live)), (at, own)
    if config.transposed:
        tiles = [entry.tile for each in wanted for entry in (*each.edges, *each.fulls)]
        counts = found["counts"][at]
        np.testing.assert_array_equal(counts, np.bincount(tiles, minlength=len(counts)), err_msg=str(at))


def _check_bits(config: PrepassConfig, bits: np.ndarray, matrix: np.ndarray, end: int, wanted: list[TileList]) -> None:
    """Compares the bits of edge tiles: those of rows that exist, and of padding only where it is hidden."""
    queries, keys = matrix.shape
    padded = np.zeros((-(-queries // config.rows) * config.rows, -(-keys // config.keys) * config.keys), bool)
    padded[:queries, :keys] = matrix
    padded[end:] = False
    if config.transposed:
        padded = padded.T
    length = queries if config.transposed else keys
    for own, each in enumerate(wanted):
        for entry in each.edges:
            tile = bits[own, entry.tile]
            want = padded[own * config.own :, entry.tile * config.visited :][: config.own, : config.visited]
            got = fragment_bits(config, tile[: -tile_lists.LIVE_WORDS])
            counts = config.own if config.transposed else max(end - own * config.own, 0)
            np.testing.assert_array_equal(got[:counts], want[:counts], err_msg=str((own, entry)))
            live = want.any(0)
            live[max(length - entry.tile * config.visited, 0) :] = True
            words = tile[-tile_lists.LIVE_WORDS :].view(np.uint32)
            assert [bool(words[i // 32] >> (i % 32) & 1) for i in range(config.visited)] == list(live), (own, entry)
