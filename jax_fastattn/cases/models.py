# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The attention of published models: its shapes, and the calls that libraries make of it.

`MODELS` has a case for each kind of layer. `CALLS` has the same layers as they are called in training: by flags, with
a mask array that spells the flags, and with segment ids of packed documents. `BIASED` has models that add a bias. Tests
and benchmarks share all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_fastattn.cases.case import Case


def _model(heads: int, kv_heads: int, head_dim: int, *layers: dict[str, Any]) -> tuple[Case, ...]:
    base = Case("bfloat16", 1, 4096, 4096, kv_heads, heads // kv_heads, head_dim, is_causal=True)
    return tuple(dataclasses.replace(base, **layer) for layer in layers)


# The config.json of each repository has these numbers (num_attention_heads, num_key_value_heads, head_dim and so on).
# A config counts the query's own key in `sliding_window`, and `window` does not.
#   llama3-8b     meta-llama/Meta-Llama-3-8B
#   llama3-70b    meta-llama/Meta-Llama-3-70B
#   gemma2-9b     google/gemma-2-9b; `get_config_for_9b` in google/gemma_pytorch, gemma/config.py. Half of the layers
#                 have a window of 4096.
#   gemma3-12b    google/gemma-3-12b-pt; `get_config_for_12b` there. Five of six layers have a window of 1024.
#   gemma3-27b    google/gemma-3-27b-pt; `get_config_for_27b_v3` there. It has the same windows. Logits are scaled by
#                 query_pre_attn_scalar ** -0.5, which is 5376 // 32, unlike the head dim.
#   gpt-oss-20b   openai/gpt-oss-20b; `ModelConfig` and `sdpa` in openai/gpt-oss, gpt_oss/torch/model.py. Half of the
#                 layers have a window of 128. All have sinks.
#   mistral-7b    mistralai/Mistral-7B-v0.1, whose layers all have a window of 4096 (https://arxiv.org/abs/2310.06825)
#   qwen2.5-7b    Qwen/Qwen2.5-7B, whose `use_sliding_window` is false. The head dim is 3584 / 28.
#   deepseek-v3   deepseek-ai/DeepSeek-V3 in training and prefill, where each head has keys and values of its own. The
#                 head dim is qk_nope_head_dim + qk_rope_head_dim. Decoding from the compressed cache is another shape.
#   vit-l         google/vit-large-patch16-384: 24 x 24 patches and a class token, 577 tokens; and
#                 openai/clip-vit-large-patch14-336, the same numbers
#   bert-large    google-bert/bert-large-uncased (https://arxiv.org/abs/1810.04805)
MODELS = {
    "llama3-8b": _model(32, 8, 128, {}),
    "llama3-70b": _model(64, 8, 128, {}),
    "gemma2-9b": _model(16, 8, 256, *({"logits_soft_cap": 50.0, "window": (left, None)} for left in (None, 4095))),
    "gemma3-12b": _model(16, 8, 256, *({"window": (left, None)} for left in (None, 1023))),
    "gemma3-27b": _model(32, 16, 128, *({"scale": 168**-0.5, "window": (left, None)} for left in (None, 1023))),
    "gpt-oss-20b": _model(64, 8, 64, *({"sinks": "n", "window": (left, None)} for left in (None, 127))),
    "mistral-7b": _model(32, 8, 128, {"window": (4095, None)}),
    "qwen2.5-7b": _model(28, 4, 128, {}),
    "deepseek-v3": _model(128, 128, 192, {"v_head_dim": 128}),
    "vit-l": _model(16, 16, 64, {"is_causal": False}),
    "bert-large": _model(16, 16, 64, {"is_causal": False}),
}


def layers_by_name(name: str) -> dict[str, Case]:
    """Returns the layers of a model by name; if it has two kinds of layers, their names have the kind."""
    layers = MODELS[name]
    if len(layers) == 1:
        return {name: layers[0]}
    return {f"{name} ({'full' if case.window == (None, None) else 'window'} layers)": case for case in layers}


def as_mask(case: Case, axes: str) -> Case:
    """Returns a call whose mask array shows what causality, window, lengths, offset and ids of a case show.

    Args:
        case: a call without a mask.
        axes: the axes that the mask has in full, such as "bts". The mask is the same along all others.
    """
    plain: dict[str, Any] = {"is_causal": False, "window": (None, None), "segments": 0, "ids": "sorted"}
    plain |= dict.fromkeys(("documents", "query_offset", "query_seq_lengths", "key_value_seq_lengths"))
    return dataclasses.replace(case, **plain, mask=axes, spelled=dataclasses.replace(case, sinks=None, dlse=False))


# These are the lengths of the documents in rows of 8192 tokens, drawn once from a log-uniform distribution of 64 to
# 8192. The last row has padding.
DOCUMENTS = (
    (5318, 189, 702, 94, 1889),
    (1024, 3310, 77, 2648, 455, 678),
    (8192,),
    (353, 131, 2210, 967, 64, 3015, 708, 112),
)
# The sentences in a batch of BERT have these numbers of tokens, 512 at most.
SENTENCES = (512, 87, 301, 44, 130, 512, 219, 68)


ROWS = {"batch": len(DOCUMENTS), "query_length": 8192, "key_length": 8192}


def _language_model(name: str, case: Case) -> dict[str, Case]:
    """Returns the calls of a causal layer: by flags, with a mask for each batch entry, and with ids."""
    flags = dataclasses.replace(case, batch=2, query_length=8192, key_length=8192)
    ids = dataclasses.replace(case, **ROWS, documents=DOCUMENTS)
    return {name: flags, f"{name}-mask": as_mask(flags, "bts"), f"{name}-ids": ids}


def _bert() -> dict[str, Case]:
    """Returns calls over a batch with padding. Flax passes a mask `[B, 1, 1, S]`, and Keras one `[B, 1, T, S]`."""
    (layer,) = MODELS["bert-large"]
    whole = dataclasses.replace(layer, batch=len(SENTENCES), query_length=512, key_length=512)
    padded = dataclasses.replace(whole, key_value_seq_lengths=SENTENCES)
    return {
        "bert-large-padding": padded,
        "bert-large-mask-bs": as_mask(padded, "bs"),
        "bert-large-mask-bts": as_mask(padded, "bts"),
        "bert-large-ids": dataclasses.replace(whole, documents=tuple((length,) for length in SENTENCES)),
    }


def _pretraining() -> dict[str, Case]:
    """Returns calls of Llama 3 8B over a batch of documents; the last row ends with padding."""
    (layer,) = MODELS["llama3-8b"]
    ids = dataclasses.replace(layer, **ROWS, documents=DOCUMENTS)
    bidirectional = dataclasses.replace(ids, is_causal=False)
    lengths, tokens = tuple(length for row in DOCUMENTS for length in row), ids.batch * ids.query_length
    sizes = {"query_length": tokens, "key_length": tokens}
    return {
        "pretraining-packed": dataclasses.replace(layer, **sizes, packed=(lengths, lengths)),
        "pretraining-ids": ids,
        "pretraining-mask": as_mask(ids, "bts"),
        "pretraining-mask-causal": dataclasses.replace(as_mask(bidirectional, "bts"), is_causal=True),
    }


def _all_calls() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for model, layers in MODELS.items():
        for case in filter(lambda case: case.is_causal, layers):
            kind = "" if len(layers) == 1 else "-full" if case.window == (None, None) else "-window"
            found |= _language_model(model + kind, case)
    (vit,) = MODELS["vit-l"]
    found["vit-l"] = dataclasses.replace(vit, batch=32, query_length=577, key_length=577)
    return found | _bert() | _pretraining()


# These calls have the sizes of training.
CALLS = _all_calls()


# These models add a bias to their logits. They learn most of these biases; the others are constant.
#   t5-base       google-t5/t5-base: 12 heads of 64, one relative position bias for all layers. Its scale of 1 is left
#                 out: random operands would give weights of 0 and 1.
#   alphafold     triangle attention (https://doi.org/10.1038/s41586-021-03819-2, algorithms 13 and 14): rows of 256
#                 residues, a bias of pairs for each head, and a mask of residues: 192 of them on average
#   swin-base     stage 1 of microsoft/swin-base-patch4-window7-224: windows of 7 x 7 patches, 64 for each image, with a
#                 relative position bias; every second layer masks what a shift brings together
#   alibi         slopes times distances (https://arxiv.org/abs/2108.12409). Under a causal mask the distance of a key
#                 differs from its position by a constant of the row, so a bias of keys for each head is enough.
#   graphormer    one bias for each pair of nodes of each graph (https://arxiv.org/abs/2106.05234); lengths are sizes of
#                 graphs
def _biased() -> dict[str, Case]:
    def case(batch: int, length: int, heads: int, head_dim: int, **more: Any) -> Case:
        return Case("bfloat16", batch, length, length, heads, 1, head_dim, **more)

    residues = case(512, 256, 8, 32, key_value_seq_lengths=tuple(128 + 37 * i % 129 for i in range(512)))
    return {
        "t5-base": case(64, 512, 12, 64, bias="nts"),
        "t5-base-decoder": case(64, 512, 12, 64, bias="nts", is_causal=True),
        "alphafold-triangle": dataclasses.replace(as_mask(residues, "bs"), bias="nts"),
        "swin-base": case(2048, 49, 4, 32, bias="nts"),
        "swin-base-shifted": case(2048, 49, 4, 32, bias="nts", mask="bts"),
        "alibi": case(2, 4096, 32, 128, bias="ns", constant_bias=True, is_causal=True),
        "graphormer": case(32, 256, 32, 24, bias="bnts", key_value_seq_lengths=tuple(range(8, 257, 8))),
    }


BIASED = _biased()


def cut(case: Case, length: int, kv_heads: int) -> Case:
    """Returns a call with fewer heads and rows. Lengths, windows and documents shrink by one factor.

    Args:
        case: one of `CALLS`.
        length: the number of queries, and of keys, of the result.
        kv_heads: the number of its key/value heads. The group stays.
    """

    def shrunk(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(x * length // case.query_length for x in lengths)

    left, right = case.window
    changes: dict[str, Any] = {"window": (None if left is None else shrunk((left,))[0], right)}
    if case.key_value_seq_lengths is not None:
        changes["key_value_seq_lengths"] = shrunk(case.key_value_seq_lengths)
    if case.documents is not None:
        changes["documents"] = tuple(map(shrunk, case.documents))
    if case.packed is not None:
        changes["packed"] = (shrunk(case.packed[0]), shrunk(case.packed[1]))
    if case.spelled is not None:
        changes["spelled"] = cut(case.spelled, length, kv_heads)
    return dataclasses.replace(case, num_kv_heads=kv_heads, query_length=length, key_length=length, **changes)
