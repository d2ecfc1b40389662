# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The sizes of blocks by platform, and the spans of queries and keys that the plane of logits is cut into.

`blocks.py` says what a block of two spans holds. Nothing here knows about masks or products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_fastattn.spec import is_known

Index = jax.Array | int
State = TypeVar("State")


@dataclass(frozen=True)
class Tuning:
    """Sizes by which the plane of logits is cut on a platform. They affect only speed and memory.

    Attributes:
        whole: the most logits, over batch and heads, that are in memory at once. A call of no more is not cut into
            chunks; it is cut into bands of queries if masks hide a static part of the plane.
        band: the fewest logits of a band.
        block: about how many logits, over batch and heads, a chunk of queries and keys has.
        chunk: the most queries and keys of a chunk, unless there are fewer queries than that.
        min_chunk: the fewest queries and keys of a chunk, even if they have more logits than `block`.
        barriers: whether to work around faults of XLA:CPU, see `Blocks.product` and `Blocks.rounded`.
        copied: the most bytes of values of which few queries get a copy without unseen keys, see `Blocks.weighted`; inf
            is any number of bytes.
    """

    whole: int
    band: int
    block: int
    chunk: int
    min_chunk: int
    barriers: bool
    copied: float

    def with_planes(self, count: int) -> Tuning:
        """Returns the sizes for an op that holds `count` planes of logits at once, in the memory of one plane."""
        return replace(self, whole=self.whole // count)


# These sizes fit a CPU's cache. On two cores of an AMD EPYC with AVX-512, with 8 heads of 64, a forward pass of 2**21
# logits (8 MiB) takes 0.61 to 0.83 of the time that it takes in chunks, and one of 2**23 takes 1.1 to 2 times as long.
# With gradients the ratios are 0.63 to 1.08 and 0.85 to 1.28 (benchmarks/results/jax-nn-2026-11-25-cpu.jsonl). Blocks
# of 2**20 logits took 0 to 30 % less time than blocks of 2**21.
CPU = Tuning(whole=1 << 21, band=1 << 20, block=1 << 20, chunk=512, min_chunk=128, barriers=True, copied=0)
# `whole` is 4 GiB of logits, as jax.nn keeps them on the same device. A copy of 64 MiB of values takes longer than the
# decision whether it is needed, about 10 us: one query takes 118 us instead of 90 on an H100; with 32 MiB it takes 65,
# not 72.
ACCELERATOR = Tuning(
    whole=1 << 30, band=1 << 23, block=1 << 28, chunk=4096, min_chunk=512, barriers=False, copied=48 << 20
)


class Span(NamedTuple):
    """The queries or the keys of a block.

    Attributes:
        start: the first one; a Python number if it is known when the call is traced.
        size: how many there are.
        own: elements before `own` belong to the previous span too; None if the spans do not overlap.
    """

    start: Index
    size: int
    own: Index | None = None

    def positions(self) -> jax.Array:
        """Returns the positions of the elements, int32 `[size]`."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32)

    def take(self, x: jax.Array, axis: int, length: int) -> jax.Array:
        """Returns the part of x along an axis of size `length`, or x itself if it is broadcast along that axis."""
        if self.size == length or x.shape[axis] != length:
            return x
        if isinstance(self.start, int):
            return lax.slice_in_dim(x, self.start, self.start + self.size, axis=axis)
        return lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, x: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        """Returns x with `part` in the place of what `take` returns."""
        part = part.astype(x.dtype)
        return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, self.start, axis)

    def add(self, x: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        return self.put(x, self.take(x, axis, x.shape[axis]) + part, axis)


@dataclass(frozen=True)
class Axis:
    """A sequence axis, cut into `count` chunks of one size.

    The last chunk is moved back to end with the sequence, so it may begin with elements of the chunk before it.
    """

    length: int
    chunk: int
    count: int

    @classmethod
    def cut(cls, length: int, limit: int) -> Axis:
        """Cuts into the fewest chunks of at most `limit` elements, equal in size; a symbolic length is one chunk."""
        if not is_known(length):
            return cls(length, length, 1)
        count = max(-(-length // limit), 1)
        return cls(length, -(-length // count), count)

    def span(self, i: Index) -> Span:
        if self.count == 1:
            return Span(0, self.length)
        own = jnp.int32(i) * self.chunk
        overlaps = self.chunk * self.count != self.length
        return Span(jnp.minimum(own, self.length - self.chunk), self.chunk, own if overlaps else None)

    def loop(self, bounds: tuple[Index, Index], body: Callable[[Index, State], State], state: State) -> State:
        """Runs `fori_loop` over the chunks within `bounds`; a single chunk needs no loop."""
        return body(0, state) if self.count == 1 else lax.fori_loop(*bounds, body, state)
