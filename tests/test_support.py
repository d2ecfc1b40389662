# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`unsupported_reasons` is the one place that knows what the kernels take; docs/support.md is made from it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from generators.support_table import support_table
from testing.borrow import borrow
from testing.cases.few_queries import FEW_QUERIES
from testing.cases.gpu import GPU_CASES
from testing.cases.masked import MASKED
from testing.combinations import BIASES

from jax_fastattn.canonical.batched import canonicalize
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.coverage import COVERAGE
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.ffi import registry
from jax_fastattn.kernels import choose, codes
from jax_fastattn.kernels.architectures import ARCHITECTURES, BORROWED, shared_memory_limit
from jax_fastattn.kernels.arguments.precision import NARROW_HEAD_DIM
from jax_fastattn.kernels.choose import SHORT_LENGTH, configured, forward_spec, kernel_spec, reads_pages
from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import (
    DKDV_DQ_HEAD_DIM,
    BackwardConfig,
    BackwardConfigs,
    BackwardMemory,
)
from jax_fastattn.kernels.sm90.backward.dq_config import DqConfig, DqMemory, dq_config
from jax_fastattn.kernels.support import (
    MAX_HEAD_DIM,
    MAX_LISTED_LENGTH,
    describe_kernels,
    speed_note,
    unsupported_reasons,
)
from jax_fastattn.limits import UNBOUNDED
from jax_fastattn.spec import Problem

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
BASE = Case(dtype="bfloat16", group=2)


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == support_table(), "run: python tests/generators/support_table.py > docs/support.md"


def test_the_page_has_rows_of_both_kinds() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert any(row.endswith("yes |") for row in rows)
    assert any(row.endswith("no |") for row in rows)


@pytest.mark.parametrize("arch", ARCHITECTURES + BORROWED)
def test_every_gpu_case_is_supported(arch: str) -> None:
    """Else the GPU suite would compare the XLA path with itself."""
    assert [str(case) for case in GPU_CASES if unsupported_reasons(case.problem(), arch)] == []


FEW = "to convert the keys moves more bytes than to read them"
ALONE = {
    "few-queries": ({"dtype": "float32", "query_length": 1}, f"there are few queries in float32; {FEW}"),
    "head-dim": ({"head_dim": 264, "v_head_dim": 64}, "`query` has head dim 264; the kernels take at most 256"),
    "v-head-dim": ({"v_head_dim": 264}, "`value` has head dim 264; the kernels take at most 256"),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_obstacle_is_one_reason(name: str) -> None:
    change, reason = ALONE[name]
    (found,) = unsupported_reasons(dataclasses.replace(BASE, **change).problem(), "sm_90a")
    assert found.text == reason


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float32_has_kernels_up_to_a_head_dim_of_each_gpu(arch: str) -> None:
    most = MAX_HEAD_DIM if shared_memory_limit(arch) > 100 << 10 else NARROW_HEAD_DIM
    case = dataclasses.replace(BASE, dtype="float32", head_dim=most, v_head_dim=64)
    assert unsupported_reasons(case.problem(), arch) == []
    kernels = [kernel_spec(case.problem(), op, arch) for op in ("forward", "backward")]
    assert {(x.family, x.products, x.operand_dtype, x.result_dtype) for x in kernels} == {
        ("sm80", "bf16x3", "bfloat16", "float32")
    }
    (reason,) = unsupported_reasons(dataclasses.replace(case, head_dim=most + 1).problem(), arch)
    assert reason.kind == "head_dim" and f"at most {most}" in reason.text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_float32_by_float16_has_the_kernels_of_float16(arch: str) -> None:
    """Of any head dim, except that the gradient of a bias has three bfloat16 products."""
    case = dataclasses.replace(BASE, dtype="float32", head_dim=MAX_HEAD_DIM, v_head_dim=64)
    problem = case.problem()
    problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, precision="tensorfloat32"))
    assert unsupported_reasons(problem, arch) == []
    for op in ("forward", "backward"):
        kernel = kernel_spec(problem, op, arch)
        assert (kernel.products, kernel.operand_dtype, kernel.result_dtype) == ("half", "float16", "float32")
        assert kernel.family == ("sm90" if arch == "sm_90a" else "sm80")
    biased = dataclasses.replace(problem, bias_shape=(1, 1, 1, problem.key_length), bias_dtype="float32")
    assert bool(unsupported_reasons(biased, arch)) == (shared_memory_limit(arch) < 100 << 10)


@pytest.mark.parametrize("arch", ARCHITECTURES + BORROWED)
@pytest.mark.parametrize("change", [{"mask": "bnts"}, {"segments": 3}], ids=["mask", "segment-ids"])
def test_all_kernels_take_masks_and_ids(change: dict, arch: str) -> None:
    assert unsupported_reasons(dataclasses.replace(BASE, **change).problem(), arch) == []


@pytest.mark.parametrize("arch", ARCHITECTURES + BORROWED)
def test_all_kernels_take_biases(arch: str) -> None:
    """Of every shape and dtype, with each other feature that a public call has."""
    others = {"logits_soft_cap": 2.0, "sinks": "n", "mask": "bts", "segments": 3, "head_dim": MAX_HEAD_DIM}
    for axes in BIASES:
        for dtype in ("bfloat16", "float16", "float32"):
            for change in ({}, *({name: x} for name, x in others.items())):
                case = dataclasses.replace(BASE, bias=axes, bias_dtype=dtype, **change)
                assert unsupported_reasons(case.problem(), arch) == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_lists_number_so_many_tiles(arch: str) -> None:
    case = dataclasses.replace(BASE, mask="ts", query_length=64, key_length=MAX_LISTED_LENGTH)
    assert unsupported_reasons(case.problem(), arch) == []
    longer = dataclasses.replace(case, key_length=MAX_LISTED_LENGTH + 1).problem()
    (reason,) = unsupported_reasons(longer, arch)
    assert reason.kind == "length" and f"at most {MAX_LISTED_LENGTH}" in reason.text
    assert unsupported_reasons(dataclasses.replace(longer, spec=BASE.spec()), arch) == []


@pytest.mark.parametrize("arch", ["sm_75", "sm_100", None])
def test_architecture(arch: str | None) -> None:
    (reason,) = unsupported_reasons(BASE.problem(), arch)
    assert reason.text == f"the GPU architecture is {arch}; the kernels run on {', '.join(ARCHITECTURES)}"


# CUDA programming guide, table "Memory Information per Compute Capability": KB for one CTA, and 1 KB more for an SM.
MEMORY = {
    163: ("sm_80", "sm_87"),
    227: ("sm_90a", "sm_100a", "sm_103a", "sm_110a"),
    99: ("sm_86", "sm_89", "sm_120a", "sm_121a"),
}


def test_the_page_has_the_architectures_in_order() -> None:
    assert tuple(COVERAGE) == ARCHITECTURES


def test_shared_memory_of_every_architecture() -> None:
    expected = {arch: kilobytes * 1024 for kilobytes, archs in MEMORY.items() for arch in archs}
    assert {arch: shared_memory_limit(arch) for arch in ARCHITECTURES} == expected


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_page_says_of_every_architecture_what_was_checked(arch: str) -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {arch} |")]
    assert len(row.split(" | ")) == 6
    never_ran = arch not in ("sm_80", "sm_86", "sm_90a")
    assert row.endswith("| nothing |") == never_ran


def test_a_gpu_that_was_not_timed_gets_a_note() -> None:
    noted = [arch for arch in ARCHITECTURES if speed_note(arch)]
    assert noted == ["sm_100a", "sm_103a", "sm_110a"]
    for arch in noted:
        assert f"were not timed on {arch}" in speed_note(arch)
        assert 'implementation="cudnn" may be faster' in speed_note(arch)


@pytest.mark.parametrize(("arch", "card"), [("sm_90-a100", "sm_80"), ("sm_90-rtx", "sm_86"), ("sm_90", "sm_90a")])
def test_a_hopper_gpu_runs_the_portable_kernels_of_another_card(
    monkeypatch: pytest.MonkeyPatch, arch: str, card: str
) -> None:
    monkeypatch.setattr(registry, "BY_CAPABILITY", dict(registry.BY_CAPABILITY))
    borrow(arch)
    spec = kernel_spec(BASE.problem(), "backward", registry.BY_CAPABILITY["9.0"])
    assert (spec.family, spec.gpu_arch) == ("sm80", "sm_90")
    assert shared_memory_limit(spec.arch) == shared_memory_limit(card)


def test_only_tiles_of_known_cards_are_borrowed() -> None:
    with pytest.raises(ValueError, match='`arch` is "sm_80"; pass one of sm_90-a100, sm_90-rtx, sm_90'):
        borrow("sm_80")


def test_all_reasons_come_together() -> None:
    problem = dataclasses.replace(BASE, head_dim=264, v_head_dim=272).problem()
    assert len(unsupported_reasons(dataclasses.replace(problem, dtype="float64"), "sm_75")) == 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_dims", [(8, 8), (20, 24), (64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_tiles_are_described(arch: str, deterministic: bool, head_dims: tuple[int, int]) -> None:
    case = dataclasses.replace(BASE, head_dim=head_dims[0], v_head_dim=head_dims[1], deterministic=deterministic)
    case = dataclasses.replace(case, key_length=SHORT_LENGTH + 1)
    families, tiles = describe_kernels(case.problem(), arch)
    family = "sm90" if arch == "sm_90a" else "sm80"
    assert families == f"{family} forward, {family} backward"
    words = tiles.replace(",", "").split()
    one_kernel = family == "sm80" or max(head_dims) <= DKDV_DQ_HEAD_DIM
    assert words[::2] == (["forward", "backward"] if one_kernel else ["forward", "dq", "dkdv"])
    assert all(int(rows) > 0 and int(keys) > 0 for rows, keys in (tile.split("x") for tile in words[1::2]))


@pytest.mark.parametrize("cap", [False, True], ids=["", "soft-cap"])
def test_hopper_backward_fits_for_every_head_dim(cap: bool) -> None:
    for head_dims in itertools.product(range(8, MAX_HEAD_DIM + 1, 8), repeat=2):
        spec = KernelSpec("backward", "sm_90a", "bfloat16", *head_dims, family="sm90")
        spec = dataclasses.replace(spec, features=(codes.SOFT_CAP,) if cap else ())
        config = configured(spec).config
        assert BackwardMemory.of(spec, config.main).fits
        assert config.adds_dq == (max(head_dims) <= DKDV_DQ_HEAD_DIM)
        dq = config.dq or dq_config(spec)
        assert DqMemory.of(spec, dq).fits
        # V and K of a tile and the next V; with overlap the last K, both tiles of this step and of the next one.
        assert dq.stages >= (5 if dq.overlap else 3)


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize(("terms", "bias_dtype"), [(1, "bfloat16"), (2, "float32")])
def test_a_feature_that_loads_as_much_as_a_bias_has_its_config(
    op: Literal["forward", "backward"], head_dim: int, terms: int, bias_dtype: Literal["bfloat16", "float32"]
) -> None:
    """Tables that ask for a bias leave no room for the stages of another feature."""
    plain = KernelSpec(op, "sm_90a", "bfloat16", head_dim, head_dim, family="sm90")
    other = Code("other", "", ("logit", "term"), score_nbytes=2 * terms)
    bias, found = (
        configured(dataclasses.replace(plain, **changes)).config
        for changes in ({"bias": "matrix", "bias_dtype": bias_dtype}, {"features": (other,)})
    )
    assert found == (dataclasses.replace(bias, shares_bias=False) if op == "forward" else bias)


def test_features_that_hold_numbers_leave_fewer_registers_to_q() -> None:
    plain = KernelSpec("forward", "sm_90a", "bfloat16", 128, 128, family="sm90")
    others = [Code("other", "", ("logit",), registers=count) for count in (0, 2)]
    features = [(), (codes.SOFT_CAP,), *((other,) for other in others)]
    found = [configured(dataclasses.replace(plain, features=x)).config.q_in_regs for x in features]
    assert found == [8, 6, 6, 5]
    rows = dataclasses.replace(plain, bias="rows")
    found = [configured(dataclasses.replace(rows, features=x)).config.q_in_regs for x in features[:2]]
    assert found == [8, 5]


@pytest.mark.parametrize("paged", [False, True])
def test_a_feature_that_asks_for_a_head_has_no_decoding_kernel(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding kernels, whose rows have several heads, refuse it where the call is lowered."""
    problem = Case("bfloat16", 2, 1, 256, num_kv_heads=2, group=4, head_dim=64).problem()
    problem = dataclasses.replace(problem, page=16, pages=32) if paged else problem
    assert forward_spec(problem, "sm_90a").op == "decode" and reads_pages(problem) == paged
    monkeypatch.setattr(choose, "_features", lambda *_, **__: (Code("other", ""),))
    assert forward_spec(problem, "sm_90a").op == "forward" and not reads_pages(problem)


# Calls whose batch decides about their kernel unless they are deterministic: which units are whole, whether keys of 17
# queries with a head each are split, and whether the rows of few units are.
_ASKS_BATCH = {
    "lengths": dataclasses.replace(BASE, query_length=1, key_length=1024, key_value_seq_lengths=(1,)),
    "2k": dataclasses.replace(BASE, query_length=1, key_length=2048, head_dim=128),
    "no-groups": dataclasses.replace(BASE, query_length=17, key_length=4096, group=1),
    "80-rows": dataclasses.replace(BASE, query_length=40, key_length=4096, head_dim=128),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", _ASKS_BATCH)
def test_the_batch_does_not_choose_the_kernel_of_a_deterministic_call(name: str, arch: str) -> None:
    """Else the bits of a row would depend on the batch size."""
    problem = dataclasses.replace(_ASKS_BATCH[name], batch=1).problem()

    def kernels(deterministic: bool) -> set[KernelSpec]:
        spec = dataclasses.replace(problem.spec, deterministic=deterministic)
        batches = (1, 2, 44, 300)
        return {forward_spec(dataclasses.replace(problem, spec=spec, batch=batch), arch) for batch in batches}

    assert len(kernels(deterministic=False)) > 1
    assert len(kernels(deterministic=True)) == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page", [0, 16])
def test_deterministic_calls_cut_keys_at_one_number(arch: str, head_dim: int, page: int) -> None:
    case = dataclasses.replace(
        BASE, query_length=1, key_value_seq_lengths=(7, 9), head_dim=head_dim, deterministic=True
    )
    found = {}
    for length in (2048, 2064, 1 << 17):
        problem = dataclasses.replace(case, key_length=length).problem()
        config = forward_spec(dataclasses.replace(problem, page=page, pages=page and 99), arch).config
        found[length] = config.splits, config.portion * config.keys
    assert found == {2048: (False, 0), 2064: (True, 2048), 1 << 17: (True, 2048)}


def test_one_kernel_computes_dq() -> None:
    for main, dq in ((BackwardConfig(64, 2), None), (BackwardConfig(64, 3, 72), DqConfig(64, 5, True))):
        with pytest.raises(ValueError, match="exactly one kernel has to compute dq"):
            BackwardConfigs(main, dq)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("sinks", ["n", None])
@pytest.mark.parametrize(("packed", "head_dim"), [(False, 64), (True, 128), (True, 192)])
def test_both_passes_have_the_same_tanh(arch: str, sinks: str | None, packed: bool, head_dim: int) -> None:
    """Else rows of P would not add up to 1; without a cap sinks compile no backward kernel of their own."""
    case = dataclasses.replace(BASE, logits_soft_cap=50.0, sinks=sinks, head_dim=head_dim)
    case = dataclasses.replace(case, batch=1, packed=((9,), (9,))) if packed else case
    forward, backward = (kernel_spec(case.problem(), op, arch) for op in ("forward", "backward"))
    is_portable = arch != "sm_90a"
    assert backward.family == ("sm80" if is_portable else "sm90")
    cap = codes.EXACT_SOFT_CAP if is_portable or sinks is not None else codes.SOFT_CAP
    assert forward.features == ((cap,) if sinks is None else (cap, codes.SINKS)) and backward.features == (cap,)
    assert kernel_spec(dataclasses.replace(BASE, sinks=sinks).problem(), "backward", arch).features == ()


@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize(("window", "heads", "longest"), [
    ((None, 0), 1, 1024),
    ((40, None), 600, 1024),
    ((None, None), 264, 512),
    ((40, 5), 264, 512),
    ((None, None), 1, 0),
])  # fmt: skip
def test_ctas_add_in_one_order(
    window: tuple[int | None, int | None], heads: int, longest: int, head_dim: int, cap: float | None
) -> None:
    """They do up to some length, and at every length if gradients are to be deterministic."""
    case = dataclasses.replace(BASE, batch=1, num_kv_heads=heads, group=1, window=window, logits_soft_cap=cap)
    case = dataclasses.replace(case, head_dim=head_dim, v_head_dim=None)
    for deterministic, limit in ((False, longest), (True, UNBOUNDED)):
        for length in (1, 512, 513, 1024, 1025, 1 << 20):
            for lengths in ((length, 130), (1, length)):
                short = dataclasses.replace(case, query_length=lengths[0], key_length=lengths[1])
                problem = dataclasses.replace(short, deterministic=deterministic).problem()
                spec = kernel_spec(problem, "backward", "sm_90a")
                assert spec.ordered == (head_dim <= 128 and max(lengths) <= limit)
                assert not kernel_spec(problem, "forward", "sm_90a").ordered
                assert kernel_spec(problem, "backward", "sm_80").ordered == deterministic


@pytest.mark.parametrize("deterministic", [False, True])
def test_ctas_add_in_one_order_to_short_packed_sequences(deterministic: bool) -> None:
    lengths = (1536,) * 40
    for packed in ((lengths, (1,) * 40), ((1,) * 40, lengths)):
        case = dataclasses.replace(BASE, batch=1, packed=packed, deterministic=deterministic)
        cases = [
            dataclasses.replace(case, query_length=total, key_length=total) for total in (42 * 1536, 42 * 1536 + 1)
        ]
        found = [kernel_spec(case.problem(), "backward", "sm_90a").ordered for case in cases]
        assert found == [True, deterministic]


@pytest.mark.parametrize(("features", "longest"), [
    ({"segments": 3, "group": 2}, UNBOUNDED),
    ({"segments": 3, "group": 2, "mask": "ts"}, UNBOUNDED),
    ({"segments": 3, "group": 1}, 1024),
    ({"mask": "ts"}, 1024),
])  # fmt: skip
def test_ctas_add_in_one_order_to_documents(features: dict[str, Any], longest: int) -> None:
    """Segment ids tell documents apart, which count as short for groups of heads; what a mask hides is not known."""
    for length in (1024, 1025, 1 << 16):
        case = dataclasses.replace(BASE, query_length=length, key_length=length, **features)
        assert kernel_spec(case.problem(), "backward", "sm_90a").ordered == (length <= longest)
        assert not kernel_spec(case.problem(), "backward", "sm_80").ordered


_IDS = jnp.zeros((1, 2049), jnp.int32)


@pytest.mark.parametrize(("mod", "ordered"), [
    (lambda b, h, q, k: (_IDS[b, q] == _IDS[b, k]) & (q >= k), True),
    (lambda b, h, q, k: (q >= k) & ((q // 512 == k // 512) & (q - k < 100)), True),
    (lambda b, h, q, k: (_IDS[b, q] == _IDS[b, k]) | (q >= k), False),
    (lambda b, h, q, k: (_IDS[b, q] == 1) & (q >= k), False),
    (lambda b, h, q, k: ((q - k) % 4 == 0) & (q >= k), False),
    (lambda b, h, q, k: q >= k, False),
])  # fmt: skip
def test_functions_that_compare_numbers_count_as_documents(mod: Any, ordered: bool) -> None:
    """They add in the order of segment ids, for groups of heads."""
    for group in (1, 2):
        found = []

        def call(query: jax.Array, key: jax.Array, found: list[KernelSpec] = found) -> jax.Array:
            problem = Problem.of(*canonicalize(query, key, key, mask_mod=mod))
            found.append(kernel_spec(problem, "backward", "sm_90a"))
            return query

        jax.eval_shape(call, *(jax.ShapeDtypeStruct((1, 2049, heads, 128), jnp.bfloat16) for heads in (4, 4 // group)))
        assert found[0].ordered == (ordered and group > 1)


def test_a_long_mask_with_is_causal_counts_as_documents() -> None:
    """It hides more than later keys, of queries that differ."""
    long = dataclasses.replace(BASE, query_length=2049, key_length=2049, is_causal=True)
    found = {mask: _backward(dataclasses.replace(long, mask=mask)).ordered for mask in ("bts", "bs", "bt")}
    assert found == {"bts": True, "bs": False, "bt": False}
    assert not _backward(dataclasses.replace(long, mask="bts", is_causal=False)).ordered
    assert not _backward(dataclasses.replace(long, mask="bts", query_length=2048, key_length=2048)).ordered


@pytest.mark.parametrize(("head_dim", "batch", "group", "longest"), [
    (128, 16, 4, 2048), (128, 1, 4, 1024), (64, 16, 4, 1024), (128, 16, 1, 1024)
])  # fmt: skip
def test_causal_groups_add_in_order_to_longer_sequences(head_dim: int, batch: int, group: int, longest: int) -> None:
    """In many CTAs, whose heads visit tiles of queries together wherever additions are ordered."""
    base = dataclasses.replace(BASE, batch=batch, num_kv_heads=8, group=group, head_dim=head_dim, is_causal=True)
    for length in (longest, longest + 1):
        spec = _backward(dataclasses.replace(base, query_length=length, key_length=length))
        assert spec.ordered == (length == longest)
        assert spec.config.main.interleaves_heads == (spec.ordered and group > 1)
    behind = dataclasses.replace(base, is_causal=False, window=(40, None), query_length=1025, key_length=1025)
    assert not _backward(behind).ordered


def _backward(case: Case) -> KernelSpec:
    return kernel_spec(case.problem(), "backward", "sm_90a")


def test_few_heads_do_not_add_in_one_order_without_a_mask() -> None:
    """Where all CTAs begin together they would wait for each other; 264 tiles of keys are two for each SM."""
    case = dataclasses.replace(BASE, batch=1, num_kv_heads=66, query_length=100)
    lengths = (384, 385)
    cases = [dataclasses.replace(case, key_length=length) for length in lengths]
    assert [kernel_spec(case.problem(), "backward", "sm_90a").ordered for case in cases] == [False, True]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_few_queries_split_their_keys_and_keep_their_rows_on_another_card(arch: str) -> None:
    for case in FEW_QUERIES.values():
        key = forward_spec(case.problem(), arch)
        assert key.op == "decode" and 16 * key.config.row_blocks >= case.query_length * case.group
        assert configured(dataclasses.replace(key, arch=arch)) == key


@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
def test_a_prepass_keeps_the_tiles_of_its_reader_on_another_card(arch: str) -> None:
    """The GPU suite and `gpu_checks.py --prepare` ask for the portable kernels of a card by `configured`."""
    prepasses = [key for key in kernel_specs(MASKED, "sm_80") if key.op == "prepass"]
    assert len({key.config for key in prepasses}) > 1
    for key in prepasses:
        moved = dataclasses.replace(key, arch=arch)
        assert configured(moved) == configured(moved, short=True) == moved
