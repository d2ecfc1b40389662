# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The nouns that every layer shares: the operands of a call and the static facts about it.

Axes have the same letters everywhere: batch B, queries T, keys S, query heads N, key/value heads K, and the head dims H
of keys and D of values; N = K * group. Layers below `canonical/` see the shapes that `Operands` lists, and no others.

What stays out: any check of user input and any reshaping (`canonical/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import jax

from jax_fastattn.programs import planes
from jax_fastattn.programs.function import Program
from jax_fastattn.ring import Ring

Implementation = Literal["cuda", "xla"]

# A bias at or below this counts as -inf: `finfo.min` of float32 and of bfloat16, with which models spell masks, and 0.7
# of it, as in `jax.nn`. The least number of float16 is a finite bias.
HIDDEN_BIAS = -2.36e38


def is_known(size: Any) -> bool:
    """Returns whether a size is a number. An expression of `jax.export.symbolic_shape` cannot be compared."""
    return isinstance(size, int)


@dataclass(frozen=True)
class Operand:
    """The facts that hold for one operand in every call.

    Attributes:
        axes: a letter for each axis. A lower-case letter is an axis of its full size or of size 1, which broadcasts.
            `1` is an axis of size 1 in the place of the query heads.
        dtype: "query" is the query's; "logits" is float32, or float64 if the query is float64; "float" and
            "integer" are any such dtype; "bool" and "int32" are themselves.
        differentiable: whether it has a gradient, which is summed over axes of size 1.
        per_kv_head: whether the axis of query heads may also have size K. The query heads of a group then share the row
            of their key/value head.
    """

    axes: str
    dtype: Literal["query", "logits", "float", "integer", "bool", "int32", "int8"]
    differentiable: bool = False
    per_kv_head: bool = False

    @property
    def letters(self) -> str:
        """Returns the letters of the axes in upper case, N for `1`."""
        return self.axes.upper().replace("1", "N")


class Operands(NamedTuple):
    """The arrays of one attention call, in the order in which primitives take them; None is absent.

    This is the only definition of the operands. `OPERANDS` has the `Operand` of each, by name.

    Attributes:
        query, key, value: the arrays that attention is computed from.
        bias: added to the scaled logits; see `HIDDEN_BIAS`.
        mask: True where a query may attend to a key.
        query_seq_lengths: rows from there on are padding.
        key_value_seq_lengths: keys from there on are invisible.
        query_offset: query i stands at key position i + offset.
        query_segment_ids, key_value_segment_ids: both have one dtype; a query sees the keys with its id.
        sinks: one extra logit per head in the softmax denominator.
        scale: a factor on query . key that is not static.
        sequences: M sequences that lie one after the other, each with R numbers: 4, or 5 with offsets; see
            `layouts/packed.py`. Offset, lengths and segment ids are absent then.
        dropout: W numbers of each head, which say what weights are kept; see `dropout.py`.
        head_numbers, query_numbers, key_numbers, distance_numbers: P planes of `score_mod`, then of `mask_mod`, in the
            order in which programs have them; U = T + S distances `key - query + T`. See `programs/planes.py`.
        table_numbers: C floats that a function without code captures, one array after the other.
        head_integers, query_integers, key_integers, distance_integers, table_integers: the same of integers and
            booleans.
        forward_lists, forward_bits, backward_lists, backward_bits, backward_counts, dq_lists, dq_bits: what prepasses
            write, of a `BlockMask`; see `AttentionSpec.kept`.
        row_means: a result of the forward pass, for the backward pass alone; see `AttentionSpec.mean_plane`.
        out_rests: another one, what rounding has taken from the output; see `AttentionSpec.keeps_rests`.
    """

    query: Annotated[jax.Array, Operand("BTNH", "query", differentiable=True)]
    key: Annotated[jax.Array, Operand("BSKH", "query", differentiable=True)]
    value: Annotated[jax.Array, Operand("BSKD", "query", differentiable=True)]
    bias: Annotated[jax.Array | None, Operand("bnts", "float", differentiable=True, per_kv_head=True)] = None
    mask: Annotated[jax.Array | None, Operand("bnts", "bool", per_kv_head=True)] = None
    query_seq_lengths: Annotated[jax.Array | None, Operand("B", "int32")] = None
    key_value_seq_lengths: Annotated[jax.Array | None, Operand("B", "int32")] = None
    query_offset: Annotated[jax.Array | None, Operand("B", "int32")] = None
    query_segment_ids: Annotated[jax.Array | None, Operand("BT", "integer")] = None
    key_value_segment_ids: Annotated[jax.Array | None, Operand("BS", "integer")] = None
    sinks: Annotated[jax.Array | None, Operand("bN", "logits", differentiable=True)] = None
    scale: Annotated[jax.Array | None, Operand("b1", "logits", differentiable=True)] = None
    sequences: Annotated[jax.Array | None, Operand("BMR", "int32")] = None
    dropout: Annotated[jax.Array | None, Operand("bnW", "int32")] = None
    head_numbers: Annotated[jax.Array | None, Operand("bnP", "logits", differentiable=True)] = None
    query_numbers: Annotated[jax.Array | None, Operand("bnPT", "logits", differentiable=True)] = None
    key_numbers: Annotated[jax.Array | None, Operand("bnPS", "logits", differentiable=True)] = None
    distance_numbers: Annotated[jax.Array | None, Operand("bnPU", "logits", differentiable=True)] = None
    table_numbers: Annotated[jax.Array | None, Operand("bnC", "logits", differentiable=True)] = None
    head_integers: Annotated[jax.Array | None, Operand("bnP", "int32")] = None
    query_integers: Annotated[jax.Array | None, Operand("bnPT", "int32")] = None
    key_integers: Annotated[jax.Array | None, Operand("bnPS", "int32")] = None
    distance_integers: Annotated[jax.Array | None, Operand("bnPU", "int32")] = None
    table_integers: Annotated[jax.Array | None, Operand("bnC", "int32")] = None
    forward_lists: Annotated[jax.Array | None, Operand("L", "int32")] = None
    forward_bits: Annotated[jax.Array | None, Operand("L", "int32")] = None
    backward_lists: Annotated[jax.Array | None, Operand("L", "int32")] = None
    backward_bits: Annotated[jax.Array | None, Operand("L", "int32")] = None
    backward_counts: Annotated[jax.Array | None, Operand("L", "int32")] = None
    dq_lists: Annotated[jax.Array | None, Operand("L", "int32")] = None
    dq_bits: Annotated[jax.Array | None, Operand("L", "int32")] = None
    row_means: Annotated[jax.Array | None, Operand("BTN", "logits")] = None
    out_rests: Annotated[jax.Array | None, Operand("BTND", "int8")] = None

    def present(self) -> tuple[str, ...]:
        """Returns the names of the operands that are not None, in order."""
        return tuple(name for name, x in zip(self._fields, self, strict=True) if x is not None)

    def arrays(self) -> list[jax.Array]:
        """Returns the operands that are not None, in order: a primitive binds these."""
        return [x for x in self if x is not None]

    @property
    def is_packed(self) -> bool:
        """Returns whether the operands hold sequences one after the other (`attention_varlen`)."""
        return self.sequences is not None


OPERANDS: dict[str, Operand] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Operands, include_extras=True).items()
}
DIFFERENTIABLE = tuple(name for name, x in OPERANDS.items() if x.differentiable)
QKV = tuple(name for name, x in OPERANDS.items() if x.dtype == "query")
PLANES = tuple(name for name in OPERANDS if name.endswith(("_numbers", "_integers")))
KEPT_LISTS = tuple(name for name, x in OPERANDS.items() if x.axes == "L")

# They are gradients of the operands, in their shapes; None is absent. Gradients of QKV have the dtype of the query. All
# others have the dtype of the logits, since the ops may have to add up several before they round.
Gradients = Operands


@dataclass(frozen=True)
class AttentionSpec:
    """The facts that a call fixes when it is traced, apart from shapes and dtypes.

    A spec is hashable and is a parameter of the primitives.

    Attributes:
        scale: factor on query . key; 1 if the factor is an operand.
        is_causal: key position <= query position + query_offset.
        window: `(left, right)`: a query at position p sees keys p - left .. p + right; None is unlimited.
        logits_soft_cap: `cap * tanh(x / cap)` on scaled, biased logits; None is off.
        deterministic: gradients must be bitwise equal from run to run, and kernels must compute rows whose bits do not
            depend on the batch.
        implementation: "cuda", "xla" or None: the CUDA kernels where they apply.
        precision: the precision of products of float32, as `jax.lax.dot_general` takes it.
            `kernels/arguments/precision.py` says what the kernels make of it.
        present: names of the operands that are given, see `Operands.present`.
        ring: how T and S are split over devices; None if a device has all of them. The operands of a call with a ring
            are one device's share, except that lengths, offsets, sequences, the columns of bias and mask, and the
            planes of functions count from the start of the whole sequence.
        is_part: whether the call is a block of a ring, so that rows may have more logits than its own. Its backward
            pass takes output and log-sum-exp of all of them.
        score_mod: what becomes of a scaled, biased logit before the soft cap; None leaves it.
        mask_mod: which pairs count, besides all other conditions; None is all.
        kept: for each prepass whose lists are operands, the `PrepassConfig` with the tiles, the scalars of
            `visits.lists.Planes`, and the names of these operands. A call with other tiles or sizes ignores them.
        mean_plane: the plane of `score_mod` for whose gradient the forward pass returns the mean key of each row; None
            for none. See `sums/row_means.py`.
        precise_gradients: whether the caller asks for gradients whose delta comes from the output before it is rounded.
        keeps_rests: whether the forward pass returns what rounding takes from the output, since the call is
            differentiated and asks for that. See `sums/out_rests.py`.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    logits_soft_cap: float | None = None
    deterministic: bool = False
    implementation: Implementation | None = None
    precision: str = "default"
    present: tuple[str, ...] = QKV
    ring: Ring | None = None
    is_part: bool = False
    score_mod: Program | None = None
    mask_mod: Program | None = None
    kept: tuple[Any, ...] = ()
    mean_plane: int | None = None
    precise_gradients: bool = False
    keeps_rests: bool = False

    @property
    def further(self) -> tuple[str, ...]:
        """Returns what the forward pass returns after output and log-sum-exp: operands of the backward pass."""
        means = () if self.mean_plane is None else ("row_means",)
        return (*means, "out_rests") if self.keeps_rests else means

    @property
    def has_programs(self) -> bool:
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def needs_whole_rows(self) -> bool:
        """Returns whether a device needs all rows: dropout and programs count them in packed sequences."""
        return "sequences" in self.present and (self.has_programs or "dropout" in self.present)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """Returns the window with causality folded in: causal is a right bound of 0."""
        left, right = self.window
        return left, 0 if self.is_causal else right

    def operands(self, arrays: Sequence[Any]) -> Operands:
        """Inverts `Operands.arrays`."""
        return Operands(**dict(zip(self.present, arrays, strict=True)))


@dataclass(frozen=True)
class Problem:
    """A spec together with the sizes of a call. Kernels are chosen and launched by it.

    Attributes:
        dtype: name of the dtype of query, key and value, such as "bfloat16".
        batch, query_length, key_length: B, T, S.
        num_heads, num_kv_heads: N, K.
        head_dim, v_head_dim: H, D.
        sinks_per_batch: whether sinks has its own row for each batch entry.
        num_sequences: how many sequences lie one after the other in each batch entry, padding included; 0 if none do.
        packed_offsets: whether they have offsets.
        mask_shape: `[b, n, t, s]`; None without a mask.
        page: rows of a page, if keys and values are in pages; else 0.
        pages: how many there are.
        bias_shape: `[b, n, t, s]`; None without a bias.
        bias_dtype: name of its dtype; None without a bias.
        mask_mod_shape: `[b, n]` of the planes that `mask_mod` reads, see `Operands`.
        planes: name, b and n of each operand that has planes of `score_mod`, or of `mask_mod` without one.
    """

    spec: AttentionSpec
    dtype: str
    batch: int
    query_length: int
    key_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sinks_per_batch: bool = False
    num_sequences: int = 0
    packed_offsets: bool = False
    mask_shape: tuple[int, ...] | None = None
    page: int = 0
    pages: int = 0
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    mask_mod_shape: tuple[int, int] = (1, 1)
    planes: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, spec: AttentionSpec, operands: Operands) -> Problem:
        """Reads the sizes off canonical operands (arrays or abstract values)."""
        batch, query_length, num_heads, head_dim = operands.query.shape
        _, key_length, num_kv_heads, v_head_dim = operands.value.shape
        sinks, sequences = operands.sinks, operands.sequences
        return cls(
            spec=spec,
            dtype=str(operands.query.dtype),
            batch=batch,
            query_length=query_length,
            key_length=key_length,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            sinks_per_batch=sinks is not None and sinks.shape[0] > 1,
            num_sequences=0 if sequences is None else sequences.shape[1],
            packed_offsets=sequences is not None and sequences.shape[2] == 5,
            mask_shape=None if operands.mask is None else operands.mask.shape,
            bias_shape=None if operands.bias is None else operands.bias.shape,
            bias_dtype=None if operands.bias is None else str(operands.bias.dtype),
            mask_mod_shape=planes.own_sizes((spec.score_mod, spec.mask_mod), 1, operands),
            planes=planes.shapes_of(spec.score_mod or spec.mask_mod, operands),
        )

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to compute: no query or no key."""
        return 0 in (self.batch, self.query_length, self.key_length, self.num_heads, self.head_dim, self.v_head_dim)

    @property
    def symbolic_sizes(self) -> list[str]:
        """Returns the sizes that `jax.export.symbolic_shape` made, such as `B = b`; kernels have none of these."""
        sizes = {"B": self.batch, "T": self.query_length, "S": self.key_length, "sequences": self.num_sequences}
        return [f"{name} = {size}" for name, size in sizes.items() if not is_known(size)]

    @property
    def group(self) -> int:
        """Returns how many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1
