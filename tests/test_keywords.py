# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Unknown keywords of public functions: errors and docs/migration.md say what an argument of a peer is called here."""

from __future__ import annotations

import inspect
import itertools
import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generators.keyword_table import with_table

import jax_fastattn
from jax_fastattn import (
    and_masks,
    attention,
    attention_varlen,
    block_mask,
    explain,
    keywords,
    or_masks,
    paged_attention,
    ring_attention,
    zigzag,
)
from jax_fastattn.integrations import flax, jax_nn, keras

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
X = jnp.ones((2, 5, 4, 8))
FUNCTIONS = [getattr(jax_fastattn, name) for name in jax_fastattn.__all__]
FUNCTIONS += [flax.attention_fn, flax.bind, flax.Packed, jax_nn.install, jax_nn.uninstall, jax_nn.installed]
FUNCTIONS += [keras.install, keras.uninstall, keras.installed]

SAID = [
    (attention, {"causal": True}, "pass `is_causal=True`; for flash-attn's bottom-right alignment also `query_offset="),
    (attention, {"softmax_scale": 1.0}, "pass `scale`"),
    (attention, {"window_size": (3, 0)}, "pass `local_window_size=(left, right)`, with None in place of -1"),
    (attention, {"softcap": 5.0}, "pass `logits_soft_cap`, with None in place of 0.0"),
    (attention, {"dropout_p": 0.0}, "pass `dropout_rate`, and a key as `dropout_key`"),
    (attention, {"dropout_rng": 0}, "pass a key of `jax.random` as `dropout_key`, such as `jax.random.key(seed)`"),
    (attention, {"attn_mask": X}, "pass a bool array, True where the query may attend, as `mask`, and one to add as"),
    (attention, {"alibi_slopes": X}, "slopes or positions in bfloat16 are silently wrong"),
    (attention, {"block_table": X}, "pass `page_table` to `paged_attention`"),
    (attention, {"cu_seqlens": X}, "pass `cu_seqlens_q` and `cu_seqlens_k` to `attention_varlen`"),
    (attention, {"precision": None}, "leave it out, and set `jax.default_matmul_precision` around the call"),
    (attention, {"windw": 3}, "pass `local_window_size`"),
    (attention, {"is_casual": True}, "pass `is_causal`"),
    (attention, {"boundaries": X}, "`ring_attention` and `all_to_all_attention` have it"),
    (attention, {"nothing_like_it": 1}, "pass one of `query`, `key`, `value`, `bias`, "),
    (attention_varlen, {"mask": X}, "pass `mask_mod`"),
    (paged_attention, {"score_mod": None}, "`attention` has it"),
    (attention_varlen, {"attn_mask": X}, "; `attention` has `mask`, `bias` and `segment_ids`"),
    (attention_varlen, {"seqused_k": X}, "and `lengths` to `paged_attention`; `attention` has `key_value_seq_lengths`"),
    (paged_attention, {"block_table": X}, "pass `page_table` to `paged_attention`"),
    (explain, {"softmax_scale": 1.0}, "pass `scale`"),
    (explain, {"lengths": X}, "and so has `explain` with `page_table`"),
    (ring_attention, {"axis": "s"}, "pass `axis_name`"),
    (zigzag, {"sizes": 2}, "pass `size`"),
    (jax_nn.install, {"force": True}, "leave it out: there are no arguments"),
    (flax.attention_fn, {"causal": True}, "pass `is_causal=True`"),
    (flax.bind, {"softmax_scale": 1.0}, "pass `scale`"),
    (flax.Packed, {"ids": X}, "pass `segment_ids`"),
]


@pytest.mark.parametrize(
    ("function", "given", "text"), SAID, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_an_unknown_keyword_says_what_to_pass(function: Any, given: dict[str, Any], text: str) -> None:
    (name,) = given
    takes_arrays = {"query", "key"} <= {*inspect.signature(function).parameters}
    with pytest.raises(TypeError, match=rf"^\S+\(\) got an unexpected keyword argument '{name}'; ") as caught:
        function(*[X] * 3 * takes_arrays, **given)
    assert text in str(caught.value)


def test_a_required_argument_by_the_name_of_a_peer_is_not_missing() -> None:
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'q'; pass `query`$"):
        attention(q=X, k=X, v=X)  # pyright: ignore
    with pytest.raises(TypeError, match=r"^attention\(\) missing 1 required positional argument: 'value'$"):
        attention(X, X)  # pyright: ignore


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: x.__name__)
def test_every_public_function_answers_every_keyword_of_the_table(function: Any) -> None:
    known = {*inspect.signature(function).parameters}
    known |= {*inspect.signature(flax.attention_fn).parameters} if function is flax.bind else set()
    arrays = {"query": X, "key": X, "value": X} if {"query", "key"} <= known else {}
    for name, row in keywords._ROWS.items():
        if name not in known:
            with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{name}'; .") as caught:
                function(**arrays, **{name: 1})
            assert not known or row.remedy in str(caught.value)


def test_remedies_name_keywords_and_functions_that_exist() -> None:
    names = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    names |= {function.__name__ for function in FUNCTIONS} | {"jax", "B"}
    for row in keywords.PEERS:
        for code in re.findall("`(.*?)`", row.remedy):
            (name,) = re.findall(r"^\W*(\w+)", code)
            assert name in names or code in ("[N]",), row
    given = list(itertools.chain(*(row.names for row in keywords.PEERS)))
    assert len(given) == len({*given})
    assert not {*given} & {*inspect.signature(attention).parameters}


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert text == with_table(text), "run: python tests/generators/keyword_table.py docs/migration.md"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: x.__name__)
def test_signatures_and_pickles_are_those_of_the_function(function: Any) -> None:
    """Flax chooses by `inspect.signature` what it passes, and `jax.jit` what is static."""
    kinds = [x.kind for x in inspect.signature(function).parameters.values()]
    assert (inspect.Parameter.VAR_POSITIONAL in kinds) == (function in (and_masks, or_masks))
    takes_options = function in (block_mask, explain, flax.attention_fn, flax.bind)
    assert (inspect.Parameter.VAR_KEYWORD in kinds) == takes_options
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__doc__


def test_static_arguments_of_jit_are_found_by_name() -> None:
    run = jax.jit(attention, static_argnames=("is_causal", "local_window_size"))
    assert run(X, X, X, is_causal=True, local_window_size=(3, 0)).shape == X.shape


def test_errors_from_inside_keep_their_text_and_add_one_frame() -> None:
    with pytest.raises(TypeError, match=r"^`query_offset` is None, expected") as caught:
        attention(X, X, X, query_offset=None)  # pyright: ignore
    frames = [Path(frame.filename).name for frame in traceback.extract_tb(caught.tb)]
    assert frames[1:3] == ["keywords.py", "batched.py"] and frames.count("keywords.py") == 1
    with pytest.raises(TypeError) as caught:
        attention(X, X, X, causal=True)  # pyright: ignore
    frames = [Path(frame.filename).name for frame in traceback.extract_tb(caught.tb)]
    assert frames[1:] == ["keywords.py"] and caught.value.__context__ is None


def test_alibi_of_the_remedy_is_right_in_bfloat16() -> None:
    """With 4096 keys. Positions in the dtype of the model gave errors of 2.2, without a word."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _check_alibi()


def _check_alibi() -> None:
    (remedy,) = (row.remedy for row in keywords.PEERS if "alibi_slopes" in row.names)
    (recipe,) = re.findall("`bias=(.*?)`", remedy)
    keys = jax.random.split(jax.random.key(0), 3)
    length = 4096
    shapes = (1, 8, 4, 16), (1, length, 4, 16), (1, length, 4, 16)
    operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    slopes = 2.0 ** -jnp.arange(1, 5, dtype=jnp.float32)
    options: dict[str, Any] = {"is_causal": True, "query_offset": length - 8}
    bias = eval(recipe, {"slopes": slopes, "jnp": jnp, "S": length})
    distance = (jnp.arange(length) - jnp.arange(length - 8, length)[:, None]).astype(jnp.float32)
    wanted = attention(*(x.astype(jnp.float32) for x in operands), slopes[:, None, None] * distance, **options)

    def error(bias: jax.Array) -> float:
        return float(np.abs(attention(*operands, bias, **options).astype(jnp.float32) - wanted).max())

    assert error(bias) < 0.02
    assert error(slopes[:, None, None].astype(jnp.bfloat16) * jnp.arange(length, dtype=jnp.bfloat16)) > 0.5
