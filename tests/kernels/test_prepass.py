# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The prepass in the emulator: lists, ranks, live rows and bits against a brute-force predicate."""

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_prepass
from emulated_prepass import Predicate

from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.lists import PrepassConfig

pytestmark = [pytest.mark.slow, pytest.mark.whole]

# One kind of each: tiles of one and of several words, keys that fill no word, more rows than live words.
TILES = (
    PrepassConfig(64, 64),
    PrepassConfig(192, 96),
    PrepassConfig(128, 80),
    PrepassConfig(64, 128, transposed=True),
    PrepassConfig(32, 48, transposed=True),
    PrepassConfig(64, 128, transposed=True, splits_edges=True),
)

CASES = {
    "random": Predicate(mask=(2, 1, 133, 201)),
    "aligned-blocks": Predicate(mask=(2, 1, 300, 320), queries=300, keys=320, blocks=64, density=0.6),
    "per-head": Predicate(mask=(1, 4, 133, 208), query_heads=4, group=2, keys=208, blocks=50),
    "per-kv-head": Predicate(mask=(2, 2, 133, 201), query_heads=4, group=2, blocks=50),
    "one-row": Predicate(mask=(2, 1, 1, 201), blocks=50),
    "one-column": Predicate(mask=(2, 1, 133, 1)),
    "one-element": Predicate(mask=(1, 1, 1, 1)),
    "causal": Predicate(mask=(1, 1, 133, 201), right=0, blocks=50),
    "window": Predicate(mask=(1, 1, 300, 320), queries=300, keys=320, left=70, right=3, density=1.0),
    "window-ends-at-tiles": Predicate(mask=(1, 1, 300, 320), queries=300, keys=320, left=64, right=63, density=1.0),
    "offsets": Predicate(mask=(1, 1, 133, 201), right=0, left=90, offsets=(-20, 64), density=0.9, blocks=20),
    "lengths": Predicate(
        mask=(1, 1, 133, 201), query_lengths=(70, 0), key_lengths=(201, 100), density=0.9, blocks=20
    ),
    "ids": Predicate(segments=4, queries=300, keys=320),
    "unsorted-ids": Predicate(segments=2, sorted_ids=False),
    "aligned-documents": Predicate(segments=1, document=128, queries=384, keys=256),
    "one-document-causal": Predicate(segments=1, document=999, queries=256, keys=256, right=0),
    "everything": Predicate(
        mask=(2, 1, 133, 201),
        segments=2,
        right=4,
        left=100,
        offsets=(3, -5),
        query_lengths=(133, 90),
        key_lengths=(180, 201),
        density=0.9,
    ),
}  # fmt: skip


def _name(tiles: PrepassConfig) -> str:
    return f"{tiles.rows}x{tiles.keys}{'-transposed' * tiles.transposed}{'-split' * tiles.splits_edges}"


@pytest.mark.parametrize("tiles", TILES, ids=_name)
@pytest.mark.parametrize("predicate", CASES.values(), ids=CASES)
def test_lists_and_bits(predicate: Predicate, tiles: PrepassConfig) -> None:
    emulated_prepass.check(predicate, tiles)


@pytest.mark.parametrize("tiles", [TILES[0], TILES[3]], ids=["key-lists", "query-lists"])
@pytest.mark.parametrize("name", ["per-head", "one-row", "lengths", "ids", "everything"])
def test_ctas_that_take_several_tiles(name: str, tiles: PrepassConfig) -> None:
    emulated_prepass.check(CASES[name], tiles, ctas=1)


def test_warps_wait_for_each_other_between_tiles() -> None:
    emulated_prepass.check(CASES["per-head"], TILES[0], ctas=1)


def test_lists_wait_for_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch begins early: without its wait it may read classes before the first one has written them."""
    compiled = emulated_prepass.texts

    def without_wait(spec: KernelSpec, ctas: int) -> dict[str, str]:
        return {name: ptx.replace("griddepcontrol.wait;", "") for name, ptx in compiled(spec, ctas).items()}

    emulated_prepass.check(CASES["one-row"], TILES[0])
    monkeypatch.setattr(emulated_prepass, "texts", without_wait)
    with pytest.raises(RuntimeError, match="has not waited for it"):
        emulated_prepass.check(CASES["one-row"], TILES[0])


@pytest.mark.parametrize("tiles", [PrepassConfig(32, 16), TILES[4]], ids=["key-lists", "query-lists"])
def test_lists_of_many_tiles(tiles: PrepassConfig) -> None:
    # Several warps write a list, and ranks count over more than one chunk of bytes.
    many = Predicate(batch=1, query_heads=1, queries=1100, keys=870, mask=(1, 1, 1100, 870), density=0.3, blocks=60)
    emulated_prepass.check(many, tiles, ctas=40)


def test_one_full_tile_far_after_an_edge() -> None:
    """Of the first tile of keys and of the second one: lanes of the warp that writes a list have the tiles of rows."""
    shown = [(0, 1, 0, 96), (32 * 17, 32 * 18, 0, 48), (32 * 18, 32 * 18 + 1, 0, 48), (32 * 31, 32 * 32, 48, 96)]
    predicate = Predicate(batch=1, query_heads=1, queries=1030, keys=96, mask=(1, 1, 1030, 96), shown=tuple(shown))
    emulated_prepass.check(predicate, PrepassConfig(32, 48, transposed=True, splits_edges=True))


def test_edges_after_full_tiles_of_many() -> None:
    """Several warps write a list, with full tiles in one or more of their chunks."""
    for left, document in ((None, 500), (None, 1050), (600, 2000), (1100, 1200)):
        predicate = Predicate(batch=1, segments=1, document=document, queries=1200, keys=96, left=left, right=0)
        emulated_prepass.check(predicate, PrepassConfig(32, 48, transposed=True, splits_edges=True))
