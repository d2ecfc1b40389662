# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What is measured: attention problems by name, and how much work each of them is.

The grid holds the tokens (B * S = 16384) and the width (N * H = 2048) and varies head dim, mask and length. The other
cases are what people train and serve: grouped heads, windows, soft caps, sinks, packing, biases, decoding.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_fastattn.cases import models
from jax_fastattn.cases.case import Case

TOKENS, WIDTH = 16384, 2048
FLOP_FORMULA = "visible pairs * N * (2 H + 2 D) forward, visible pairs * N * (6 H + 4 D) backward"


def _case(length: int, heads: int, dim: int, *, kv_heads: int | None = None, **more: object) -> Case:
    kv_heads = kv_heads or heads
    shape = {"batch": max(TOKENS // length, 1), "query_length": length, "key_length": length, "head_dim": dim}
    return Case(**{"dtype": "bfloat16", **shape, "num_kv_heads": kv_heads, "group": heads // kv_heads, **more})


def _grid() -> dict[str, Case]:
    return {
        f"d{dim}-{'causal' if causal else 'full'}-{name}": _case(length, WIDTH // dim, dim, is_causal=causal)
        for dim in (128, 64, 256)
        for causal in (True, False)
        for name, length in (("1k", 1024), ("4k", 4096), ("16k", 16384))
    }


def _drawn(low: int, high: int, total: int, *, log: bool) -> tuple[int, ...]:
    """Lengths of documents that make up so many tokens, uniform or log-uniform, the same ones in every run."""
    random, found = np.random.default_rng(0), []
    while sum(found) < total:
        drawn = np.exp(random.uniform(np.log(low), np.log(high))) if log else random.uniform(low, high)
        found.append(min(int(drawn), total - sum(found)))
    return tuple(found)


def _packed(lengths: tuple[int, ...]) -> Case:
    return _case(sum(lengths), 32, 128, kv_heads=8, is_causal=True, packed=(lengths, lengths), batch=1)


def _masks() -> dict[str, Case]:
    """Returns calls with a mask or segment ids, each after the call by the flag that they spell."""
    causal = {dim: _case(2048, 16, dim, is_causal=True) for dim in (64, 128)}
    padded = _case(2048, 16, 64, key_value_seq_lengths=tuple(int(x) for x in np.linspace(1024, 2048, 8)))
    documents = _case(2048, 16, 64, documents=((512,) * 4,) * 8)
    long = _case(8192, 32, 128, kv_heads=8, documents=((1024,) * 8,) * 2)
    return {
        "mask-random-d64": _case(2048, 16, 64, mask="ts"),
        "mask-random-d128": _case(2048, 16, 128, mask="ts"),
        "lengths-d64": padded,
        "lengths-as-mask-d64": models.as_mask(padded, "bs"),
        **{f"causal-d{dim}": case for dim, case in causal.items()},
        **{f"causal-as-mask-d{dim}": models.as_mask(case, "ts") for dim, case in causal.items()},
        "documents-as-mask-d64": models.as_mask(documents, "ts"),
        "documents-as-batch-d128": _case(1024, 32, 128, kv_heads=8, is_causal=True),
        "documents-as-packed-d128": _packed((1024,) * 16),
        "documents-as-ids-d128": dataclasses.replace(long, is_causal=True),
        "documents-as-mask-d128": dataclasses.replace(models.as_mask(long, "bts"), is_causal=True),
    }


def _biases() -> dict[str, Case]:
    """Returns calls with a bias, each with its gradient and without, next to calls without a bias."""
    both = {
        **{f"bias-d{dim}": _case(2048, 16, dim, bias="nts") for dim in (64, 128)},
        **{f"bias-keys-d{dim}": _case(2048, 16, dim, bias="bs") for dim in (64, 128)},
        "bias-rows-d64": _case(2048, 16, 64, bias="nt"),
        # Only under a soft cap weights depend on such a bias.
        **{f"bias-rows-cap-d{dim}": _case(2048, 16, dim, bias="nt", logits_soft_cap=50.0) for dim in (64, 128)},
        "bias-whole-d64": _case(2048, 16, 64, bias="bnts"),
        "bias-one-d64": _case(2048, 16, 64, bias="ts"),
        "bias-causal-d64": _case(2048, 16, 64, bias="nts", is_causal=True),
        **{f"bias-{name}": case for name, case in models.BIASED.items() if not case.constant_bias},
    }
    constant = {f"{name}-constant": dataclasses.replace(case, constant_bias=True) for name, case in both.items()}
    causal = dataclasses.replace(_case(2048, 16, 64, is_causal=True), num_kv_heads=1)
    return {
        **{f"bias-none-d{dim}": _case(2048, 16, dim) for dim in (64, 128)},
        **{name: case for pair in zip(both.items(), constant.items(), strict=True) for name, case in pair},
        # All pairs count: compare it with `bias-d64-constant`.
        "bias-spells-causal-d64": _case(2048, 16, 64, bias="nts", bias_spelled=causal, constant_bias=True),
        "bias-alibi": models.BIASED["alibi"],
    }


GRID = _grid()
# 65536 tokens each, except for one sequence that is a row of the grid. The first two are the same sequences, in a batch
# and packed.
PACKED = {
    "batch-64x1k": _case(1024, 32, 128, kv_heads=8, is_causal=True, batch=64),
    "packed-64x1k": _packed((1024,) * 64),
    "packed-log-64-8k": _packed(_drawn(64, 8192, 65536, log=True)),
    "packed-uniform-64-2k": _packed(_drawn(64, 2048, 65536, log=False)),
    "packed-1x16k": _case(16384, WIDTH // 128, 128, is_causal=True, packed=((16384,), (16384,)), batch=1),
}
OTHERS = {
    "gqa-32-8-d128-causal-8k": _case(8192, 32, 128, kv_heads=8, is_causal=True),
    "mha-32-d128-causal-8k": _case(8192, 32, 128, is_causal=True),
    "lengths-d128-causal-8k": _case(
        8192, 32, 128, is_causal=True, query_seq_lengths=(8192,) * 2, key_value_seq_lengths=(8192,) * 2
    ),
    "window-4096-d128-32k": _case(32768, 16, 128, is_causal=True, window=(4096, None)),
    "softcap-50-d256-causal-8k": _case(8192, 8, 256, is_causal=True, logits_soft_cap=50.0),
    "softcap-50-d128-causal-4k": _case(4096, 16, 128, is_causal=True, logits_soft_cap=50.0),
    "sinks-window-128-gqa-64-8-d64-4k": _case(4096, 64, 64, kv_heads=8, is_causal=True, window=(127, None), sinks="n"),
    "deterministic-d128-causal-4k": _case(4096, 16, 128, is_causal=True, deterministic=True),
    "deterministic-d64-causal-4k": _case(4096, 32, 64, is_causal=True, deterministic=True),
    "softcap-50-d64-causal-512": _case(512, 32, 64, is_causal=True, logits_soft_cap=50.0),
    "deterministic-softcap-50-d64-causal-512": _case(
        512, 32, 64, is_causal=True, logits_soft_cap=50.0, deterministic=True
    ),
    "mla-192-128-causal-4k": _case(4096, 16, 192, v_head_dim=128, is_causal=True),
    "mla-192-128-full-4k": _case(4096, 16, 192, v_head_dim=128),
    "d160-causal-4k": _case(4096, 12, 160, is_causal=True),
    "d160-full-4k": _case(4096, 12, 160),
    "d192-causal-4k": _case(4096, 10, 192, is_causal=True),
    "d192-full-4k": _case(4096, 10, 192),
    "odd-length-1000-d96-causal": _case(1000, 21, 96, is_causal=True),
    "odd-length-1000-d96-full": _case(1000, 21, 96),
    "short-512-d128-causal": _case(512, 16, 128, is_causal=True),
    "short-512-d64-causal": _case(512, 32, 64, is_causal=True),
    "short-256-d128-causal": _case(256, 16, 128, is_causal=True),
    "short-256-d64-full": _case(256, 32, 64),
    "bias-d64-2k": _case(2048, 32, 64, bias="nts"),
    "mask-d64-2k": _case(2048, 32, 64, mask="bts"),
    "decode-64x8k-gqa-32-8-d128": _case(8192, 32, 128, kv_heads=8, batch=64, query_length=1),
    "decode-1x128k-gqa-32-8-d128": _case(131072, 32, 128, kv_heads=8, batch=1, query_length=1),
}
# 16384 tokens each; documents of 512 tokens, and of 1024 in rows of 8192.
MASKS = _masks()
# 16384 tokens each, and models. In cases that end in "-constant", backward leaves out the gradient of the bias.
BIASES = _biases()
# Published models, each as libraries call it: by flags, with a mask array, with segment ids.
MODELS = models.CALLS
# The same kinds in a size for any CPU: what the tests run.
TINY = {
    "tiny-causal": _case(48, 4, 16, kv_heads=2, is_causal=True, batch=2),
    "tiny-packed-window-softcap-sinks": _case(
        48, 2, 16, packed=((30, 12, 6), (30, 12, 6)), window=(9, 0), logits_soft_cap=5.0, sinks="n", batch=1
    ),
    "tiny-bias-mask": _case(48, 2, 16, bias="nts", mask="bts", batch=2),
    "tiny-bias-constant": _case(48, 2, 16, bias="nts", bias_density=0.5, constant_bias=True, batch=2),
    "tiny-model-mask": models.cut(MODELS["gemma3-12b-window-mask"], 48, 1),
    "tiny-model-ids": models.cut(MODELS["pretraining-ids"], 48, 1),
}
_ALL = GRID | OTHERS | PACKED | MASKS | BIASES | MODELS | TINY
# Some peers take a bias in the dtype of the query only, so all get such a one.
CASES = {
    name: case if case.bias is None else dataclasses.replace(case, bias_dtype=case.dtype) for name, case in _ALL.items()
}

# Cells in which a peer was as fast as ours within 5 % in some record, or whose figure was read too high.
CLOSE = {
    "d128-causal-1k": ("forward",),
    "d128-full-1k": ("forward", "backward"),
    "d128-causal-4k": ("backward",),
    "d128-full-4k": ("backward",),
    "d128-causal-16k": ("backward",),
    "d128-full-16k": ("forward", "backward"),
    "d64-full-1k": ("backward",),
    "d64-causal-4k": ("forward",),
    "d64-causal-16k": ("backward",),
    "d256-causal-4k": ("forward",),
    "d256-causal-16k": ("forward",),
    "d256-full-16k": ("forward",),
    "d256-full-1k": ("backward",),
    "gqa-32-8-d128-causal-8k": ("backward",),
    "softcap-50-d256-causal-8k": ("backward",),
    "bert-large-padding": ("forward",),
    "mask-random-d64": ("forward",),
    "mask-d64-2k": ("forward",),
    "bias-t5-base": ("forward",),
}
_QUICK = ("d128-causal-4k", "d128-full-4k", "d128-causal-16k", "d64-causal-4k", "d256-causal-4k")
SETS = {
    "all": [*GRID, *OTHERS, *PACKED],
    "grid": list(GRID),
    "others": list(OTHERS),
    "packed": list(PACKED),
    "masks": list(MASKS),
    "bias": list(BIASES),
    "models": list(MODELS),
    # With `--arch`: tiles of another card on the one that is there.
    "portable": list(GRID),
    "quick": [*_QUICK, "gqa-32-8-d128-causal-8k", "window-4096-d128-32k", "softcap-50-d256-causal-8k"],
    "close": list(CLOSE),
    "tiny": list(TINY),
}


def visible_pairs(case: Case) -> int:
    """How many pairs of a query and a key see each other, over the batch, for one head.

    Of a random mask these are as many as its density makes them on average. Lengths of queries hide nothing here.
    """
    if case.mask is not None and case.spelled is None:
        return round(case.mask_density * visible_pairs(dataclasses.replace(case, mask=None)))
    if case.packed is not None:
        return sum(_visible(case, query, key) for query, key in zip(*case.packed, strict=True))
    if case.spelled is not None:
        bounds = {"is_causal": case.is_causal or case.spelled.is_causal}
        return visible_pairs(dataclasses.replace(case.spelled, **bounds))
    if case.documents is not None:
        rows = [(*lengths, case.query_length - sum(lengths)) for lengths in case.documents]
        return sum(_visible(case, length, length) for row in rows for length in row)
    if case.key_value_seq_lengths is not None:
        return sum(_visible(case, case.query_length, length) for length in case.key_value_seq_lengths)
    return case.batch * _visible(case, case.query_length, case.key_length)


def _visible(case: Case, query_length: int, key_length: int) -> int:
    left, right = case.spec().bounds
    position = np.arange(query_length)
    first = np.zeros_like(position) if left is None else np.clip(position - left, 0, key_length)
    last = np.full_like(position, key_length) if right is None else np.clip(position + right + 1, 0, key_length)
    return int(np.maximum(last - first, 0).sum())


def flops(case: Case, mode: str) -> int:
    """Floating-point operations of the matrix products, see `FLOP_FORMULA`."""
    sizes = case.shape
    per_pair = {"forward": 2 * sizes["H"] + 2 * sizes["D"], "backward": 6 * sizes["H"] + 4 * sizes["D"]}
    return visible_pairs(case) * sizes["N"] * per_pair[mode]


def cut(case: Case, batch: int) -> Case:
    """The first entries of the batch and the first group of heads: independent of the rest, and of a size to check."""
    return dataclasses.replace(case, batch=batch, num_kv_heads=1)
