# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""One attention problem as data, with a name; its arrays are drawn from a key when they are asked for."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_fastattn.cases.mask_functions import captured, mask_operands, mask_shapes
from jax_fastattn.layouts import packed
from jax_fastattn.programs.function import Program
from jax_fastattn.reference import visible_pairs
from jax_fastattn.spec import OPERANDS, QKV, AttentionSpec, Operands, Problem

DTYPE_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


@dataclass(frozen=True)
class Case:
    """One attention problem. `str(case)` is its name, such as `gqa5-causal-d128-bf16-q193-kv257`.

    Attributes:
        dtype: the dtype of query, key and value.
        batch, query_length, key_length: B, T, S.
        num_kv_heads, group: K and the query heads for each; N = K * group.
        head_dim, v_head_dim: H, D; D None is H.
        scale: None is H ** -0.5.
        scale_is_array: whether scale is an operand instead of a static number.
        is_causal, window, logits_soft_cap: as in `AttentionSpec`.
        bias, mask: the axes that are not broadcast, such as "nts"; None is absent. "kts" has one row for each
            key/value head.
        mask_mod: the number of a random function, see `cases/mask_functions.py`; None is absent.
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
        deterministic, precise_gradients: as in `AttentionSpec`.
        vmapped: whether the public call is a `jax.vmap` over calls without a batch axis.
        precision: the setting of `jax.default_matmul_precision` where the call is traced.
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
    mask_mod: int | None = None
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
    precise_gradients: bool = False
    vmapped: bool = False
    precision: str = "default"
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
            None if self.mask_mod is None else f"function{self.mask_mod}",
            f"segments{self.segments}" if self.segments else None,
            None if self.ids == "sorted" else self.ids,
            _joined("documents", self._documents()),
            _joined("packed", self.packed and self.packed[0]),
            _joined("and", self.packed and self.packed[1]),
            _joined("first", None if self.first == (0, 0) else self.first),
            self.sinks and f"sinks_{self.sinks}",
            "dlse" if self.dlse else None,
            "deterministic" if self.deterministic else None,
            "precise" if self.precise_gradients else None,
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
            None if self.precision == "default" else self.precision,
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
        """Returns the sizes by axis letter."""
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
            precise_gradients=self.precise_gradients,
            precision=self.precision if self.dtype == "float32" else "default",
            present=self._avals().present(),
            mask_mod=self._mask_function()[0],
        )

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def _mask_function(self) -> tuple[Program | None, dict[str, Any]]:
        """Returns the function as a program, and shapes of the operands that it reads by name."""
        if self.mask_mod is None:
            return None, {}
        return mask_shapes(self.mask_mod, tuple(self.shape.items()), self.dtype, self._num_sequences)

    @property
    def _num_sequences(self) -> int:
        return len(self.packed[0]) if self.packed else 0

    def problem(self) -> Problem:
        return Problem.of(self.spec(), self._avals())

    def _avals(self) -> Operands:
        """Returns shapes and dtypes of the operands.

        They are computed from sizes, not traced: `GPU_CASES` needs them at import, where tracing `operands` took 5 s,
        and a list of cases must not start a client.
        """
        columns = 4 if self.query_offset is None else 5
        sizes = self.shape | {"M": self._num_sequences + 2, "R": columns}
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
        planes = self._mask_function()[1]
        return Operands(**{name: aval(name) for name, is_given in given.items() if is_given}, **planes)

    @property
    def _full_axes(self) -> dict[str, str | None]:
        """Returns which axes of the operands that broadcast have their full size; None is absent."""
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
            sequences=(sequences := self._sequences()),
            **self._planes(key, sequences),
        )

    def captured(self, key: jax.Array) -> dict[str, jax.Array]:
        """Draws the arrays that the function of the case captures; `operands` reads the same ones for this key."""
        return captured(self.shape | {"B": self._num_sequences or self.batch}, jax.random.fold_in(key, 8))

    def _planes(self, key: jax.Array, sequences: jax.Array | None) -> dict[str, jax.Array]:
        if self.mask_mod is None:
            return {}
        rows = None if sequences is None else sequences[0]
        return mask_operands(self.mask_mod, self.shape, self.dtype, self.captured(key), rows)[1]

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
