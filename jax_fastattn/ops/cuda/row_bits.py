# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A mask or segment ids for the decoding kernels: bits of the keys that each row sees, written by XLA.

Few queries have few bits, so no kernel of ours writes them, and the whole predicate is in them: mask, segment ids,
window (with causal), offset and lengths. Of each batch entry the kernels also get the range of keys outside of which
no query sees any, in place of lengths and offset, so that they read no other key. `features/visible/row_bits.py` reads
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.spec import AttentionSpec, Operands
from jax_fastattn.xla.chunks import Span
from jax_fastattn.xla.predicate import Predicate

# A word has the bits of this many keys.
WORD = 32


@dataclass(frozen=True)
class RowBitsArrays:
    """Bits of a call.

    Attributes:
        planes: the scalars of `features.row_planes.RowPlanes`: where batch entries, query heads, key/value heads and
            queries have rows of their own.
        words: `[planes, rows, words]`, int32. Bit i of word w is set where the row sees key 32 w + i.
        begin: `[B]`, the first key that the kernels read, a multiple of 32.
        end: `[B]`, the key after the last one.
    """

    planes: tuple[int, int, int, int]
    words: jax.Array
    begin: jax.Array
    end: jax.Array

    def buffers(self) -> dict[str, jax.Array | None]:
        """Returns the operands of the launch that reads them, by name."""
        return {"row_bits": self.words, "query_offset": self.begin, "key_value_seq_lengths": self.end}


def row_bits(spec: AttentionSpec, operands: Operands) -> RowBitsArrays:
    """Returns the bits of a call that has a mask or segment ids."""
    batch, queries = operands.query.shape[:2]
    keys = operands.key.shape[1]
    seen = Predicate.of(spec, operands).visible(Span(0, queries), Span(0, keys))
    assert seen is not None, spec
    entries, kv_heads, group, rows, _ = seen.shape
    planes = (kv_heads if entries > 1 else 0, int(group > 1), int(kv_heads > 1), int(rows > 1))
    # Rows are numbered as in the kernels: query heads of a group are next to each other.
    words = _packed(jnp.broadcast_to(seen, (*seen.shape[:4], keys)).swapaxes(2, 3))
    begin, end = (jnp.broadcast_to(x, (batch,)) for x in _range(words, keys))
    return RowBitsArrays(planes, words.reshape(entries * kv_heads, rows * group, -1), begin, end)


def _packed(x: jax.Array) -> jax.Array:
    """Packs booleans along the last axis to words of 32 bits, int32; the last word ends with zeros."""
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % WORD)])
    bits = padded.reshape(*x.shape[:-1], -1, WORD).astype(jnp.uint32)
    places = lax.broadcasted_iota(jnp.uint32, bits.shape, x.ndim)
    return lax.bitcast_convert_type((bits << places).sum(-1, dtype=jnp.uint32), jnp.int32)


def _range(words: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """Returns first key and end of the words `[b, ...]` that are not 0, int32 `[b]` each; 0 and 0 if all are."""
    live = (words != 0).any(tuple(range(1, words.ndim - 1)))
    first = lax.broadcasted_iota(jnp.int32, live.shape, 1) * WORD
    end = jnp.minimum(jnp.where(live, first + WORD, 0).max(1), keys)
    return jnp.minimum(jnp.where(live, first, keys).min(1), end), end
