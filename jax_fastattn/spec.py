# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The nouns that every layer shares: the operands of a call and the static facts about it.

Canonical shapes, by which every layer below `canonical.py` lives (lower case: 1 or the full size):

    query [B, T, N, H]   key [B, S, K, H]   value [B, S, K, D]   N = K * group

What stays out: any check of user input (`validation.py`) and any reshaping (`canonical.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

Implementation = Literal["cuda", "xla"]

# Beyond any length. Offsets and sides of windows are clamped to it, so that no sum with a position leaves int32.
UNBOUNDED = 1 << 29


def is_known(size: Any) -> bool:
    """Whether a size is a number, not an expression of `jax.export.symbolic_shape`, which cannot be compared."""
    return isinstance(size, int)


class Operands(NamedTuple):
    """The arrays of one attention call, in the order in which primitives take them; None is absent.

    Attributes:
        query: `[B, T, N, H]`.
        key: `[B, S, K, H]`.
        value: `[B, S, K, D]`, D = v_head_dim.
        bias: `[b, n, t, s]`, added to the scaled logits.
        mask: bool `[b, n, t, s]`, True where a query may attend to a key; or `[b, K, t, s]`, where the query heads of a
            group share the row of their key/value head.
        query_seq_lengths: int32 `[B]`; rows from there on are padding.
        key_value_seq_lengths: int32 `[B]`; keys from there on are invisible.
        query_offset: int32 `[B]`: query i stands at key position i + offset.
        query_segment_ids: integers `[B, T]`.
        key_value_segment_ids: integers `[B, S]` of the same dtype.
        sinks: float32 `[b, N]`, one extra logit per head in the softmax denominator.
        scale: float32 `[b, 1]` (float64 for float64 operands): a factor on query . key that is not static. Its axis of
            size 1 stands for the heads, over which its gradient is a sum.
        sequences: int32 `[B, M, 4]`, or with offsets `[B, M, 5]`: sequences that lie one after the other, see
            `packed.py`. Offset, lengths and segment ids are absent then.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    query_seq_lengths: jax.Array | None = None
    key_value_seq_lengths: jax.Array | None = None
    query_offset: jax.Array | None = None
    query_segment_ids: jax.Array | None = None
    key_value_segment_ids: jax.Array | None = None
    sinks: jax.Array | None = None
    scale: jax.Array | None = None
    sequences: jax.Array | None = None

    def present(self) -> tuple[str, ...]:
        """Names of the operands that are there, in order."""
        return tuple(name for name, x in zip(self._fields, self, strict=True) if x is not None)

    def arrays(self) -> list[jax.Array]:
        """The operands that are there, in order: what a primitive binds."""
        return [x for x in self if x is not None]

    @property
    def is_packed(self) -> bool:
        """Whether they hold sequences one after the other (`attention_varlen`)."""
        return self.sequences is not None


@dataclass(frozen=True)
class AttentionSpec:
    """What a call fixes when it is traced, apart from shapes and dtypes. Hashable; a parameter of the primitives.

    Attributes:
        scale: factor on query . key; 1 if the factor is an operand.
        is_causal: key position <= query position + query_offset.
        window: `(left, right)`: a query at position p sees keys p - left .. p + right; None is unlimited.
        logits_soft_cap: `cap * tanh(x / cap)` on scaled, biased logits; None is off.
        deterministic: gradients must be bitwise equal from run to run.
        implementation: "cuda", "xla" or None: the CUDA kernels where they apply.
        precision: of products of float32 on the XLA path, as `jax.lax.dot_general` takes it.
        present: names of the operands that are given, see `Operands.present`.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    logits_soft_cap: float | None = None
    deterministic: bool = False
    implementation: Implementation | None = None
    precision: str = "default"
    present: tuple[str, ...] = ("query", "key", "value")

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The window with causality folded in: causal is a right bound of 0."""
        left, right = self.window
        return left, 0 if self.is_causal else right

    def operands(self, arrays: Sequence[Any]) -> Operands:
        """Inverse of `Operands.arrays`."""
        return Operands(**dict(zip(self.present, arrays, strict=True)))


@dataclass(frozen=True)
class Problem:
    """A spec together with the sizes that it meets: what kernels are chosen and launched by.

    Attributes:
        spec: the static facts.
        dtype: name of the dtype of query, key and value, such as "bfloat16".
        batch, query_length, key_length: B, T, S.
        num_heads, num_kv_heads: N, K.
        head_dim, v_head_dim: H, D.
        sinks_per_batch: whether sinks has its own row for each batch entry.
        num_sequences: how many lie one after the other in each batch entry, padding included; 0 if none do.
        packed_offsets: whether they have offsets.
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
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query or no key."""
        return 0 in (self.batch, self.query_length, self.key_length, self.num_heads, self.head_dim, self.v_head_dim)

    @property
    def symbolic_sizes(self) -> list[str]:
        """The sizes that `jax.export.symbolic_shape` made, such as `B = b`; kernels have none of these."""
        sizes = {"B": self.batch, "T": self.query_length, "S": self.key_length, "sequences": self.num_sequences}
        return [f"{name} = {size}" for name, size in sizes.items() if not is_known(size)]

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1
