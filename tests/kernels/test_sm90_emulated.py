# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels without a GPU: their PTX, emulated, gives results and gradients of every variant and feature."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import emulated_hopper
import emulated_packed
import hopper_emulator
import numpy as np
from emulated_backward import Sizes, draw_operands, stored_queries, visibility

from jax_fastattn.cases.case import Case
from jax_fastattn.compilation.compiler import _open_runtime
from jax_fastattn.kernels import codes
from jax_fastattn.kernels.choose import configured, kernel_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.forward.config import ForwardConfig

pytestmark = pytest.mark.slow

ALL = {
    "window_left": True,
    "window_right": True,
    "query_seq_lengths": True,
    "key_value_seq_lengths": True,
    "query_offset": True,
}
CAUSAL = {"window_right": True}
WINDOW = {"window_left": True, "window_right": True}
TILES = Sizes(batch=1, kv_heads=2, queries=320, keys=384, left=128, right=63)
SQUARE = Sizes(batch=2, kv_heads=3, queries=300, keys=400, right=0)
# A row of each table: head dims, dtype, features, sizes.
FORWARD = {
    "d64-short-everything": (64, 64, "bfloat16", {**ALL, "group": 2, "short": True}, None),
    "d64-causal": (64, 64, "float16", {**CAUSAL, "features": (codes.SINKS,)}, SQUARE),
    "d96-short": (96, 96, "bfloat16", {**CAUSAL, "short": True}, None),
    "d96-everything": (96, 96, "bfloat16", {**ALL, "group": 3}, None),
    "d128-full": (128, 128, "bfloat16", {}, SQUARE),
    "d128-everything": (128, 128, "bfloat16", {**ALL, "group": 2, "features": (codes.SOFT_CAP, codes.SINKS)}, None),
    "d128-sections-of-heads": (
        128,
        128,
        "bfloat16",
        {**CAUSAL, "window_left": True},
        Sizes(batch=1, kv_heads=20, queries=150, keys=150),
    ),
    "d64-window-ends-at-tiles": (64, 64, "bfloat16", WINDOW, TILES),
    "d192v128": (192, 128, "float16", ALL, None),
    "d256-causal": (256, 256, "bfloat16", CAUSAL, SQUARE),
}
BACKWARD = {
    "d8-causal": (8, 8, "bfloat16", CAUSAL, None),
    "d16v48": (16, 48, "float16", {}, None),
    "d64-causal-negative-scale": (64, 64, "bfloat16", CAUSAL, Sizes(2, 300, 400, 3, right=0, scale=-0.3)),
    "d64-everything": (64, 64, "bfloat16", {**ALL, "group": 2, "dlse": True}, None),
    "d64-soft-cap": (64, 64, "bfloat16", {**ALL, "features": (codes.SOFT_CAP,)}, None),
    "d64-window-ends-at-tiles": (64, 64, "bfloat16", WINDOW, TILES),
    "d96-everything": (96, 96, "float16", {**ALL, "group": 3}, None),
    "d128-causal": (128, 128, "bfloat16", CAUSAL, SQUARE),
    "d128-everything": (
        128,
        128,
        "bfloat16",
        {**ALL, "group": 2, "features": (codes.EXACT_SOFT_CAP,), "dlse": True, "dsinks": True},
        None,
    ),
    "d128-two-heads-of-odd-lengths": (128, 128, "bfloat16", {**ALL, "group": 2, "dlse": True}, None),
    "d128-one-tile-of-keys": (128, 128, "float16", {"group": 3}, Sizes(1, 100, 70, 1)),
    "d64v128-lengths": (64, 128, "bfloat16", {"query_seq_lengths": True, "key_value_seq_lengths": True}, None),
    "d128v64-left": (128, 64, "bfloat16", {"window_left": True}, None),
    "d160-soft-cap": (160, 160, "float16", {"features": (codes.SOFT_CAP,), "key_value_seq_lengths": True}, None),
    "d192v128-causal": (192, 128, "bfloat16", CAUSAL, SQUARE),
    "d40v256-full": (40, 256, "bfloat16", {}, None),
    "d256-everything": (256, 256, "bfloat16", {**ALL, "group": 2, "dlse": True}, None),
}
# Hidden rows without lengths, of which several tiles are full, straddle an end of a live range, or are hidden
# altogether: chunked prefill (some queries, many keys), first queries before the first key, keys left of the window of
# the first query, and both ends of keys and queries in one tile.
OFFSET, BEFORE, PAST = {**CAUSAL, "query_offset": True}, (-150, -7), (190, 3)
HIDDEN = {
    "fewer-queries-than-keys": ({**CAUSAL, "dlse": True}, Sizes(1, 33, 290, 1, right=0)),
    "queries-before-the-first-key": (
        {**OFFSET, "dlse": True, "group": 2},
        Sizes(2, 333, 270, 1, right=0, offsets=BEFORE),
    ),
    "keys-left-of-the-window": (
        {"window_left": True, "query_offset": True},
        Sizes(2, 333, 270, 1, left=50, offsets=PAST),
    ),
    "window-and-offsets": (
        {**OFFSET, "window_left": True, "group": 2},
        Sizes(3, 333, 333, 1, left=50, right=0, offsets=(190, -190, 420)),
    ),
    "both-ends-in-a-tile": ({**OFFSET, "window_left": True}, Sizes(2, 30, 60, 2, left=5, right=2, offsets=(20, -12))),
}


def _spec(op: str, head_dim: int, v_head_dim: int, dtype: str, features: dict) -> KernelSpec:
    given = {name: value for name, value in features.items() if name != "short"}
    spec = KernelSpec(op, "sm_90a", dtype, head_dim, v_head_dim, family="sm90", **given)
    return configured(spec, short=features.get("short", False))


@pytest.fixture(autouse=True)
def _runtime() -> None:
    _open_runtime()


@pytest.mark.parametrize("name", FORWARD)
def test_outputs_match_the_reference(name: str) -> None:
    *kernel, sizes = FORWARD[name]
    emulated_hopper.check_forward(_spec("forward", *kernel), sizes)


@pytest.mark.whole
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("config", [
    ForwardConfig(2, 64, 6, ping_pong=True), ForwardConfig(2, 64, 5, overlap_qk_pv=False, persistent=True),
    ForwardConfig(1, 48, 3),
], ids=str)  # fmt: skip
def test_values_that_no_query_sees(name: str, config: ForwardConfig) -> None:
    """NaN and Inf there came out of the products."""
    features, sizes = HIDDEN[name]
    features = {feature: given for feature, given in features.items() if feature != "dlse"}
    spec = dataclasses.replace(_spec("forward", 32, 32, "bfloat16", features), config=config)
    emulated_hopper.check_forward(spec, sizes)


@pytest.mark.parametrize(
    ("name", "head_dims", "ordered"),
    [
        *((name, head_dims, False) for name in HIDDEN for head_dims in ((32, 32), (32, 160))),
        ("window-and-offsets", (96, 64), True),
    ],
)
def test_rows_that_see_nothing_or_that_nothing_sees(name: str, head_dims: tuple[int, int], ordered: bool) -> None:
    """NaN and Inf there came out of the products of the kernels `dkdv_dq`, `dkdv` and `dq`."""
    features, sizes = HIDDEN[name]
    emulated_hopper.check_backward(_spec("backward", *head_dims, "bfloat16", {**features, "ordered": ordered}), sizes)


@pytest.mark.parametrize(("v_head_dim", "dlse"), [(8, True), (8, False), (136, True)])
def test_sinks_gradient_of_rows_that_see_nothing(v_head_dim: int, dlse: bool) -> None:
    """Their log-sum-exp is the sink: its cotangent counts, unless the row is padding; that of their output never."""
    sizes = Sizes(2, 70, 40, 2, right=0, offsets=(-30, 5), query_lengths=(70, 50))
    features = {**OFFSET, "query_seq_lengths": True, "dsinks": True, "dlse": dlse}
    spec = _spec("backward", 8, v_head_dim, "bfloat16", features)
    sees, inside = visibility(spec, sizes)[0], stored_queries(spec, sizes)
    assert (~sees & inside).any() and not inside.all()
    emulated_hopper.check_backward(spec, sizes)


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_match_the_reference(name: str) -> None:
    *kernel, sizes = BACKWARD[name]
    emulated_hopper.check_backward(_spec("backward", *kernel), sizes)


# Cases that in semaphore order reach the code of `d8-causal`, `d64-everything` and `d128-everything`.
SAME_IN_ORDER = ("d64-causal-negative-scale", "d64-soft-cap", "d128-two-heads-of-odd-lengths")
ADD_DQ = [name for name, row in BACKWARD.items() if _spec("backward", *row[:4]).config.adds_dq]


@pytest.mark.parametrize("name", [name for name in ADD_DQ if name not in SAME_IN_ORDER])
def test_ordered_backward(name: str) -> None:
    """CTAs add to tiles of dq in one order."""
    *kernel, sizes = BACKWARD[name]
    emulated_hopper.check_backward(dataclasses.replace(_spec("backward", *kernel), ordered=True), sizes)


LONG = {
    "d8": (8, {}, Sizes(1, 1100, 1090, 3, right=0)),
    "d64-lengths": (
        64,
        {**OFFSET, "query_seq_lengths": True, "key_value_seq_lengths": True},
        Sizes(2, 700, 1100, 1, right=0, offsets=(400, 100), query_lengths=(650, 700), key_lengths=(1100, 900)),
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", LONG)
def test_long_causal_calls_in_order_begin_with_the_last_keys(name: str) -> None:
    head_dim, features, sizes = LONG[name]
    spec = _spec("backward", head_dim, head_dim, "bfloat16", {**CAUSAL, **features, "ordered": True})
    spec = configured(spec, long=True)
    assert spec.config.main.mirrors
    emulated_hopper.check_backward(spec, sizes)


@pytest.mark.parametrize(
    ("head_dim", "length", "group", "deterministic", "mirrors"),
    [
        (64, 4096, 1, True, True),
        (64, 1024, 1, True, False),
        (64, 4096, 1, False, False),
        (64, 4096, 2, True, False),
        (128, 4096, 1, True, False),
    ],
)
def test_which_gradients_begin_with_the_last_keys(
    head_dim: int, length: int, group: int, deterministic: bool, mirrors: bool
) -> None:
    case = Case("bfloat16", 1, length, length, 4, group, head_dim, is_causal=True, deterministic=deterministic)
    assert kernel_spec(case.problem(), "backward", "sm_90a").config.main.mirrors == mirrors


def _fused(ordered: bool) -> KernelSpec:
    """Returns a key of the tests of gradients, whose texts are compiled once."""
    return dataclasses.replace(_spec("backward", *BACKWARD["d8-causal"][:4]), ordered=ordered)


def _check_without_counts(monkeypatch: pytest.MonkeyPatch, kernel: str, *, ordered: bool) -> None:
    """Checks that the main kernel hangs if a kernel does not count what it has prepared for later heads."""
    spec, sizes = _fused(ordered), Sizes()
    texts = dict(emulated_hopper.backward_texts(spec))
    texts[kernel], removed = re.subn(r"\n[^\n]*atom\.release[^\n]*", "", texts[kernel])
    assert removed == 1
    monkeypatch.setattr(emulated_hopper, "backward_texts", lambda _: texts)
    with pytest.raises(RuntimeError, match=r"all warpgroups wait: .* in global memory"):
        emulated_hopper.run_backward(spec, sizes, draw_operands(spec, sizes)[0])


@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
def test_a_head_without_statistics_is_waited_for(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_without_counts(monkeypatch, "PreprocessKernel.background", ordered=ordered)


def test_a_head_without_zeros_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in semaphore order need none."""
    _check_without_counts(monkeypatch, "DkdvDqKernel.kernel", ordered=False)


def test_counters_are_set_before_a_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main kernel waits at its end: it relies on the launch between, which lets it begin after its own wait."""
    spec, sizes = _fused(ordered=False), Sizes()
    texts = dict(emulated_hopper.backward_texts(spec))
    wait, begin = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    before, after = texts["PreprocessKernel.background"].split(wait)
    assert begin in after
    texts["PreprocessKernel.background"] = before + begin + after.replace(begin, wait)
    monkeypatch.setattr(emulated_hopper, "backward_texts", lambda _: texts)
    with pytest.raises(RuntimeError, match="has not waited for it"):
        emulated_hopper.run_backward(spec, sizes, draw_operands(spec, sizes)[0])


def _orders(ptx: str) -> list[tuple[str, str]]:
    """Returns the releasing atomics of a PTX text, each with the last wait or global write before it."""
    found = re.findall(r"bar\.warp\.sync|bar\.sync|barrier\.sync|mbarrier\.try_wait|(?:st|red)\S*global|atom\.\w+", ptx)
    return [(before, x) for before, x in itertools.pairwise(found) if x in ("atom.release", "atom.acq_rel")]


# Additions to counters, each with the wait for the threads whose writes it counts: zeros of a later head, and a tile of
# dq, whose last CTA has to see what the others have added. In semaphore order only the tile is counted here.
COUNTS = {
    False: [("bar.warp.sync", "atom.release"), ("mbarrier.try_wait", "atom.acq_rel")],
    True: [("mbarrier.try_wait", "atom.release")],
}


@pytest.mark.parametrize("ordered", COUNTS, ids=["atomic", "ordered"])
def test_a_count_releases_what_it_counts(ordered: bool) -> None:
    """A relaxed count includes sums that the last CTA may not see yet. Emulated CTAs, which run in turn, see them."""
    texts = emulated_hopper.backward_texts(_fused(ordered))
    assert {name: _orders(ptx) for name, ptx in texts.items()} == {
        "PreprocessKernel.prologue": [],
        "PreprocessKernel.background": [("bar.sync", "atom.release")],
        "DkdvDqKernel.kernel": COUNTS[ordered],
    }


@pytest.mark.parametrize("ordered", COUNTS, ids=["atomic", "ordered"])
def test_sums_of_other_ctas_are_not_read_from_l1(ordered: bool) -> None:
    """A plain load may find sums there that are older than the additions of other CTAs."""
    ptx = emulated_hopper.backward_texts(_fused(ordered))["DkdvDqKernel.kernel"]
    assert set(re.findall(r"ld\.\S*global\S*\.v4\.f32", ptx)) == {"ld.relaxed.gpu.global.v4.f32"}


# Scores differ by hundreds, and some warps have to compute a full tile again.
JUMPS = Sizes(batch=1, kv_heads=2, queries=133, keys=520, scale=2.0, cap=200.0)
CAPPED_JUMPS = _spec("forward", 128, 128, "bfloat16", {"features": (codes.SOFT_CAP,)})


@pytest.mark.parametrize("sinks", [False, True])
def test_no_rough_tanh_with_sinks(sinks: bool) -> None:
    """The error of a rough tanh is not even: the gradient of a sink, a sum over all rows, would show it."""
    forward, backward = CAPPED_JUMPS, _spec("backward", *BACKWARD["d64-soft-cap"][:4])
    if sinks:
        forward, backward = (
            _spec(op, *table["d128-everything"][:4]) for op, table in (("forward", FORWARD), ("backward", BACKWARD))
        )
    assert (codes.SINKS in forward.features) == backward.dsinks == sinks
    for texts in (emulated_hopper.forward_texts(forward), emulated_hopper.backward_texts(backward)):
        assert any("tanh.approx" in ptx for ptx in texts.values()) != sinks


@pytest.fixture
def computed_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts lanes of the forward kernels' mma.sync, which computes the scores of a full tile again."""
    lanes = []
    compute = hopper_emulator.Warpgroup.do_mma

    def count(group: hopper_emulator.Warpgroup, parts: list[str], operands: list[str], active: np.ndarray) -> None:
        lanes.append(active.sum())
        compute(group, parts, operands, active)

    monkeypatch.setattr(hopper_emulator.Warpgroup, "do_mma", count)
    return lanes


@pytest.mark.parametrize(("head_dim", "short"), [(64, True), (64, False), (128, False), (256, False)])
def test_scores_far_above_the_maxima(head_dim: int, short: bool, computed_again: list[int]) -> None:
    emulated_hopper.check_forward(_spec("forward", head_dim, head_dim, "bfloat16", {"short": short}), JUMPS)
    assert computed_again


def test_a_tile_that_is_computed_again_has_the_soft_cap(computed_again: list[int]) -> None:
    emulated_hopper.check_forward(CAPPED_JUMPS, JUMPS)
    assert computed_again


def test_nan_in_padding_queries_computes_no_tile_again(computed_again: list[int]) -> None:
    """Other rows of the warp would be rounded in another way, and every full tile would take twice as long."""
    sizes = Sizes(batch=1, queries=133, keys=520, query_lengths=(70,))
    emulated_hopper.check_forward(_spec("forward", 128, 128, "bfloat16", {"query_seq_lengths": True}), sizes)
    assert not computed_again


def test_nan_behind_a_packed_sequence_computes_no_tile_again(computed_again: list[int]) -> None:
    """Queries of the next sequence share a warp with the last ones of a sequence."""
    pack = emulated_packed.Pack(queries=(70,), keys=(520,))
    emulated_packed.check_forward(_spec("forward", 128, 128, "bfloat16", {"packed": True}), pack)
    assert not computed_again
