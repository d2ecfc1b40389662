# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The decoding kernels of both families in the emulators, where few CTAs share the keys. No GPU needed."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import pytest

from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured
from jax_fastattn.kernels.key import KernelSpec

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("nvidia-cutlass-dsl is not installed", allow_module_level=True)

import emulated_decode
from emulated_backward import Sizes
from emulated_decode import check

pytestmark = [pytest.mark.slow, pytest.mark.whole]

LENGTHS = {"key_value_seq_lengths": True}
CAUSAL = {**LENGTHS, "window_right": True, "query_offset": True}
BAND = {**CAUSAL, "window_left": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and how it is split.

    Attributes:
        sizes: those of `Sizes` that differ from `_SIZES`.
        features: of the compile key.
        head_dims: of K and of V.
        group: query heads of a key/value head.
        split: options of `check`.
        config: what differs from the config that the tables have.
    """

    sizes: dict[str, Any]
    features: dict[str, Any] = dataclasses.field(default_factory=dict)
    head_dims: tuple[int, int] = (128, 128)
    group: int = 4
    split: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


_SIZES = Sizes(queries=1, keys=300, batch=2, kv_heads=2, right=0)
_SIDE_BY_SIDE = {"multiprocessors": 7, "side_heads": 2}
_MANY = tuple(37 * i % 131 for i in range(40))
# Entries with keys, with more empty ones between them than a warp holds at a time, and around them.
_SPARSE = tuple(100 if i in (3, 35, 120) else 0 for i in range(130))
_WHOLE = {"splits": False}
_PORTIONS = {"portion": 2}
CASES = {
    # 5 tiles of each of 4 units are dealt to 3 CTAs; the last tile has 44 keys.
    "plain": Case({}),
    # Units without keys, of one key, of whole tiles, and of one key more, next to each other.
    "lengths": Case({"batch": 7, "key_lengths": (0, 300, 1, 64, 0, 65, 130)}, LENGTHS),
    "fewer-tiles-than-ctas": Case(
        {"keys": 100, "kv_heads": 1, "key_lengths": (3, 0)}, LENGTHS, split={"multiprocessors": 5}
    ),
    # A warp looks at 32 batch entries at a time.
    "40-entries": Case(
        {"keys": 130, "batch": 40, "kv_heads": 1, "key_lengths": _MANY}, LENGTHS, split={"multiprocessors": 4}
    ),
    # Each CTA goes on from one of them to the next.
    "runs-of-empty-entries": Case(
        {"keys": 100, "batch": 130, "kv_heads": 1, "key_lengths": _SPARSE}, LENGTHS, split={"multiprocessors": 2}
    ),
    # Shares of 3 tiles, and units of 6: no CTA has a part of two units.
    "units-end-with-shares": Case({"keys": 360, "batch": 1}, split={"multiprocessors": 4}),
    # CTAs meet in each of several segments.
    "32-rows-of-short-units": Case(
        {"queries": 8, "keys": 100, "batch": 6, "key_lengths": (100, 1, 64, 65, 0, 30)}, LENGTHS
    ),
    # 10 units are dealt to 3 CTAs: no combine kernel.
    "whole-units": Case({"batch": 5}, config=_WHOLE),
    "fewer-whole-units-than-ctas": Case({"batch": 1, "keys": 70}, split={"multiprocessors": 4}, config=_WHOLE),
    "whole-units-side-by-side": Case(
        {"queries": 2, "batch": 3, "kv_heads": 4, "left": 20},
        {"window_left": True, "features": (codes.SINKS,)},
        split={"multiprocessors": 5, "side_heads": 2},
        config=_WHOLE,
    ),
    # Each unit has a CTA of its own, with or without tiles.
    "whole-units-of-lengths": Case(
        {"batch": 5, "key_lengths": (0, 300, 1, 64, 0), "query_lengths": (1, 1, 0, 1, 0)},
        {**LENGTHS, "query_seq_lengths": True, "features": (codes.SINKS,)},
        split={"multiprocessors": 11},
        config=_WHOLE,
    ),
    "whole-units-of-lengths-in-turn": Case(
        {"batch": 40, "keys": 130, "kv_heads": 1, "queries": 2, "left": 70}
        | {"key_lengths": _MANY, "offsets": tuple(x - 2 for x in _MANY)},
        {**BAND, "features": (codes.SOFT_CAP,)},
        split={"multiprocessors": 4},
        config=_WHOLE,
    ),
    "whole-units-of-pages": Case(
        {"batch": 3, "keys": 192, "key_lengths": (0, 192, 17)}, {**LENGTHS, "page": 16}, config=_WHOLE
    ),
    # Portions of 2 tiles: shares of CTAs begin within portions, and some CTAs have none.
    "portions": Case({}, config=_PORTIONS),
    "portions-of-lengths": Case(
        {"batch": 7, "key_lengths": (0, 300, 1, 128, 0, 129, 64)}, LENGTHS, split=_SIDE_BY_SIDE, config=_PORTIONS
    ),
    "fewer-portions-than-ctas": Case(
        {"queries": 2, "batch": 3, "key_lengths": (3, 0, 300), "query_lengths": (2, 1, 1)},
        {**LENGTHS, "query_seq_lengths": True, "features": (codes.SINKS,)},
        split={"multiprocessors": 11},
        config=_PORTIONS,
    ),
    "portions-of-runs-of-empty-entries": Case(
        {"keys": 200, "batch": 130, "kv_heads": 1, "key_lengths": tuple(2 * x for x in _SPARSE)},
        LENGTHS,
        split={"multiprocessors": 2},
        config=_PORTIONS,
    ),
    "portions-of-a-band": Case(
        {"queries": 3, "keys": 601, "batch": 3, "kv_heads": 1, "left": 150}
        | {"key_lengths": (601, 330, 77), "offsets": (590, 300, -200)},
        {**BAND, "features": (codes.SINKS,)},
        config=_PORTIONS,
    ),
    "side-by-side": Case({"batch": 7, "key_lengths": (0, 300, 1, 64, 0, 65, 130)}, LENGTHS, split=_SIDE_BY_SIDE),
    # CTAs are left over.
    "2-of-4-side-by-side": Case(
        {"queries": 2, "batch": 3, "kv_heads": 4, "key_lengths": (0, 300, 100)},
        LENGTHS,
        split={"multiprocessors": 5, "side_heads": 2},
    ),
    "ratio-7": Case({"queries": 3, "keys": 301, "key_lengths": (250, 77), "offsets": (240, 70)}, CAUSAL, group=7),
    "64-rows-sinks": Case(
        {"queries": 16, "keys": 301, "kv_heads": 1, "key_lengths": (301, 20), "offsets": (285, 4)},
        {**CAUSAL, "features": (codes.SINKS,)},
    ),
    "128-rows": Case(
        {"queries": 32, "keys": 301, "kv_heads": 1, "key_lengths": (301, 40), "offsets": (269, 8)}, CAUSAL
    ),
    "window-sinks": Case(
        {"queries": 3, "keys": 601, "batch": 3, "kv_heads": 1, "left": 150}
        | {"key_lengths": (601, 330, 77), "offsets": (590, 300, -200)},
        {**BAND, "features": (codes.SINKS,)},
    ),
    "window-without-offset": Case(
        {"queries": 9, "keys": 70, "left": 3}, {"window_left": True, "window_right": True}, group=2
    ),
    # Rows that see nothing in a unit that other rows see.
    "rows-that-see-nothing": Case(
        {"queries": 3, "offsets": (-1, -2)}, {"window_right": True, "query_offset": True}, group=2
    ),
    "query-lengths-sinks": Case(
        {"queries": 4, "batch": 3, "query_lengths": (4, 0, 1), "key_lengths": (300, 77, 129)},
        {**LENGTHS, "query_seq_lengths": True, "features": (codes.SINKS,)},
        group=3,
    ),
    "soft-cap-negative-scale-float16": Case(
        {"scale": -0.3}, {"features": (codes.SOFT_CAP,), "dtype": "float16"}, group=2
    ),
    "negative-scale": Case({"keys": 200, "batch": 1, "scale": -0.3}, group=8),
    "large-scores": Case({"keys": 500, "batch": 1, "kv_heads": 1, "scale": 3.0}),
    "d64": Case(
        {"keys": 500, "batch": 3, "kv_heads": 1, "key_lengths": (500, 129, 0)}, LENGTHS, head_dims=(64, 64), group=8
    ),
    "d80": Case({"queries": 2, "kv_heads": 1, "key_lengths": (300, 129)}, LENGTHS, head_dims=(80, 80), group=3),
    "d192v128": Case({"keys": 200, "kv_heads": 1, "key_lengths": (200, 33)}, LENGTHS, head_dims=(192, 128), group=8),
    "d40v256-32-rows": Case(
        {"queries": 4, "keys": 200, "kv_heads": 1, "key_lengths": (200, 33)}, LENGTHS, head_dims=(40, 256), group=8
    ),
    "d256-64-rows": Case(
        {"queries": 8, "keys": 200, "kv_heads": 1, "key_lengths": (200, 33)}, LENGTHS, head_dims=(256, 256), group=8
    ),
}


def _pages(page: int, lengths: tuple[int, ...], keys: int, **other: Any) -> Case:
    sizes = {"batch": len(lengths), "keys": keys, "key_lengths": lengths} | other.pop("sizes", {})
    return Case(sizes, {**LENGTHS, "page": page} | other.pop("features", {}), **other)


_SOME = (0, 384, 1, 128, 17, 250)
PAGED = {
    **{f"page{page}": _pages(page, _SOME, 384) for page in (16, 32, 48, 64, 128, 192)},
    # An entry after the last one of the table would be outside of it; the last tile has one page.
    "page16-full": _pages(16, (272, 16, 272), 272, sizes={"kv_heads": 1}),
    "page16-more-than-32-boxes": _pages(16, (16, 1200, 729), 1200, sizes={"kv_heads": 1}),
    "page16-portions": _pages(16, (16, 1200, 729), 1200, sizes={"kv_heads": 1}, config=_PORTIONS),
    "page16-side-by-side": _pages(
        16, (1200, 4, 729), 1200, head_dims=(64, 64), split={"multiprocessors": 4, "side_heads": 2}
    ),
    "page16-4-queries": _pages(
        16,
        (300, 4, 129),
        320,
        sizes={"queries": 4, "offsets": (296, 0, 125)},
        features={**CAUSAL, "features": (codes.SINKS,)},
    ),
    "page16-ratio-7": _pages(16, (301, 77), 304, sizes={"queries": 3, "offsets": (298, 74)}, features=CAUSAL, group=7),
    # A strip has 32 keys, two boxes, by TMA; 16 keys by cp.async.
    "page16-d64": _pages(16, (300, 4, 129), 320, head_dims=(64, 64)),
    "page16-64-rows": _pages(
        16, (304, 20), 304, sizes={"queries": 16, "kv_heads": 1, "offsets": (288, 4)}, features=CAUSAL
    ),
    "page64-64-rows": _pages(
        64, (320, 20), 320, sizes={"queries": 16, "kv_heads": 1, "offsets": (304, 4)}, features=CAUSAL
    ),
    "page32-d192v128": _pages(32, (190, 33), 192, sizes={"kv_heads": 1}, head_dims=(192, 128), group=8),
    "page16-d256": _pages(16, (190, 33), 192, sizes={"kv_heads": 1}, head_dims=(256, 256), group=8),
    # Keys of a page before the window may be NaN.
    **{
        f"page{page}-window": _pages(
            page,
            (601, 330, 77),
            640,
            sizes={"queries": 3, "kv_heads": 1, "left": 150, "offsets": (590, 300, -200)},
            features={**BAND, "features": (codes.SINKS,)},
        )
        for page in (16, 128)
    },
    "page32-window-d64": _pages(
        32,
        (601, 330, 77),
        640,
        sizes={"queries": 3, "kv_heads": 1, "left": 77, "offsets": (590, 300, 70)},
        features=BAND,
        head_dims=(64, 64),
    ),
    "page16-rows-that-see-nothing": _pages(
        16, (300, 300), 304, sizes={"queries": 3, "offsets": (-1, -2)}, features=CAUSAL, group=2
    ),
    "page16-float16-cap": _pages(
        16, (200, 33), 208, sizes={"scale": -0.3}, features={"features": (codes.SOFT_CAP,), "dtype": "float16"}, group=2
    ),
}
FAMILIES = {"sm90": "sm_90a", "sm80": "sm_80"}


def _spec(family: str, case: Case, sizes: Sizes) -> KernelSpec:
    features: dict[str, Any] = {"dtype": "bfloat16", **case.features}
    dtype = features.pop("dtype")
    spec = KernelSpec(
        "decode",
        FAMILIES[family],
        dtype,
        *case.head_dims,
        group=case.group,
        family=family,  # pyright: ignore[reportArgumentType] (a key of FAMILIES)
        **features,
    )
    spec = configured(spec, rows=sizes.queries * case.group)
    return dataclasses.replace(spec, config=dataclasses.replace(spec.config, **case.config))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_decoding_matches_reference(name: str, family: str) -> None:
    case = CASES[name]
    sizes = dataclasses.replace(_SIZES, **case.sizes)
    check(_spec(family, case, sizes), sizes, **case.split)


def test_partial_results_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that adds them up begins early: without its wait it may read them before they are written."""
    spec = _spec("sm90", CASES["plain"], _SIZES)
    check(spec, _SIZES)
    texts = {name: ptx.replace("griddepcontrol.wait;", "") for name, ptx in emulated_decode.texts(spec).items()}
    monkeypatch.setattr(emulated_decode, "texts", lambda _: texts)
    with pytest.raises(RuntimeError, match="has not waited for it"):
        check(spec, _SIZES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PAGED)
def test_decoding_from_pages_matches_reference(name: str, family: str) -> None:
    case = PAGED[name]
    sizes = dataclasses.replace(_SIZES, **case.sizes)
    check(_spec(family, case, sizes), sizes, **case.split)


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_entries_share_pages(family: str) -> None:
    case = _pages(16, (208, 208, 208), 208)
    sizes = dataclasses.replace(_SIZES, **case.sizes)

    def change(arrays: dict[str, np.ndarray]) -> None:
        for name in ("key", "value"):
            arrays[name][1:, :160] = arrays[name][:1, :160]
            arrays[name][2, 176:192] = arrays[name][2, 160:176]

    check(_spec(family, case, sizes), sizes, change=change)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_whose_logits_are_all_minus_infinity_is_empty(family: str) -> None:
    """In eight partial results one after the other, which are added up at a time."""
    sizes = dataclasses.replace(_SIZES, batch=1, keys=600, kv_heads=1)
    case = Case({}, group=2)

    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays["key"][..., 0] = np.abs(arrays["key"][..., 0]) + 1
        arrays["query"][0, 0, 1] = 0
        arrays["query"][0, 0, 1, 0] = -np.inf

    check(_spec(family, case, sizes), sizes, multiprocessors=10, change=change)
