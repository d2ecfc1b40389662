# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Named attention problems, over which tests and benchmarks run.

Sizes within a case are pairwise distinct and greater than 1 where the case is not about being 1, so that a swapped axis
cannot go unnoticed. A case is data: its arrays are drawn from a key when they are asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn import packed
from jax_fastattn.kernels.architectures import H100_MULTIPROCESSORS
from jax_fastattn.kernels.choose import forward_spec, kernel_spec, prepass_configs, prepass_spec
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.ops.cuda.bias_gradient import backward_spec
from jax_fastattn.reference import visible_pairs
from jax_fastattn.spec import OPERANDS, QKV, AttentionSpec, Operands, Problem

DTYPE_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


@dataclass(frozen=True)
class Case:
    """One attention problem. `str(case)` is its name, such as `gqa5-causal-d128-bf16-q193-kv257`.

    Attributes:
        dtype: of query, key and value.
        batch, query_length, key_length: B, T, S.
        num_kv_heads, group: K and the query heads for each; N = K * group.
        head_dim, v_head_dim: H, D; D None is H.
        scale: None is H ** -0.5.
        scale_is_array: whether scale is an operand instead of a static number.
        is_causal, window, logits_soft_cap: as in `AttentionSpec`.
        bias, mask: the axes that are not broadcast, such as "nts"; None is absent. "kts" has one row for each
            key/value head.
        query_seq_lengths, key_value_seq_lengths: one for each batch entry.
        query_offset: one for each batch entry, or for each packed sequence; "bottom_right" of packed sequences.
        bias_dtype: None is float32.
        bias_density: the probability that an element of a bias is finite. All others count as -inf, in three ways if
            the dtype has three: -inf, the least finite number, and 0.7 of it.
        bias_spelled: as `spelled`, by elements of the bias that count as -inf.
        constant_bias: whether the call is not differentiated with respect to its bias.
        mask_density: the probability that a pair of a mask is visible.
        spelled: the call that the mask spells: the mask shows what causality, window, lengths, offset and ids of this
            call show. It has the sizes of the case and no mask. None is a random mask.
        segments: number of segments, cut at random; the last is one that only queries have. 0 is absent.
        ids: "sorted" segment ids; "unsorted" ones, at random positions, of which keys have one more that no query has;
            "negative" ones, which are unsorted and include the smallest and the largest int32.
        documents: the lengths of the documents in each batch entry, of queries and keys alike. Their segment ids count
            from 1. What is left of an entry is padding with id 0. None is absent.
        packed: `(query lengths, key lengths)` of the sequences that the one batch entry holds. What is left is padding.
            Negative lengths are boundaries that decrease.
        first: the first boundaries of packed queries and keys; rows before them are padding.
        sinks: "n" for one row, "bn" for one for each batch entry; None is absent.
        dlse: whether the log-sum-exp has a cotangent.
        deterministic: as in `AttentionSpec`.
        vmapped: whether the public call is a `jax.vmap` over calls without a batch axis.
        draw: tells random draws apart that are equal otherwise, so that their arrays differ.
    """

    dtype: str = "float32"
    batch: int = 2
    query_length: int = 193
    key_length: int = 257
    num_kv_heads: int = 3
    group: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None
    scale: float | None = None
    scale_is_array: bool = False
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    logits_soft_cap: float | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    bias_density: float = 1.0
    bias_spelled: Case | None = None
    constant_bias: bool = False
    mask: str | None = None
    mask_density: float = 0.7
    spelled: Case | None = None
    query_seq_lengths: tuple[int, ...] | None = None
    key_value_seq_lengths: tuple[int, ...] | None = None
    query_offset: tuple[int, ...] | Literal["bottom_right"] | None = None
    segments: int = 0
    ids: Literal["sorted", "unsorted", "negative"] = "sorted"
    documents: tuple[tuple[int, ...], ...] | None = None
    packed: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    first: tuple[int, int] = (0, 0)
    sinks: str | None = None
    dlse: bool = False
    deterministic: bool = False
    vmapped: bool = False
    draw: int | None = None

    def __str__(self) -> str:
        heads = (
            "no-heads"
            if self.num_heads == 0
            else "mha"
            if self.group == 1
            else "mqa"
            if self.num_kv_heads == 1
            else "gqa"
        )
        dims = f"d{self.head_dim}" + (f"v{self.v_head_dim}" if self.v_head_dim else "")

        words = [
            heads + (str(self.group) if self.group > 1 else ""),
            "causal" if self.is_causal else None,
            _joined("window", self.window),
            _joined("cap", self.logits_soft_cap),
            None if self.bias is None else f"bias_{self.bias or 1}",
            self.bias_dtype and f"of_{DTYPE_NAMES[self.bias_dtype]}",
            None if self.bias_density == 1.0 else f"finite{self.bias_density:g}",
            self.bias_spelled and f"spells({self.bias_spelled.rules()})",
            "constant" if self.constant_bias else None,
            None if self.mask is None else f"mask_{self.mask or 1}",
            None if self.mask_density == 0.7 else f"density{self.mask_density:g}",
            self.spelled and f"of({self.spelled.rules()})",
            f"segments{self.segments}" if self.segments else None,
            None if self.ids == "sorted" else self.ids,
            _joined("documents", self._documents()),
            _joined("packed", self.packed and self.packed[0]),
            _joined("and", self.packed and self.packed[1]),
            _joined("first", None if self.first == (0, 0) else self.first),
            self.sinks and f"sinks_{self.sinks}",
            "dlse" if self.dlse else None,
            "deterministic" if self.deterministic else None,
            _joined("scale", self.scale),
            "scale_array" if self.scale_is_array else None,
            _joined("offset", self.query_offset),
            _joined("qlen", self.query_seq_lengths),
            _joined("kvlen", self.key_value_seq_lengths),
            dims,
            DTYPE_NAMES[self.dtype],
            f"b{self.batch}" if self.batch != 2 else None,
            f"q{self.query_length}",
            f"kv{self.key_length}",
            "vmapped" if self.vmapped else None,
            None if self.draw is None else f"draw{self.draw}",
        ]
        return "-".join(word for word in words if word)

    def rules(self) -> str:
        """Returns in words which keys a query sees, masks and packing aside."""
        words = [
            "causal" if self.is_causal else None,
            _joined("window", self.window),
            f"segments{self.segments}" if self.segments else None,
            None if self.ids == "sorted" else self.ids,
            _joined("documents", self._documents()),
            _joined("offset", self.query_offset),
            _joined("qlen", self.query_seq_lengths),
            _joined("kvlen", self.key_value_seq_lengths),
        ]
        return "-".join(word for word in words if word)

    def _documents(self) -> tuple[str, ...] | None:
        """Returns the lengths of the documents of each batch entry, in a word."""
        if self.documents is None:
            return None
        return tuple("+".join(map(str, lengths)) for lengths in self.documents)

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by axis letter."""
        dims = self.head_dim, self.v_head_dim or self.head_dim
        sizes = self.batch, self.query_length, self.key_length, self.num_heads, self.num_kv_heads, *dims
        return dict(zip("BTSNKHD", sizes, strict=True))

    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            scale=1.0 if self.scale_is_array else self._scale,
            is_causal=self.is_causal,
            window=self.window,
            logits_soft_cap=self.logits_soft_cap,
            deterministic=self.deterministic,
            present=self._avals().present(),
        )

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def problem(self) -> Problem:
        return Problem.of(self.spec(), self._avals())

    def _avals(self) -> Operands:
        """Returns shapes and dtypes of the operands.

        They are computed from sizes, not traced: `GPU_CASES` needs them at import, where tracing `operands` took 5 s,
        and a list of cases must not start a client.
        """
        num_sequences, columns = len(self.packed[0]) if self.packed else 0, 4 if self.query_offset is None else 5
        sizes = self.shape | {"M": num_sequences + 2, "R": columns}
        dtypes: dict[str, Any] = {"query": self.dtype, "logits": np.promote_types(self.dtype, np.float32)}
        dtypes |= {"float": self.bias_dtype or np.float32, "integer": np.int32}

        def aval(name: str) -> Any:
            known, full = OPERANDS[name], self._full_axes.get(name) or ""
            letters = known.axes.replace("n", "k") if "k" in full else known.axes
            shape = tuple(sizes[x.upper()] if x in full or x.isupper() else 1 for x in letters)
            return jax.ShapeDtypeStruct(shape, dtypes.get(known.dtype, known.dtype))

        is_packed, has_ids = self.packed is not None, self.segments > 0 or self.documents is not None
        given = {
            **dict.fromkeys(QKV, True),
            **{name: axes is not None for name, axes in self._full_axes.items()},
            "query_seq_lengths": self.query_seq_lengths is not None,
            "key_value_seq_lengths": self.key_value_seq_lengths is not None,
            "query_offset": self.query_offset is not None and not is_packed,
            "query_segment_ids": has_ids,
            "key_value_segment_ids": has_ids,
            "scale": self.scale_is_array,
            "sequences": is_packed,
        }
        return Operands(**{name: aval(name) for name, is_given in given.items() if is_given})

    @property
    def _full_axes(self) -> dict[str, str | None]:
        """Which axes of the operands that broadcast have their full size; None is absent."""
        return {"bias": self.bias, "mask": self.mask, "sinks": self.sinks}

    def operands(self, key: jax.Array) -> Operands:
        """Draws random canonical operands; floats are standard normal."""
        keys = iter(jax.random.split(key, 8))
        shapes = self._avals()

        def normal(key: jax.Array, aval: Any) -> Any:
            return None if aval is None else jax.random.normal(key, aval.shape, jnp.float32).astype(aval.dtype)

        query, k, value = (normal(next(keys), x) for x in (shapes.query, shapes.key, shapes.value))
        bias_key, mask_key, sinks_key, segments_key = next(keys), next(keys), next(keys), next(keys)
        query_ids, key_ids = self._segment_ids(segments_key)
        return Operands(
            query=query,
            key=k,
            value=value,
            bias=None if shapes.bias is None else self._with_hidden(bias_key, normal(bias_key, shapes.bias)),
            mask=None if shapes.mask is None else _shown(mask_key, self.mask_density, self.spelled, shapes.mask.shape),
            query_seq_lengths=_int32(self.query_seq_lengths),
            key_value_seq_lengths=_int32(self.key_value_seq_lengths),
            query_offset=_int32(self.query_offset) if self.packed is None else None,
            query_segment_ids=query_ids,
            key_value_segment_ids=key_ids,
            sinks=normal(sinks_key, shapes.sinks),
            scale=None if shapes.scale is None else jnp.full(shapes.scale.shape, self._scale, shapes.scale.dtype),
            sequences=self._sequences(),
        )

    def cotangents(self, key: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Draws random cotangents of the output and, with `dlse`, of the log-sum-exp."""
        sizes = self.shape
        dout_key, dlse_key = jax.random.split(key)
        dout = jax.random.normal(dout_key, tuple(sizes[axis] for axis in "BTND"), jnp.float32).astype(self.dtype)
        dtype = np.promote_types(self.dtype, np.float32)
        dlse = jax.random.normal(dlse_key, tuple(sizes[axis] for axis in "BTN"), jnp.float32).astype(dtype)
        return dout, dlse if self.dlse else None

    def _with_hidden(self, key: jax.Array, bias: jax.Array) -> jax.Array:
        """Returns a bias with elements that count as -inf, as `bias_density` and `bias_spelled` say."""
        if self.bias_density == 1.0 and self.bias_spelled is None:
            return bias
        places, kinds = jax.random.split(jax.random.fold_in(key, 1))
        # The least number of float16 is a finite bias.
        least = -np.inf if bias.dtype == np.float16 else float(jnp.finfo(bias.dtype).min)
        hiding = jnp.array([-np.inf, least, 0.7 * least], bias.dtype)[jax.random.randint(kinds, bias.shape, 0, 3)]
        return jnp.where(_shown(places, self.bias_density, self.bias_spelled, bias.shape), bias, hiding)

    def _segment_ids(self, key: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        if self.documents is not None:
            ids = (self._document_ids(length) for length in (self.query_length, self.key_length))
            return next(ids), next(ids)
        if not self.segments:
            return None, None
        query_key, kv_key = jax.random.split(key)
        query_ids = jax.random.randint(query_key, (self.batch, self.query_length), 0, self.segments, jnp.int32)
        key_ids = jax.random.randint(kv_key, (self.batch, self.key_length), 0, self.segments - 1, jnp.int32)
        if self.ids == "sorted":
            return jnp.sort(query_ids, axis=1), jnp.sort(key_ids, axis=1)
        key_ids = jax.random.randint(kv_key, (self.batch, self.key_length), 1, self.segments + 1, jnp.int32)
        if self.ids == "unsorted":
            return query_ids, key_ids
        limits = jnp.iinfo(jnp.int32)
        names = jnp.array([-1, limits.min, limits.max, *range(-2, -self.segments - 1, -1)], jnp.int32)
        return names[query_ids], names[key_ids]

    def _document_ids(self, length: int) -> jax.Array:
        """Returns the ids `[B, length]` of the documents: 1 for the first of each entry, and 0 for padding."""
        found = np.zeros((self.batch, length), np.int32)
        for row, lengths in zip(found, self.documents or (), strict=True):
            ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:length]
            row[: len(ids)] = ids
        return jnp.asarray(found)

    def boundaries(self) -> tuple[jax.Array, jax.Array]:
        """Returns the boundaries of packed queries and keys for `attention_varlen`, int32 `[sequences + 1]`."""
        assert self.packed is not None
        found = (
            jnp.array(list(itertools.accumulate(lengths, initial=first)), jnp.int32)
            for lengths, first in zip(self.packed, self.first, strict=True)
        )
        return next(found), next(found)

    def _sequences(self) -> jax.Array | None:
        if self.packed is None:
            return None
        found = packed.sequences(*self.boundaries(), (self.query_length, self.key_length))
        offset = self.query_offset
        offset = found[1:-1, 3] - found[1:-1, 1] if offset == "bottom_right" else _int32(offset)
        return packed.with_offsets(found, offset)[None]


def _shown(key: jax.Array, density: float, spelled: Case | None, shape: tuple[int, ...]) -> jax.Array:
    """Returns what a call that is spelled shows, bool `[b, n, t, s]`; without one, random elements."""
    if spelled is None:
        return jax.random.bernoulli(key, density, shape)
    one_head = dataclasses.replace(spelled, num_kv_heads=1, group=1, head_dim=1, v_head_dim=1)
    pairs = visible_pairs(one_head.spec(), one_head.operands(key))
    return jnp.broadcast_to(pairs[tuple(slice(size) for size in shape)], shape)


def _joined(name: str, values: Any) -> str | None:
    """Returns an argument of a case and its values in a word; None if it is not given."""
    if values is None or values == (None, None):
        return None
    values = values if isinstance(values, tuple) else (values,)
    return name + ".".join("x" if v is None else v if isinstance(v, str) else f"{v:g}" for v in values)


def _int32(x: Any) -> jax.Array | None:
    return None if x is None else jnp.asarray(x, jnp.int32)


def kernel_specs(cases: Iterable[Case], arch: str) -> list[KernelSpec]:
    """Returns the distinct kernels that the cases need, forward and backward with prepasses, each to be compiled.

    Those of gradients of a bias are for an H100's number of SMs.
    """
    found: dict[KernelSpec, None] = {}
    for case in cases:
        problem = case.problem()
        forward, asked = forward_spec(problem, arch), {"dlse": case.dlse, "dsinks": case.sinks is not None}
        dbias = case.bias is not None and not case.constant_bias
        backward = backward_spec(problem, arch, **asked, dbias=dbias, multiprocessors=H100_MULTIPROCESSORS)
        configs = (*prepass_configs(forward), *prepass_configs(backward))
        prepasses = (prepass_spec(problem.spec, config, arch) for config in configs)
        found |= dict.fromkeys((forward, backward, *prepasses))
    return list(found)


def _vary(base: Case, *changes: dict[str, Any]) -> list[Case]:
    return [dataclasses.replace(base, **change) for change in changes]


def _lengths(*pairs: tuple[int, int], **more: Any) -> list[dict[str, Any]]:
    return [{"query_length": query, "key_length": key, **more} for query, key in pairs]


# Fast, float32, every feature: the semantics of every implementation that runs on a CPU.
_SMALL = Case(query_length=37, key_length=53, num_kv_heads=3, group=2, head_dim=8, v_head_dim=12)

CPU_CASES = [
    *_vary(
        _SMALL,
        {},
        {"group": 1},
        {"num_kv_heads": 1, "group": 5},
        {"v_head_dim": None, "batch": 4},
        {"v_head_dim": 4, "dlse": True},
        {"scale": -0.7},
        {"scale": 0.0, "dlse": True},
        {"scale": -0.7, "scale_is_array": True, "query_seq_lengths": (0, 23), "logits_soft_cap": 1.5, "dlse": True},
        {"scale": 0.0, "scale_is_array": True, "bias": "nt"},
        {"is_causal": True},
        {"is_causal": True, "query_length": 53, "key_length": 37},
        {"is_causal": True, "query_offset": (16, -9)},
        {"is_causal": True, "query_offset": (-40, 60), "dlse": True},
        {"window": (7, 4)},
        {"window": (0, 0), "query_offset": (3, -5)},
        {"window": (11, None), "query_offset": (20, -20)},
        {"window": (None, 5)},
        {"window": (9, 30), "is_causal": True},
        {"key_value_seq_lengths": (19, 53)},
        {"key_value_seq_lengths": (0, 31), "dlse": True},
        {"query_seq_lengths": (0, 23), "key_value_seq_lengths": (41, 17), "is_causal": True},
        {"query_seq_lengths": (30, 37), "key_value_seq_lengths": (0, 1), "sinks": "n", "dlse": True},
        {"logits_soft_cap": 1.5},
        {"logits_soft_cap": 0.5, "bias": "bnts", "is_causal": True, "dlse": True},
        {"sinks": "n"},
        {"sinks": "bn", "window": (6, 0), "query_offset": (-8, 4), "dlse": True},
        {"bias": "bnts"},
        {"bias": "ns", "is_causal": True},
        {"bias": "bt"},
        {"bias": "ts", "mask": "b", "sinks": "n"},
        {"bias": "", "logits_soft_cap": 2.0},
        {"mask": "bnts"},
        {"mask": "bts", "bias": "n", "dlse": True},
        {"mask": "nt", "is_causal": True},
        {"mask": "bkts", "dlse": True},
        {"mask": "ks", "is_causal": True, "sinks": "n"},
        {"segments": 4},
        {"segments": 3, "is_causal": True, "query_offset": (5, 12), "sinks": "bn"},
    ),
    # AlphaFold, Swin, a graph transformer, ALiBi by keys and by rows, and padding that a bias spells.
    *_vary(
        _SMALL,
        {"bias": "nts", "mask": "bs"},
        {"bias": "nts", "mask": "bts", "bias_density": 0.5, "dlse": True},
        {"bias": "bnts", "bias_density": 0.2, "key_value_seq_lengths": (19, 53)},
        {"bias": "ns", "is_causal": True, "scale": 0.3},
        {"bias": "nt", "bias_density": 0.8, "sinks": "n", "dlse": True},
        {"bias": "bs", "bias_spelled": Case(query_length=37, key_length=53, key_value_seq_lengths=(0, 31))},
    ),
    *_vary(
        dataclasses.replace(_SMALL, batch=1, query_length=41),
        {"packed": ((11, 0, 17, 9), (13, 8, 0, 27))},
        {"packed": ((11, 0, 17, 9), (13, 8, 12, 20)), "is_causal": True, "sinks": "n", "dlse": True},
        {"packed": ((5, 33), (29, 24)), "window": (6, 2), "logits_soft_cap": 3.0},
    ),
    *_vary(
        _SMALL,
        *_lengths((0, 53), (37, 0), (1, 53), (37, 1), sinks="n", dlse=True),
        {"batch": 0, "is_causal": True, "bias": "nts"},
        {"num_kv_heads": 0, "mask": "ts"},
    ),
]

# Lengths around the tile sizes of kernels (64, 128), both ways round, and far from them.
_ODD = _lengths((1, 63), (64, 65), (127, 193), (129, 128), (257, 127), (1000, 257))
_MANY = _ODD + _lengths((193, 1), (63, 64), (65, 129), (128, 1000), (1, 1), (128, 128))
_FEW = _lengths((65, 129), (193, 64), (257, 1000))
# One of them beyond `SHORT_LENGTH`, with the other around tile sizes; 2112 is a multiple of 192 rows and of 96 keys.
_LONG = _lengths((2049, 65), (2113, 2305), (63, 2177), (193, 4097))
_LONG_EDGES = _lengths((2111, 2112), (2112, 2113), (2113, 2111))
_WINDOWS = [{"window": window} for window in ((0, 0), (1, 0), (0, 3), (64, 63), (100, 7), (5, 150), (2000, 2000))]
_OFFSETS = [
    {"query_offset": offset}
    for offset in ((64, 64), (0, 0), (100, -100), (-1, 1), (-500, 500), (1 << 30, 40), (-(1 << 30), 7))
]
_MHA = Case(dtype="bfloat16")
_GQA = Case(dtype="bfloat16", num_kv_heads=4, group=2)
_BOTH_LENGTHS = [
    {"query_seq_lengths": query, "key_value_seq_lengths": key}
    for query, key in (((193, 100), (257, 129)), ((0, 64), (65, 128)), ((65, 1), (0, 256)), ((128, 190), (1, 0)))
]


def _on(base: Case, **more: Any) -> Case:
    return dataclasses.replace(base, **more)


# A line is one kernel forward and one backward (dtype, dims, group, what is present), two with and without `dlse`;
# its variations compile nothing.
_SHORTER = [
    # Lengths.
    *_vary(_MHA, {}, *_MANY, {"scale": -0.2}, {"scale": 0.0}, {"batch": 5}, *_LONG, *_LONG_EDGES),
    *_vary(_on(_MHA, dtype="float16", is_causal=True), {}, *_MANY, {"scale": -0.2}, *_LONG),
    *_vary(_on(_MHA, head_dim=128), {}, *_ODD, {"scale": 0.3}, {"scale": 0.1, "scale_is_array": True}),
    *_vary(_on(_MHA, head_dim=128, num_kv_heads=4, group=5, is_causal=True), {}, *_MANY, {"num_kv_heads": 1}),
    # Head dims; some with a feature that has no line of its own.
    *_vary(_on(_GQA, head_dim=8, is_causal=True), {}, *_ODD),
    *_vary(_on(_MHA, dtype="float16", head_dim=32), {}, *_FEW),
    *_vary(_on(_GQA, head_dim=256, v_head_dim=32), {}, *_FEW),
    *_vary(_on(_GQA, head_dim=112, v_head_dim=16, is_causal=True), {}, *_FEW),
    *_vary(_on(_GQA, head_dim=160, v_head_dim=16, logits_soft_cap=5.0, dlse=True, deterministic=True), {}, *_FEW),
    *_vary(_on(_GQA, head_dim=16), {}, *_ODD),
    *_vary(_on(_GQA, head_dim=24, dtype="float16", is_causal=True), {}, *_ODD),
    *_vary(_on(_GQA, head_dim=40, is_causal=True), {}, *_ODD),
    *_vary(_on(_GQA, head_dim=72, sinks="n"), {}, {"sinks": "bn"}, *_ODD),
    *_vary(_on(_GQA, head_dim=80, dtype="float16", logits_soft_cap=1.0), {}, *_ODD),
    *_vary(_on(_GQA, head_dim=96, is_causal=True), {}, *_ODD, *_LONG, *_LONG_EDGES),
    *_vary(_on(_GQA, head_dim=104), *({"query_seq_lengths": lengths} for lengths in ((193, 65), (0, 128), (64, 1)))),
    *_vary(_on(_GQA, head_dim=160), *({"window": (left, None)} for left in (0, 1, 64, 150, 1000))),
    *_vary(_on(_GQA, head_dim=192, dtype="float16"), {}, *_ODD),
    *_vary(_on(_GQA, head_dim=256, is_causal=True), {}, *_ODD),
    # A head dim of the value's own.
    *_vary(
        _on(_MHA, head_dim=192, v_head_dim=128, is_causal=True),
        {},
        *_ODD,
        *_lengths((127, 79), (128, 80), (129, 81), (65, 161)),  # tiles of 80 keys
    ),
    *_vary(_on(_MHA, head_dim=64, v_head_dim=256), {}, *_FEW),
    *_vary(_on(_GQA, head_dim=128, v_head_dim=64, is_causal=True), {}, *_FEW),
    *_vary(_on(_MHA, head_dim=16, v_head_dim=48, dtype="float16"), {}, *_FEW),
    # Groups; 3 and 7 do not divide a tile.
    *_vary(_on(_MHA, num_kv_heads=5, group=3, is_causal=True), {}, *_ODD),
    *_vary(_on(_MHA, batch=3, num_kv_heads=2, group=7), {}, *_ODD, {"num_kv_heads": 1}),
    *_vary(_on(_MHA, batch=3, num_kv_heads=2, group=8, is_causal=True), {}, *_FEW, {"num_kv_heads": 1}),
    # Windows and offsets. Causal is a right bound of 0, so it shares the kernel of a right bound.
    *_vary(_MHA, *_WINDOWS, {"window": (70, None), "is_causal": True}, {"window": (0, 9), "is_causal": True}),
    *_vary(_on(_MHA, window=(70, 30)), *_lengths((65, 1000), (1000, 129), (257, 128)), *_LONG),
    *_vary(_on(_GQA, window=(500, 0), query_offset=(-7, 90)), *_LONG),
    # More query tiles than there are multiprocessors, in more than one section of heads.
    *_vary(_on(_MHA, batch=1, num_kv_heads=20, head_dim=128, window=(300, 0)), *_lengths((1100, 1100))),
    *_vary(_on(_GQA, head_dim=128), *({"window": (None, right)} for right in (0, 1, 64, 150, 1000))),
    *_vary(_on(_GQA, is_causal=True), *_OFFSETS, *_lengths((1, 257), (129, 65), query_offset=(-3, 128))),
    *_vary(_on(_MHA, head_dim=128, query_offset=(64, -70)), *_WINDOWS, {"window": (150, None), "is_causal": True}),
    *_vary(_on(_GQA, head_dim=128, query_offset=(60, -60)), {"window": (20, None)}, {"window": (300, None)}),
    # Lengths of sequences.
    *_vary(_GQA, *({"key_value_seq_lengths": lengths} for lengths in ((257, 64), (128, 0), (1, 129), (300, 256)))),
    *_vary(_on(_GQA, key_value_seq_lengths=(1000, 193)), *_lengths((1, 1000), (257, 1000), (64, 1000))),
    *_vary(_on(_GQA, is_causal=True), *_BOTH_LENGTHS),
    *_vary(
        _on(_GQA, is_causal=True, query_length=2240, key_length=2177),
        {"query_seq_lengths": (2113, 1), "key_value_seq_lengths": (2000, 2177)},
        {"query_seq_lengths": (0, 2240), "key_value_seq_lengths": (2177, 193), "query_offset": (3, -70)},
    ),
    # Soft cap.
    *_vary(
        _on(_MHA, is_causal=True, logits_soft_cap=2.0), {}, *_FEW, {"logits_soft_cap": 50.0}, {"scale": 1.5}, *_LONG
    ),
    *_vary(
        _on(_MHA, is_causal=True, logits_soft_cap=2.0, deterministic=True),
        *_lengths((65, 577), (257, 1000)),
        {"logits_soft_cap": 50.0, "key_length": 577},
        *_LONG[:2],
    ),
    *_vary(_on(_GQA, head_dim=96, dtype="float16", logits_soft_cap=30.0), {}, *_ODD),
    *_vary(_on(_GQA, head_dim=96, dtype="float16", logits_soft_cap=30.0, deterministic=True), {}, *_FEW),
    *_vary(
        _on(_GQA, head_dim=128, is_causal=True, logits_soft_cap=50.0),
        *_lengths((257, 1000), (1000, 577)),
        {"scale": -1.5, "key_length": 577},
        {"scale": -0.2, "key_length": 577, "scale_is_array": True},
        {"scale": 0.0, "key_length": 577},
        {"scale": 0.0, "key_length": 577, "scale_is_array": True},
        *_LONG[:2],
    ),
    *_vary(_on(_GQA, head_dim=256, logits_soft_cap=30.0), *_WINDOWS[2:5], {"window": (100, None), "is_causal": True}),
    # Sinks.
    *_vary(_on(_MHA, batch=3, num_kv_heads=2, group=8, sinks="n"), *_WINDOWS[3:5], {"window": (127, 0)}),
    *_vary(_on(_GQA, head_dim=128, is_causal=True, sinks="bn"), {}, {"sinks": "n"}, *_FEW),
    # A cotangent of the log-sum-exp.
    *_vary(_on(_MHA, dlse=True), {}, *_ODD),
    *_vary(_on(_GQA, head_dim=128, is_causal=True, sinks="bn", dlse=True), {}, {"scale": -0.1}, *_FEW),
    *_vary(_on(_GQA, is_causal=True, dlse=True), *_BOTH_LENGTHS, {**_BOTH_LENGTHS[1], "scale_is_array": True}),
    # So many heads that statistics of the last ones are computed concurrently with the first ones.
    *_vary(
        _on(_MHA, batch=3, num_kv_heads=40, query_length=193, key_length=577),
        {},
        {"head_dim": 128, "is_causal": True, "query_offset": (-100, 3, 300)},
        {"head_dim": 96, "dtype": "float16", "dlse": True, "query_seq_lengths": (193, 0, 65)},
        {"num_kv_heads": 30, "group": 2, "head_dim": 128, "v_head_dim": 40},
        {"head_dim": 128, "deterministic": True},
        {"num_kv_heads": 30, "group": 3, "deterministic": True, "key_value_seq_lengths": (577, 1, 0)},
        {
            "num_kv_heads": 55,
            "head_dim": 96,
            "is_causal": True,
            "query_length": 800,
            "query_offset": (500, -100, 3),
            "dlse": True,
            "deterministic": True,
        },
    ),
    # Many short heads, whose CTAs add to dq in one order.
    *_vary(
        _on(_MHA, batch=32, num_kv_heads=4, is_causal=True),
        *_lengths((512, 512), (257, 127), (129, 193), (1, 300), (300, 1)),
        {"batch": 60, "query_length": 193, "scale": -0.2},
    ),
    *_vary(_on(_MHA, batch=66, num_kv_heads=4, dtype="float16"), *_lengths((384, 257), (65, 384), (128, 128), (1, 1))),
    *_vary(_on(_MHA, batch=66, num_kv_heads=2, head_dim=128, is_causal=True), *_lengths((256, 256), (129, 65))),
    *_vary(_on(_MHA, batch=66, num_kv_heads=2, head_dim=128), *_lengths((128, 65), (65, 128))),
    *_vary(_on(_MHA, batch=66, num_kv_heads=2, head_dim=40, v_head_dim=72), *_lengths((193, 256), (256, 129))),
    *_vary(
        _on(_MHA, batch=44, num_kv_heads=3, group=3, head_dim=96, query_length=193, key_length=500, window=(300, 7)),
        {},
        {"deterministic": True, "query_length": 500, "key_length": 193},
    ),
    *_vary(
        _on(_MHA, batch=4, num_kv_heads=33, group=2, head_dim=96, logits_soft_cap=5.0, sinks="n", dlse=True),
        *(
            {
                "query_length": 257,
                "key_length": 512,
                "window": window,
                "query_offset": (200, -30, 0, 64),
                "query_seq_lengths": (257, 193, 0, 65),
                "key_value_seq_lengths": (512, 129, 300, 0),
            }
            for window in ((200, 0), (0, 64))
        ),
    ),
    *_vary(
        _on(_MHA, batch=32, num_kv_heads=4, logits_soft_cap=50.0, is_causal=True),
        *_lengths((512, 512), (193, 500), (640, 577)),
        {"head_dim": 96, "query_length": 577, "key_length": 640, "dlse": True},
        {"logits_soft_cap": None, "query_length": 577, "key_length": 640},
    ),
    # Equal bits in every run, short and long, with few heads and with so many that CTAs of several heads overlap.
    *_vary(
        _on(_MHA, deterministic=True),
        *_FEW,
        {"scale": -0.2},
        {"scale": 0.0},
        {"batch": 20, "query_length": 64},
        *_LONG[:2],
    ),
    *_vary(
        _on(_MHA, head_dim=40, v_head_dim=72, dtype="float16", deterministic=True),
        *_FEW,
        *_lengths((193, 577), (65, 600)),
    ),
    *_vary(
        _on(_GQA, head_dim=96, is_causal=True, sinks="bn", dlse=True, deterministic=True),
        {},
        {"batch": 16, "query_length": 129, "key_length": 1089},
        *_lengths((257, 1089), (1100, 65)),
        # Each query sees one key, so that an error is that of a few roundings: it takes many to compare.
        {"batch": 16, "query_length": 1, "key_length": 1100},
        *_LONG[:2],
    ),
    *_vary(
        _on(_GQA, is_causal=True, deterministic=True, key_length=665),
        *_BOTH_LENGTHS,
        *_lengths((65, 665), (193, 257)),
        {
            "batch": 4,
            "num_kv_heads": 50,
            "query_seq_lengths": (193, 100, 64, 1),
            "key_value_seq_lengths": (257, 665, 0, 64),
        },
    ),
    *_vary(_on(_MHA, batch=1, num_kv_heads=20, window=(300, 0), deterministic=True), *_lengths((1100, 1100))),
    *_vary(
        _on(_GQA, head_dim=128, is_causal=True, deterministic=True),
        *_FEW,
        *_lengths((1, 1100), (129, 1089), (1100, 65)),
        {"batch": 16, "query_length": 129, "key_length": 1089},
        *_LONG[:2],
    ),
    *_vary(
        _on(_MHA, batch=1, num_kv_heads=20, head_dim=128, window=(300, 0), deterministic=True), *_lengths((1100, 1100))
    ),
    *_vary(
        _on(_GQA, head_dim=128, v_head_dim=64, dtype="float16", dlse=True, deterministic=True, query_length=1100),
        {"query_seq_lengths": (1100, 65), "key_value_seq_lengths": (0, 129)},
        {"query_seq_lengths": (193, 1089), "key_value_seq_lengths": (257, 64)},
    ),
    # All of it at once.
    *_vary(
        _on(_MHA, num_kv_heads=4, group=5, head_dim=128, logits_soft_cap=5.0, sinks="n", dlse=True),
        *(
            {**lengths, "query_offset": offset, "window": window}
            for lengths in _BOTH_LENGTHS
            for offset in ((64, -30), (-200, 10))
            for window in ((40, 0), (0, 64))
        ),
        *(
            {
                "query_seq_lengths": (193, 65),
                "key_value_seq_lengths": (600, 1089),
                "key_length": 1089,
                "query_offset": (500, -30),
                "window": window,
                "deterministic": deterministic,
            }
            for window in ((400, 0), (0, 640))
            for deterministic in (False, True)
        ),
    ),
    # A few new queries against a long cache.
    *_vary(
        _on(_MHA, batch=3, num_kv_heads=2, group=4, head_dim=128, is_causal=True, key_length=1000),
        *(
            {"query_length": length, "query_offset": offset, "key_value_seq_lengths": lengths}
            for length in (1, 5, 65)
            for offset, lengths in (((999, 0, 500), (1000, 1, 501)), ((935, 128, -5), (1000, 193, 60)))
        ),
    ),
    # Capped logits so large that an error of tanh shows, with sinks and without.
    *_vary(
        _on(_GQA, head_dim=128, is_causal=True, logits_soft_cap=50.0, scale=1.0, query_length=257, key_length=1000),
        {},
        {"sinks": "n"},
        {"sinks": "n", "deterministic": True},
    ),
]


# Rows that no query sees, and rows that see nothing. Something else than lengths hides most of them.
_NO_KEY = _on(_GQA, is_causal=True, query_length=193, query_offset=(-70, -150))
HIDDEN_ROWS = {
    "more keys than queries": _on(_MHA, batch=1, num_kv_heads=1, is_causal=True, query_length=33, key_length=127),
    "chunked prefill": _on(_GQA, is_causal=True, query_length=129, key_length=1000, query_offset=(512, 128)),
    "chunked prefill, deterministic": _on(
        _GQA, head_dim=128, is_causal=True, query_length=193, key_length=700, query_offset=(300, 64), deterministic=True
    ),
    "decoding": _on(
        _GQA, group=4, head_dim=128, is_causal=True, query_length=1, key_length=577, query_offset=(300, 64)
    ),
    "keys left of a window": _on(
        _GQA, head_dim=128, window=(20, None), query_length=65, key_length=577, query_offset=(300, 70)
    ),
    "keys on both sides of a window": _on(
        _MHA, head_dim=96, window=(63, 7), query_length=129, key_length=700, query_offset=(200, 500), deterministic=True
    ),
    "keys on both sides of a window, d192v128": _on(
        _GQA, head_dim=192, v_head_dim=128, window=(99, 0), query_length=65, key_length=400, query_offset=(200, 100)
    ),
    "queries before the keys": _NO_KEY,
    "queries before the keys, sinks": _on(_NO_KEY, sinks="bn", dlse=True),
    "queries before the keys, sinks, deterministic": _on(_NO_KEY, sinks="n", dlse=True, deterministic=True),
    "queries before the keys, sinks, d256": _on(
        _NO_KEY, head_dim=256, window=(40, 0), query_offset=(-70, 200), sinks="n", dlse=True
    ),
    "queries past a window": _on(_MHA, window=(30, None), query_length=257, key_length=100, dlse=True),
    "many queries in any order": _on(
        _GQA, group=3, head_dim=128, dtype="float16", is_causal=True, query_length=1300, query_offset=(-70, -1100)
    ),
    "lengths too": _on(
        _GQA,
        group=3,
        head_dim=128,
        window=(100, 0),
        logits_soft_cap=5.0,
        query_seq_lengths=(150, 193),
        key_value_seq_lengths=(257, 90),
        query_offset=(150, -40),
        sinks="bn",
        dlse=True,
    ),
}


def _in_order(case: Case) -> bool:
    """Returns whether CTAs add to dq in one order on Hopper."""
    return kernel_spec(case.problem(), "backward", "sm_90a").ordered


_LENGTHS = (1000, 0, 1, 63, 64, 65, 127, 128, 129)
_OTHER_LENGTHS = (300, 77, 1, 129, 0, 64, 200, 65, 513)
_FEW_LENGTHS = ((2100, 65), (1900, 300))
_LONGER = (1300, 129, 1000)
# Packed sequences with rows of padding past them; lengths about those of tiles, and empty ones. The last case has
# boundaries that decrease and leave the rows.
PACKED = _vary(
    Case(batch=1, query_length=1600, key_length=1600, num_kv_heads=2, packed=(_LENGTHS, _LENGTHS), dtype="bfloat16"),
    {"is_causal": True, "head_dim": 64, "v_head_dim": 64},
    {"is_causal": True, "head_dim": 64, "v_head_dim": 64, "deterministic": True, "scale": -0.2},
    {"is_causal": True, "head_dim": 128, "v_head_dim": 128, "group": 4},
    {"is_causal": True, "head_dim": 128, "v_head_dim": 128, "deterministic": True},
    # So few sequences that CTAs add to dq in any order on Hopper.
    *(
        {"head_dim": head_dim, "v_head_dim": head_dim, "packed": _FEW_LENGTHS, "query_length": 6200, "key_length": 6200}
        | {"is_causal": head_dim == 128, "group": 2}
        for head_dim in (64, 128)
    ),
    # So many heads that statistics of the last sequences are computed concurrently with the first products.
    *(
        {"is_causal": True, "head_dim": head_dim, "v_head_dim": head_dim, "packed": (_LONGER, _LONGER)}
        | {"query_length": 2600, "key_length": 2600, "num_kv_heads": 33, "dlse": head_dim == 64}
        for head_dim in (64, 128)
    ),
    {"head_dim": 64, "v_head_dim": 64, "packed": (_LENGTHS, _OTHER_LENGTHS), "dtype": "float16"},
    {"head_dim": 192, "v_head_dim": 128, "is_causal": True, "packed": (_OTHER_LENGTHS, _LENGTHS)},
    {"head_dim": 192, "v_head_dim": 128, "is_causal": True, "group": 4, "dlse": True},
    {
        "head_dim": 192,
        "v_head_dim": 128,
        "packed": (_OTHER_LENGTHS, _LENGTHS),
        "window": (100, 7),
        "query_offset": "bottom_right",
        "dtype": "float16",
    },
    {"head_dim": 160, "v_head_dim": 160, "packed": (_LENGTHS, _OTHER_LENGTHS)},
    {"head_dim": 256, "v_head_dim": 256, "is_causal": True, "group": 2},
    {
        "head_dim": 256,
        "v_head_dim": 256,
        "group": 2,
        "packed": (_OTHER_LENGTHS, _LENGTHS),
        "window": (70, None),
        "query_offset": (-70, 3, 0, 64, 0, 150, -1, 500, 40),
        "logits_soft_cap": 5.0,
        "sinks": "n",
        "dlse": True,
    },
    {
        "head_dim": 96,
        "v_head_dim": 96,
        "group": 2,
        "packed": (_OTHER_LENGTHS, _LENGTHS),
        "window": (100, 7),
        "logits_soft_cap": 5.0,
        "sinks": "n",
        "dlse": True,
    },
    {
        "is_causal": True,
        "head_dim": 128,
        "v_head_dim": 128,
        "first": (-7, 3),
        "packed": ((1200, -900, 500, 10**9, -2 * 10**9, 10**9), (200, 1000, 0, -300, 1097, -400)),
    },
)
# A matrix of 16 bits that takes more than half of an H100's L2.
_LARGE_BIAS = {"query_length": 1500, "key_length": 1601}
# Masks and segment ids. A line is one attention kernel forward and one backward, which all masks, ids, windows, offsets
# and lengths of keys share; a predicate of its own has a prepass of its own.
_SPARSE = {"mask": "bnts", "mask_density": 0.05}
_IDS = {"mask": None, "segments": 4}
MASKED = [
    *_vary(
        _on(_GQA, mask="bts"),
        {},
        *_FEW,
        *_LONG[1:2],
        _SPARSE,
        {"mask_density": 0.0},
        {"mask": "ks"},
        {"mask": "bs", "key_value_seq_lengths": (257, 64)},
        {"mask": "bt"},
        {"mask": "kts", "window": (70, 30), "query_offset": (64, -70)},
        {"is_causal": True},
        _IDS,
        _IDS | {"ids": "unsorted", "window": (100, 7)},
    ),
    *_vary(
        _on(_GQA, head_dim=128, mask="ts"),
        {},
        *_LONG[1:2],
        _SPARSE,
        _SPARSE | {"logits_soft_cap": 5.0, "sinks": "n", "dlse": True},
        _IDS | {"is_causal": True},
        _IDS | {"ids": "negative", "query_seq_lengths": (193, 65), "dlse": True},
        _IDS | {"is_causal": True, "query_length": 2113, "key_length": 2113},
        {"mask": "ks", "logits_soft_cap": 5.0, "sinks": "n", "dlse": True},
        {"mask": "bs", "mask_density": 0.01, "query_length": 2113, "key_length": 2113},
    ),
    *_vary(_on(_MHA, head_dim=64, deterministic=True, **_SPARSE), {}, *_LONG[1:2]),
    *_vary(_on(_MHA, head_dim=192, v_head_dim=128, mask="bts"), {}, _SPARSE, _IDS | {"is_causal": True}),
    *_vary(_on(_GQA, head_dim=96, dtype="float16", mask="ns"), {}, _IDS),
    *_vary(_on(_GQA, head_dim=160, **_SPARSE), {}, _IDS | {"is_causal": True}),
    *_vary(_on(_GQA, head_dim=256, mask="bnts"), {}, {"mask": "bs"}),
]
# Biases: each kind, dtype and head dim with a variant of its own, large ones that heads take by turns, and elements
# that count as -inf.
BIASES = {
    "pairs": _on(_MHA, bias="nts", bias_dtype="bfloat16", dlse=True),
    "pairs of key/value heads": _on(_GQA, bias="bkts", bias_dtype="bfloat16", is_causal=True, deterministic=True),
    "pairs, d128": _on(
        _GQA, head_dim=128, bias="bts", bias_dtype="bfloat16", window=(150, 60), query_offset=(300, -40)
    ),
    "pairs, d96, float16": _on(_MHA, head_dim=96, dtype="float16", bias="bnts", bias_dtype="float16", sinks="n"),
    "pairs, d192v128": _on(_MHA, head_dim=192, v_head_dim=128, bias="nts", bias_dtype="bfloat16", is_causal=True),
    "pairs, d256": _on(_GQA, head_dim=256, bias="ts", bias_dtype="bfloat16", logits_soft_cap=5.0),
    "two terms": _on(_MHA, bias="nts", key_value_seq_lengths=(257, 64)),
    "two terms, d128": _on(_GQA, head_dim=128, bias="bnts", query_seq_lengths=(193, 65)),
    "two terms, d256": _on(_MHA, head_dim=256, bias="bts", is_causal=True),
    "float16 next to bfloat16": _on(_GQA, bias="ts", bias_dtype="float16", logits_soft_cap=2.0, sinks="n", dlse=True),
    "pairs and a mask": _on(_GQA, bias="nts", bias_dtype="bfloat16", mask="bts", mask_density=0.05),
    "pairs and ids, d128": _on(_MHA, head_dim=128, bias="ts", bias_dtype="bfloat16", segments=4, is_causal=True),
    "pairs and padding": _on(_MHA, bias="nts", bias_dtype="bfloat16", mask="bs", mask_density=0.02, dlse=True),
    "pairs and padding, d32": _on(
        _GQA, head_dim=32, batch=40, bias="nts", bias_dtype="bfloat16", mask="bks", mask_density=0.3
    ),
    "two terms and padding, d128": _on(
        _GQA, head_dim=128, bias="bnts", mask="ks", key_value_seq_lengths=(257, 100), logits_soft_cap=5.0, sinks="n"
    ),
    "keys and padding, d96": _on(_MHA, head_dim=96, bias="bs", bias_dtype="bfloat16", mask="ns", mask_density=0.1),
    "pairs and a mask, d160": _on(_MHA, head_dim=160, bias="nts", mask="bs"),
    "few finite pairs": _on(_MHA, bias="nts", bias_dtype="bfloat16", bias_density=0.02),
    "few finite pairs, d128": _on(_MHA, head_dim=128, bias="bnts", bias_density=0.02, dlse=True),
    "large": _on(_MHA, batch=3, num_kv_heads=4, **_LARGE_BIAS, bias="nts", bias_dtype="bfloat16", is_causal=True),
    "large, d128": _on(_GQA, batch=3, num_kv_heads=2, head_dim=128, **_LARGE_BIAS, bias="nts", bias_dtype="bfloat16"),
    "in parts": _on(_MHA, batch=40, query_length=130, key_length=140, head_dim=32, bias="ts", bias_dtype="bfloat16"),
    "keys": _on(_MHA, bias="bs", bias_dtype="bfloat16", is_causal=True),
    "keys, d128": _on(_GQA, head_dim=128, bias="ns", deterministic=True, logits_soft_cap=5.0),
    "keys of key/value heads, d192": _on(_GQA, head_dim=192, bias="ks", bias_density=0.2, mask="bts"),
    "keys of one query": _on(_GQA, query_length=1, key_length=1000, head_dim=128, bias="bns", scale=-0.2),
    "rows": _on(_MHA, bias="bt", bias_density=0.7, sinks="n", dlse=True),
    "rows under a cap": _on(_GQA, head_dim=128, bias="nt", logits_soft_cap=2.0, is_causal=True, sinks="n"),
    # The gradient is smaller than the rounding of the output.
    "rows far below a cap": _on(_GQA, bias="bt", logits_soft_cap=50.0, dlse=True),
    "one row, d40": _on(_MHA, head_dim=40, v_head_dim=72, bias="n", scale=-0.2, sinks="n"),
    "one number": _on(_MHA, bias="", sinks="n", dlse=True),
}
# Few queries, whose keys are split: lengths about those of tiles, none among them; rows that see nothing; each number
# of blocks of rows.
_DECODING = Case(
    dtype="bfloat16", batch=9, query_length=1, key_length=1100, num_kv_heads=2, group=4, head_dim=128, v_head_dim=128
)
_ENDS = (0, 1, 63, 64, 65, 129, 700, 3, 1100)
FEW_QUERIES = {
    "one query": _DECODING,
    "lengths": _on(_DECODING, key_value_seq_lengths=_ENDS, dlse=True),
    "a few tiles": _on(_DECODING, batch=1, num_kv_heads=1, key_length=260, dtype="float16"),
    "ratio 7, causal": _on(
        _DECODING,
        query_length=3,
        group=7,
        is_causal=True,
        key_value_seq_lengths=_ENDS,
        query_offset=tuple(end - 3 for end in _ENDS),
    ),
    "window, sinks": _on(
        _DECODING,
        query_length=4,
        window=(300, 0),
        query_offset=(1096, 0, -2, -40, 64, 500, 1200, 1390, 1401),
        sinks="n",
        dlse=True,
    ),
    "64 rows, cap": _on(
        _DECODING, query_length=16, is_causal=True, logits_soft_cap=5.0, query_offset=tuple(end - 16 for end in _ENDS)
    ),
    "query lengths": _on(
        _DECODING,
        query_length=5,
        query_seq_lengths=(5, 0, 1, 2, 3, 4, 5, 5, 5),
        key_value_seq_lengths=_ENDS,
        sinks="bn",
    ),
    "d64": _on(_DECODING, head_dim=64, v_head_dim=64, key_value_seq_lengths=_ENDS, scale=-0.2),
    "d192v128": _on(_DECODING, head_dim=192, key_value_seq_lengths=_ENDS, query_length=8),
    "d256": _on(_DECODING, head_dim=256, v_head_dim=256, key_value_seq_lengths=_ENDS),
    "128 rows": _on(
        _DECODING, query_length=32, is_causal=True, sinks="n", query_offset=tuple(end - 32 for end in _ENDS)
    ),
    # Each unit has a CTA of its own, with or without keys.
    "whole units": _on(_DECODING, key_length=300, key_value_seq_lengths=_ENDS, sinks="n"),
    "mask of keys": _on(_DECODING, mask="bs"),
    "mask of heads and pairs": _on(_DECODING, query_length=4, mask="bnts", key_value_seq_lengths=_ENDS, dlse=True),
    "mask of short units": _on(_DECODING, query_length=3, key_length=300, mask="bts", head_dim=64, v_head_dim=64),
    "ids, window": _on(_DECODING, query_length=4, window=(600, None), **_IDS),
}
GPU_CASES = [
    *_SHORTER,
    *PACKED,
    *MASKED,
    # More queries: CTAs add in any order, unless the case is deterministic.
    *(
        dataclasses.replace(case, query_length=case.query_length + 1024, deterministic=i % 3 == 2)
        for i, case in enumerate(filter(_in_order, _SHORTER))
        if i % 2 == 0 and case.batch * case.num_kv_heads <= 16
    ),
    *HIDDEN_ROWS.values(),
    *FEW_QUERIES.values(),
]
