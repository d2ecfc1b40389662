# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`explain` says what a call would run, and why, without running it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fastattn import attention, attention_varlen, explain, target_arch
from jax_fastattn.compilation import libraries

Q, K, V = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 129, 6, 64), (2, 193, 3, 64), (2, 193, 3, 40)))


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process believes to have an H100."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_elsewhere() -> None:
    found = explain(Q, K, V)
    assert (found.implementation, found.kernel, found.tile, found.reasons) == (
        "xla",
        None,
        None,
        ("the platform is cpu",),
    )
    assert str(found) == "XLA path, because the platform is cpu"


def test_elsewhere_names_every_reason() -> None:
    query, key, value = (jax.ShapeDtypeStruct((2, 5, 3, 264), jnp.float32) for _ in range(3))
    with jax.default_matmul_precision("highest"):
        found = explain(query, key, value, is_causal=True, segment_ids=jnp.zeros((2, 5), jnp.int32))
    assert found.reasons[0] == "the platform is cpu"
    assert any(reason.startswith('the precision of float32 products is "highest"') for reason in found.reasons)
    assert "`query` has head dim 264; the kernels take at most 256" in found.reasons
    assert all(reason in str(found) for reason in found.reasons)


@pytest.mark.usefixtures("_gpu")
def test_a_python_number_is_what_it_is_for_attention() -> None:
    """An offset of 0 is none, and any other one needs no array."""
    for offset in (0, 1, jnp.zeros((), jnp.int32)):
        found = explain(**one_query(), is_causal=True, query_offset=offset)
        assert (found.implementation, found.kernel) == ("cuda", "sm90 decode, sm90 backward")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"query_offset": 2**40}, ValueError, "`query_offset`"),
        ({"key_value_seq_lengths": np.array([2**40, 4])}, ValueError, "`key_value_seq_lengths`"),
        ({"return_residual": 3}, ValueError, "`return_residual` is 3, expected a bool"),
    ],
)
def test_refuses_what_attention_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arrays = [jnp.ones((2, 5, 3, 8))] * 3
    for function in (explain, attention):
        with pytest.raises(error, match=message):
            function(*arrays, **options)


@pytest.mark.usefixtures("_gpu")
def test_on_a_gpu() -> None:
    found = explain(Q, K, V, is_causal=True, local_window_size=(64, 0))
    assert (found.implementation, found.reasons) == ("cuda", ())
    assert found.kernel == "sm90 forward, sm90 backward"
    assert found.tile is not None
    for word in ("forward", "backward"):
        assert word in found.tile
    assert str(found) == f"CUDA kernels {found.kernel} ({found.tile}; {found.variant})"


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("options", "length", "head_dim", "variant"),
    [
        ({"arch": "sm_90a"}, 129, 64, "forward for short lengths; backward in one kernel, dq added by atomics"),
        ({"arch": "sm_90a"}, 4096, 128, "forward for any length; backward in one kernel, dq added by atomics"),
        ({"arch": "sm_90a", "deterministic": True}, 4096, 128, "dq added in semaphore order, always the same bits"),
        ({"arch": "sm_90a"}, 4096, 256, "forward for any length; dq in a kernel of its own, in registers"),
        (
            {"arch": "sm_80", "deterministic": True},
            129,
            64,
            "forward for any length; backward in one kernel, dq added in",
        ),
    ],
    ids=["short", "long", "deterministic", "large head dim", "sm80"],
)
def test_kernels_that_run(options: dict[str, Any], length: int, head_dim: int, variant: str) -> None:
    x = jax.ShapeDtypeStruct((2, length, 3, head_dim), jnp.bfloat16)
    found = explain(x, x, x, **options)
    assert found.variant is not None
    assert variant in found.variant


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(("head_dim", "words"), [(64, ["backward"]), (128, ["backward"]), (192, ["dq", "dkdv"])])
def test_deterministic_gradients_of_large_head_dims_have_a_kernel_for_dq(head_dim: int, words: list[str]) -> None:
    x = jax.ShapeDtypeStruct((2, 129, 6, head_dim), jnp.bfloat16)
    found = explain(x, x, x, deterministic=True)
    assert found.kernel == "sm90 forward, sm90 backward"
    assert found.tile is not None
    assert found.tile.replace(",", "").split()[::2] == ["forward", *words]


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"implementation": "xla"}, '`implementation` is "xla"'),
        ({"query": jax.ShapeDtypeStruct((2, 0, 6, 64), jnp.bfloat16)}, "nothing to compute"),
    ],
    ids=["xla", "empty"],
)
def test_reasons_against_the_kernels_on_a_gpu(change: dict[str, Any], reason: str) -> None:
    found = explain(**{"query": Q, "key": K, "value": V} | change)
    assert found.implementation == "xla"
    assert len(found.reasons) == 1
    assert reason in found.reasons[0]


def one_query(batch: int = 1, kv_heads: int = 8, key_length: int = 1 << 17) -> dict[str, Any]:
    query = jax.ShapeDtypeStruct((batch, 1, 4 * kv_heads, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, key_length, kv_heads, 128), jnp.bfloat16)
    return {"query": query, "key": key, "value": key}


def few_queries(queries: int, group: int = 4, head_dim: int = 128, **sizes: int) -> dict[str, Any]:
    call = one_query(**sizes)
    batch, keys, kv_heads, _ = call["key"].shape
    key = jax.ShapeDtypeStruct((batch, keys, kv_heads, head_dim), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((batch, queries, group * kv_heads, head_dim), jnp.bfloat16)
    return call | {"query": query, "key": key, "value": key}


def many_heads(queries: int, heads: int) -> dict[str, Any]:
    """Returns a call whose query heads have keys of their own."""
    arrays = [jax.ShapeDtypeStruct((1, rows, heads, 128), jnp.bfloat16) for rows in (queries, 1024)]
    return {"query": arrays[0], "key": arrays[1], "value": arrays[1]}


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    "call",
    [
        one_query(),
        one_query(batch=64, kv_heads=33, key_length=256) | {"key_value_seq_lengths": jnp.ones(64, jnp.int32)},
        one_query() | {"is_causal": True, "query_offset": jnp.ones(1, jnp.int32), "local_window_size": (9, 0)},
        one_query() | {"key_value_seq_lengths": jnp.ones(1, jnp.int32), "logits_soft_cap": 5.0},
        one_query() | {"sinks": jnp.ones(32), "return_residual": True, "deterministic": True},
        one_query() | {"mask": jnp.ones((1, 1, 1, 1 << 17), bool)},
        few_queries(16, key_length=4000),
        few_queries(32),
        few_queries(17, batch=9),
        few_queries(33, group=2, batch=8),
        few_queries(17, batch=16, head_dim=64, key_length=20000) | {"key_value_seq_lengths": jnp.ones(16, jnp.int32)},
        few_queries(9, group=8, batch=16, key_length=5000) | {"key_value_seq_lengths": jnp.ones(16, jnp.int32)},
        many_heads(16, 133) | {"mask": jnp.ones((1, 1, 16, 1024), bool), "sinks": jnp.ones(133)},
    ],
    ids=[
        "long",
        "short",
        "window",
        "cap",
        "sinks",
        "mask",
        "64 rows",
        "128 rows",
        "68 rows of 4 heads",
        "few heads",
        "d64",
        "group 8",
        "heads",
    ],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_few_queries_split_their_keys(call: dict[str, Any], arch: str) -> None:
    family = "sm90" if arch == "sm_90a" else "sm80"
    _, queries, heads, _ = call["query"].shape
    rows = queries * heads // call["key"].shape[2]
    rows = next(x for x in (16, 32, 64, 128) if x >= rows)
    found = explain(**call, arch=arch)
    assert (found.implementation, found.kernel) == ("cuda", f"{family} decode, {family} backward")
    assert found.tile is not None and found.tile.startswith(f"decode {rows}x")
    split = "at every 2048" if call.get("deterministic") else "over all multiprocessors; "
    assert found.variant is not None and found.variant.startswith(f"forward with keys split {split}")


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("batch", [1, 64])
def test_deterministic_calls_split_keys_at_one_number(batch: int) -> None:
    long, short = (explain(**one_query(batch=batch, key_length=x), deterministic=True).variant for x in (4096, 2048))
    assert long is not None and short is not None
    assert long.startswith("forward with keys split at every 2048, the same bits in every batch; ")
    assert short.startswith("forward with keys of whole heads in turn; ")


LENGTHS = {"key_value_seq_lengths": jnp.ones(1, jnp.int32)}


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("call", "is_whole"),
    [
        (one_query(key_length=1024), True),
        (one_query(key_length=1025), False),
        (one_query(key_length=1024) | LENGTHS, True),
        (one_query(key_length=1024) | {"mask": jnp.ones((1, 1, 1, 1), bool)}, True),
        # 128 heads, one for each SM; then a second one for some.
        (one_query(batch=16, key_length=1024), True),
        (one_query(batch=16, key_length=1024) | LENGTHS, True),
        (one_query(batch=17, key_length=1024), True),
        (one_query(batch=17, key_length=1024) | LENGTHS, False),
        (one_query(batch=16, key_length=1025) | LENGTHS, False),
        # Units of 1 MiB, and a key more.
        (one_query(batch=64, key_length=2048), True),
        (one_query(batch=64, key_length=2049), False),
        (one_query(batch=4, key_length=1 << 13), False),
        (many_heads(64, 131), True),
    ],
)
def test_a_short_cache_takes_one_launch(call: dict[str, Any], is_whole: bool) -> None:
    if "key_value_seq_lengths" in call:
        call = call | {"key_value_seq_lengths": jnp.ones(call["query"].shape[0], jnp.int32)}
    found = explain(**call).variant
    assert found is not None
    assert found.startswith("forward with keys of whole heads in turn" if is_whole else "forward with keys split")


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    "call",
    [
        few_queries(33, group=2, batch=9),
        few_queries(33),
        few_queries(9, group=8, head_dim=136),
        one_query(key_length=127),
        many_heads(17, 132),
    ],
    ids=["66 rows of 2 heads", "132 rows", "72 rows of a large head dim", "few keys", "a head for each SM"],
)
def test_other_calls_take_the_forward_kernel(call: dict[str, Any]) -> None:
    assert explain(**call).kernel == "sm90 forward, sm90 backward"


@pytest.mark.usefixtures("_gpu")
def test_on_a_gpu_without_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax_fastattn.compilation.libraries.is_installed", lambda module: False)
    found = explain(Q, K, V)
    assert found.implementation == "xla"
    assert any("pip install" in reason for reason in found.reasons)


def test_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`arch` comes before an enclosing `target_arch`, which comes before what is here: a CPU."""
    calls.lower_for_cuda(monkeypatch, tmp_path, arch=None)
    with target_arch("sm_80"):
        assert explain(Q, K, V).kernel == "sm80 forward, sm80 backward"
        assert explain(Q, K, V, arch="sm_90a").kernel == "sm90 forward, sm90 backward"
        assert explain(Q, K, V).kernel == "sm80 forward, sm80 backward"
    assert explain(Q, K, V, arch="sm_90a").kernel == "sm90 forward, sm90 backward"
    assert explain(Q, K, V).reasons == ("the platform is cpu",)
    for name in ("hopper", "sm_75", "sm_99999"):
        with pytest.raises(ValueError, match=f'`arch` is "{name}"; pass one of sm_80, sm_86, sm_87'):
            explain(Q, K, V, arch=name)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("arch", ["sm_87", "sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_121a"])
def test_says_where_the_kernels_were_not_timed(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(libraries, "toolkit", lambda: 13)
    found = explain(Q, K, V, arch=arch)
    assert found.implementation == "cuda"
    untimed = arch in ("sm_100a", "sm_103a", "sm_110a")
    assert bool(found.note) == untimed
    assert str(found).endswith('with implementation="cudnn" may be faster there') == untimed


def test_takes_every_argument_of_attention_and_runs_nothing() -> None:
    spec, arrays = calls.EVERYTHING.spec(), calls.arrays_of(calls.EVERYTHING.operands(jax.random.key(0)))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    for given in (arrays, abstract):
        found = explain(**given, **calls.options_of(spec), return_residual=True, deterministic=True)
        assert found.implementation == "xla"


def test_wrong_arguments_raise_as_in_attention() -> None:
    with pytest.raises(ValueError, match="`key` has 3 heads, which does not divide the 5 heads of `query`"):
        explain(jax.ShapeDtypeStruct((2, 129, 5, 64), jnp.bfloat16), K, V)


@pytest.mark.parametrize("options", [{"windw": 3}, {"operands": None}, {"static": ()}])
def test_refuses_an_unknown_option_by_its_name(options: dict[str, Any]) -> None:
    (name,) = options
    for function in (attention, explain):
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument '{name}'"):
            function(Q, K, V, **options)


STARTS = jnp.array([0, 40, 100, 129], jnp.int32)


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("options", [{}, {"query_offset": "bottom_right"}, {"query_offset": jnp.zeros(3, jnp.int32)}])
def test_answers_for_packed_calls(options: dict[str, Any]) -> None:
    """What it says is what the text of the program holds."""
    query, key, value = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (Q, K, V))
    options |= {"is_causal": True}
    for starts in (STARTS, np.asarray(STARTS), jax.ShapeDtypeStruct(STARTS.shape, STARTS.dtype)):
        found = explain(query, key, value, cu_seqlens_q=starts, cu_seqlens_k=starts, **options)
        assert (found.implementation, found.kernel) == ("cuda", "sm90 forward, sm90 backward")
    packed = lambda query, key, value: attention_varlen(query, key, value, STARTS, STARTS, **options)
    assert calls.count_launches(calls.cuda_text(packed, query, key, value)) == 1
    assert explain(query, key, value, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, implementation="xla").reasons == (
        '`implementation` is "xla"',
    )


@pytest.mark.usefixtures("_gpu")
def test_answers_for_packed_calls_by_their_sequences() -> None:
    """Without its sequences this call splits its keys."""
    call = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in one_query().items()}
    starts = {"cu_seqlens_q": jnp.array([0, 1]), "cu_seqlens_k": jnp.array([0, 1 << 17])}
    assert explain(**call).kernel == "sm90 decode, sm90 backward"
    assert explain(**call, **starts).kernel == "sm90 forward, sm90 backward"


@pytest.mark.parametrize(
    "options",
    [
        {"mask": True},
        {"bias": 0.0},
        {"segment_ids": None},
        {"query_seq_lengths": None},
        {"key_value_seq_lengths": None},
    ],
)
def test_refuses_for_a_packed_call_what_attention_varlen_refuses(options: dict[str, Any]) -> None:
    arguments = {name: jnp.zeros((5, 3, 8)) for name in ("query", "key", "value")}
    arguments |= {"cu_seqlens_q": jnp.array([0, 5]), "cu_seqlens_k": jnp.array([0, 5])}
    (name,) = options
    for function in (attention_varlen, explain):
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{name}'"):
            function(**arguments, **options)
    with pytest.raises(TypeError, match="`cu_seqlens_k` is NoneType, expected an array"):
        explain(**arguments | {"cu_seqlens_k": None})


# Values that are wrong for most arguments, or for all.
BAD = (
    None,
    "text",
    b"1",
    object(),
    int,
    -1,
    float("nan"),
    2**40,
    1j,
    ["one", "two"],
    [None, None],
    [[1, 2], [3]],
    {1: 2, "a": 3},
    (1, 2, 3),
    jax.random.key(0),
    np.array(None, object),
    np.array([5, 2**40]),
    np.array([5, 3], ">i4"),
    np.ones((1, 2, 5, 6, 8)),
    np.ma.masked_array(np.ones((2, 5, 6, 8), np.float32), np.zeros((2, 5, 6, 8), bool)),
    jnp.ones(2),
)
ARGUMENTS = [
    (function, name) for function in (attention, attention_varlen) for name in inspect.signature(function).parameters
]


def said_by(function: Any, arguments: dict[str, Any]) -> str:
    """The error of a call, without the addresses of objects; nothing if there is none."""
    try:
        function(**arguments)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', '', str(error))}"
    return ""


@pytest.mark.parametrize(("function", "name"), ARGUMENTS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_says_what_the_call_says_and_names_the_argument(function: Any, name: str) -> None:
    query, key, value = (jnp.zeros(shape) for shape in ((2, 5, 6, 8), (2, 7, 3, 8), (2, 7, 3, 4)))
    good = {"query": query, "key": key, "value": value}
    if function is attention_varlen:
        starts = jnp.array([0, 2, 5], jnp.int32)
        good = {name: x[0] for name, x in good.items()} | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    found = [said_by(function, good | {name: bad}) for bad in BAD]
    assert [said_by(explain, good | {name: bad}) for bad in BAD] == found
    assert all(f"`{name}`" in text for text in found if text)
    assert sum(text != "" for text in found) >= len(BAD) // 2
