# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tile of which head and sequence a CTA works on. Each kernel has one CTA for each tile."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cutlass import Int32, Int64

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import copies
from jax_fastattn.kernels.device.sequences import Sequence
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.records import slot_count


class Work(NamedTuple):
    """A tile that a CTA works on.

    Attributes:
        tile: index of the tile in its sequence.
        head: query head; None where keys have tiles.
        sequence: the rows.
    """

    tile: Int32
    head: Int32 | None
    kv_head: Int32
    sequence: Sequence


class Schedule(Protocol):
    """The tiles of queries, or of keys, of a launch, and their orders."""

    def blocks(self, length: Int32, batch: Int32, heads: Int32) -> Int32:
        """Returns how many CTAs have a tile.

        Args:
            length: rows of a batch entry, or of all packed sequences.
            batch: how many batch entries or sequences there are.
            heads: heads of a batch entry.
        """
        ...

    def pitch(self, scalars: Scalars) -> Int32:
        """Returns how many query tiles, or slots, lie from one head to the next."""
        ...

    def index(self, sequence: Sequence, scalars: Scalars, head: Int32, tile: Int32) -> Int64:
        """Returns the index of a query tile of a sequence in an array with one element for each tile of all heads."""
        ...

    def longest_first(self, block: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the query tile of a CTA where the longest tiles of a causal mask come first."""
        ...

    def last_entry_first(self, block: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the query tile of a CTA where the last batch entry, or the last sequence, comes first."""
        ...

    def in_sections(self, index: Int32, section: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the key tile that has an index in an order in which CTAs may add in semaphore order.

        Args:
            section: how many heads are begun together, see `plan.section`.
        """
        ...


@dataclass(frozen=True)
class EntryTiles:
    """Tiles of batch entries of one length.

    Attributes:
        rows: rows of a tile.
    """

    spec: KernelSpec
    rows: int

    def blocks(self, length: Int32, batch: Int32, heads: Int32) -> Int32:
        """Returns how many tiles there are."""
        return copies.count(length, self.rows) * batch * heads

    def pitch(self, scalars: Scalars) -> Int32:
        """Returns the distance from one head to the next, in query tiles."""
        return copies.count(scalars.query_length, self.rows)

    def index(self, sequence: Sequence, scalars: Scalars, head: Int32, tile: Int32) -> Int64:
        """Returns the index of a query tile in an array `[batch, heads, tiles]`."""
        return sequence.queries.head(scalars.num_heads, head) * self.pitch(scalars) + tile

    def longest_first(self, block: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the query tile of a CTA.

        In its index, the head of the group varies fastest, then the tile from the last to the first, then the key/value
        head, then the entry. Heads that share K and V run at the same time, and under a causal mask the longest tiles
        start first.
        """
        group = self.spec.group
        count, kv_heads = copies.count(scalars.query_length, self.rows), scalars.num_heads // group
        member, block = block % group, block // group
        tile, block = count - 1 - block % count, block // count
        kv_head, batch = block % kv_heads, block // kv_heads
        return Work(tile, kv_head * group + member, kv_head, Sequence.of_entry(self.spec, batch, buffers, scalars))

    def last_entry_first(self, block: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the query tile of a CTA: all heads of a tile come together, and entries from the last to the first.

        The entry that comes next is in L2.
        """
        count, heads = copies.count(scalars.query_length, self.rows), scalars.num_heads
        head, tile = block % heads, block // heads % count
        batch = scalars.batch - 1 - block // heads // count
        return Work(tile, head, head // self.spec.group, Sequence.of_entry(self.spec, batch, buffers, scalars))

    def in_sections(self, index: Int32, section: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the key tile that has an index; heads are visited in sections, see `plan.place_in_sections`."""
        kv_heads = scalars.num_heads // self.spec.group
        count = copies.count(scalars.key_length, self.rows)
        tile, head = copies.place_in_sections(index, section, count, scalars.batch * kv_heads)
        batch, kv_head = head // kv_heads, head % kv_heads
        return Work(tile, None, kv_head, Sequence.of_entry(self.spec, batch, buffers, scalars))


@dataclass(frozen=True)
class PackedTiles:
    """Tiles of packed sequences, from their records.

    Attributes:
        rows: rows of a tile.
    """

    spec: KernelSpec
    rows: int

    def blocks(self, length: Int32, batch: Int32, heads: Int32) -> Int32:
        """Returns how many slots there are; `batch` is the number of sequences."""
        return slot_count(length, self.rows, batch) * heads

    def pitch(self, scalars: Scalars) -> Int32:
        """Returns how many slots lie from one head to the next."""
        return slot_count(scalars.query_length, self.rows, scalars.batch)

    def index(self, sequence: Sequence, scalars: Scalars, head: Int32, tile: Int32) -> Int64:
        """Returns the index of a query tile in an array `[heads, slots]`."""
        return Int64(head) * self.pitch(scalars) + sequence.queries.padded(tile, 1)

    def longest_first(self, block: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the query tile of a CTA, by `last_entry_first`, whose order has the longest of a sequence first."""
        return self.last_entry_first(block, buffers, scalars)

    def last_entry_first(self, block: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the query tile of a CTA: all heads of a slot come together, and slots from the last to the first."""
        heads = scalars.num_heads
        head, slot = block % heads, self.pitch(scalars) - 1 - block // heads
        tile, sequence = Sequence.of_record(self.spec, buffers.query_tiles, slot, scalars, of_keys=False)
        return Work(tile, head, head // self.spec.group, sequence)

    def in_sections(self, index: Int32, section: Int32, buffers: Buffers, scalars: Scalars) -> Work:
        """Returns the key tile that has an index: all heads of a slot come together, and slots ascend.

        CTAs that add in semaphore order rely on that.
        """
        del section
        kv_heads = scalars.num_heads // self.spec.group
        slot, kv_head = index // kv_heads, index % kv_heads
        tile, sequence = Sequence.of_record(self.spec, buffers.key_tiles, slot, scalars, of_keys=True)
        return Work(tile, None, kv_head, sequence)


def schedule(spec: KernelSpec, rows: int) -> Schedule:
    """Returns the schedule of a compile key, for tiles of `rows` rows."""
    return (PackedTiles if spec.packed else EntryTiles)(spec, rows)
