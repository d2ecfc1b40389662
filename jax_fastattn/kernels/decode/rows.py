# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A warp of a decoding kernel, in both families: 16 rows and a strip of the keys of each tile, by mma.sync.

A row is a query and a query head of the key/value head's group, numbered `query * group + head`. Warps that share a
block of rows have different keys, so a warp needs no other one until the end of a segment, where `merge.py`
merges the results of the CTA's warps. A `KeySource` knows how K and V come to shared memory.

Every tile has a mask, since the loads take longer than masking in any tile. Rows of V that no query sees may hold
anything; where the source does not zero them, they are cleared in the fragments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from jax_fastattn.kernels.decode.config import BLOCK_ROWS, DecodeBarrier
from jax_fastattn.kernels.decode.line import Entry, Line, Segment, Share, Unit
from jax_fastattn.kernels.decode.merge import MergeMemory, SegmentMerge
from jax_fastattn.kernels.device import mma, ptx, softmax, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.device.products import FactorWords, product_words
from jax_fastattn.kernels.features.places import Element, Head, ScoreTile
from jax_fastattn.kernels.features.visible.row_bits import RowBits, SeenKeys
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.tiles.plan import Limits
from jax_fastattn.kernels.weights import Weights


def refuse_placed(spec: KernelSpec) -> None:
    """Raises if a feature asks where a score lies, or for its head, and has no instance for each row."""
    placed = [code.name for code in spec.features if code.is_placed and not code.has_rows]
    if placed:
        raise NotImplementedError(
            "decoding kernels have rows of several query heads, and take no feature that asks for one; found "
            f"{', '.join(placed)}; use the forward kernel"
        )


class KeySource(Protocol):
    """How tiles of K and V come to a warp. All lanes call its methods."""

    @property
    def keeps_hidden(self) -> bool:
        """Whether rows that no query sees hold what is in memory, else zeros."""
        ...

    def start(self, segment: Segment) -> None:
        """Prepares for the first tile of a segment; other warps may still merge the one before it."""
        ...

    def wait(self, segment: Segment, i: Int32) -> Int32:
        """Waits for the i-th tile of a segment, and returns what the other methods find it by."""
        ...

    def key(self, place: Int32) -> Callable[[int, int], mma.Fragment]:
        """Returns what loads the strip of K for `mma.gemm`."""
        ...

    def value(self, place: Int32) -> Callable[[int, int], mma.Fragment]:
        """Returns what loads the strip of V for `mma.gemm`."""
        ...

    def release(self, place: Int32) -> None:
        """Gives the tile back."""
        ...

    def end(self) -> None:
        """Waits until all warps that compute are past the merge before this one, and its bytes are free."""
        ...


class RowScores(NamedTuple):
    """What maps products of a lane's two rows to logits, which have a query and a head of their own each.

    Attributes:
        scores: for each row, with what features read for its head.
        queries: of each row.
    """

    scores: Sequence[Score]
    queries: Sequence[Int32]

    def full(self, acc: list[Float32], tile: ScoreTile) -> None:
        """Turns products into logits over `Score.unit`, in place, given the tile of the first row."""
        tiles = [replace(tile, row=query) for query in self.queries]
        readings = [score.read(own) for score, own in zip(self.scores, tiles, strict=True)]
        for index in range(len(acc)):
            at = tile.at(index)
            acc[index] = readings[at.i].logit(acc[index], Element(tiles[at.i], 0, at.column)).value


class _Own(NamedTuple):
    """What a lane knows of its two accumulator rows in a segment.

    Attributes:
        rows: their numbers; those from `T * group` on do not exist.
        limits: the keys that they see, unless bits say so.
        words: addresses of their bits, if there are some.
        column: the lane's first column of a strip.
        scores: maps products of each row to logits; None if that is the same for all rows.
    """

    rows: Sequence[Int32]
    limits: list[Limits]
    words: list[Int64]
    column: Int32
    scores: RowScores | None


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Emits the code of a warp that computes.

    Attributes:
        memory: where results are merged.
        source: the source of K and V.
        score: maps products to logits.
        bits: bits of the keys that rows see; None if they see ranges of keys.
        merge: the merge of the results of the CTA's warps.
        block: which block of rows the warp has.
        part: which keys of a tile.
        query: fragments of Q, `[head_dim / 16 * 4]`.
        out: accumulator of O, relative to the maxima.
        maxima: `[2]`, of what enters the softmax.
        sums: `[2]`, the lane's parts of the sums of exponentials.
        factors: `[2]`, by which the last tile changed what came before.
    """

    line: Line
    memory: MergeMemory
    source: KeySource
    score: Score
    bits: RowBits | None
    merge: SegmentMerge
    block: Int32
    part: Int32
    query: Any
    out: mma.Accumulator
    maxima: Any
    sums: Any
    factors: Any

    @classmethod
    def start(cls, line: Line, memory: MergeMemory, source: KeySource, thread: Int32, warp: Int32) -> "DecodeRows":
        """Returns the role with its registers."""
        config, score = memory.config, Score.forward(line.spec, line.buffers, line.scalars)
        return cls(
            line=line,
            memory=memory,
            source=source,
            score=score,
            bits=RowBits.of(line.spec, line.buffers, line.scalars, config.strip),
            merge=SegmentMerge(line, memory, score, thread),
            block=warp // config.parts if config.row_blocks > 1 else Int32(0),
            part=warp % config.parts,
            query=cute.make_rmem_tensor((memory.head_dim // 4,), Int32),
            out=cute.make_rmem_tensor((memory.v_head_dim // 2,), Float32),
            maxima=cute.make_rmem_tensor((2,), Float32),
            sums=cute.make_rmem_tensor((2,), Float32),
            factors=cute.make_rmem_tensor((2,), Float32),
        )

    @property
    def spec(self) -> KernelSpec:
        """The compile key."""
        return self.line.spec

    @property
    def words(self) -> FactorWords:
        """The words that P becomes."""
        return product_words(self.spec)

    def begin(self, share: Share, unit: Unit) -> None:
        """Prepares for the first segment, given the CTA's share and its first unit."""
        self.merge.begin(share)
        self._load_query(unit)

    def _rows(self) -> tuple[list[Int32], Int32]:
        """Returns the numbers of the lane's two accumulator rows, and its first column."""
        first, column = accumulator_lane(self.line.lane)
        return [self.block * BLOCK_ROWS + first + 8 * i for i in range(2)], column

    def visit(self, segment: Segment) -> None:
        """Computes the result of a segment."""
        self._turn_query()
        own = self._own(segment)
        self.out.fill(0.0)
        self.sums.fill(0.0)
        self.maxima.fill(softmax.NEVER)
        self.source.start(segment)
        wgmma.loop(segment.count, lambda i: self._tile(segment, i, own))
        self.source.end()
        self._share(own)
        self._load_query(segment.following())
        self._sync()
        self.merge.run(segment)

    def _own(self, segment: Segment) -> _Own:
        """Returns what the lane knows of its rows, and asks for the bits of the first tile."""
        rows, column = self._rows()
        scores = self._scores(segment, rows)
        if self.bits is None:
            limits = [segment.entry.bounds.key_limits(row // self.spec.group) for row in rows]
            return _Own(rows, limits, [], column, scores)
        own = _Own(rows, [], self.bits.rows(segment.batch, segment.kv_head, rows), column, scores)
        self.bits.ask(own.words, self._strip(segment, Int32(0)))
        return own

    def _scores(self, segment: Segment, rows: Sequence[Int32]) -> RowScores | None:
        """Returns what maps products of the lane's rows to logits; None if no feature has instances of rows."""
        spec, queries = self.spec, self.line.scalars.query_length
        if not any(code.has_rows for code in spec.features):
            return None
        existing = [ptx.where(row < queries * spec.group, row, Int32(0)) for row in rows]
        heads = [segment.kv_head * spec.group + row % spec.group for row in existing]
        scores = [self.score.start(Head(segment.batch, head)) for head in heads]
        return RowScores(scores, [row // spec.group for row in existing])

    def _strip(self, segment: Segment, i: Int32) -> Int32:
        """Returns the first key of the warp's strip of the i-th tile."""
        config = self.memory.config
        return segment.entry.first + (segment.tile + i) * config.keys + self.part * config.strip

    def _sync(self) -> None:
        """Waits for all warps that compute."""
        cute.arch.barrier(barrier_id=DecodeBarrier.MERGE.at(), number_of_threads=self.memory.config.consumer_threads)

    def _load_query(self, unit: Unit) -> None:
        """Loads fragments of Q, with row 0 in the place of rows that do not exist; nothing waits for them here."""
        spec, scalars = self.spec, self.line.scalars
        rows, column = self._rows()
        for i, row in enumerate(rows):
            at = ptx.where(row < scalars.query_length * spec.group, row, Int32(0))
            position = Int64(unit.batch * scalars.query_length + at // spec.group)
            head = unit.kv_head * spec.group + at % spec.group
            start = self.line.buffers.query.toint() + (position * scalars.num_heads + head) * (2 * spec.head_dim)
            for chunk in range(self.memory.head_dim // 8):
                inside = 8 * chunk < spec.head_dim
                value = ptx.load_global_int(start + (column * 2 + 16 * chunk)) if inside else Int32(0)
                self.query[2 * chunk + i] = value

    def _turn_query(self) -> None:
        """Flips the signs of Q if the scale is negative."""
        if self.score.negative is None:
            return
        flip = ptx.where(self.score.negative, Int32(-0x7FFF8000), Int32(0))
        for i in range(self.memory.head_dim // 4):
            self.query[i] = self.query[i] ^ flip

    # Tiles.

    def _tile(self, segment: Segment, i: Int32, own: _Own) -> None:
        """Adds the warp's strip of a tile."""
        config, memory = self.memory.config, self.memory
        blocks, steps = config.strip // 8, memory.head_dim // 16
        place = self.source.wait(segment, i)
        scores = mma.zeros(1, blocks)
        load_key, load_value = self.source.key(place), self.source.value(place)
        self.words.gemm(scores, (1, blocks, steps), lambda _, k: self._query(k), load_key)
        column = segment.entry.first + self.part * config.strip + own.column
        tile = ScoreTile(own.rows[0], segment.tile + i, config.keys, column, blocks)
        weights = Weights(self.score, tile, scores)
        bits = self._take_bits(segment, i, own, tile)
        seen, check_low = own.limits if bits is None else bits, self.spec.bounds_kind.left
        if own.scores is None:
            weights.edge(seen, check_low=check_low)
        else:
            own.scores.full(scores, tile)
            weights.hide(seen, Float32(softmax.NEVER), check_low=check_low)
        self._rescale(self._exponentials(scores, blocks))
        load_value = self._live_values(load_value, segment.entry, tile.column, bits)
        shape = (1, memory.v_head_dim // 8, config.strip // 16)
        self.words.gemm(self.out, shape, lambda m, k: weights.fragment(self.words, m, k), load_value)
        self.source.release(place)

    def _take_bits(self, segment: Segment, i: Int32, own: _Own, tile: ScoreTile) -> SeenKeys | None:
        """Returns the bits of the i-th tile, and asks for the next tile's; None if rows see ranges."""
        if self.bits is None:
            return None
        found = self.bits.take(tile.column)
        self.bits.ask(own.words, self._strip(segment, i + 1))
        return found

    def _query(self, k: int) -> mma.Fragment:
        return [self.query[4 * k + e] for e in range(4)]

    def _exponentials(self, scores: list[Float32], blocks: int) -> Boolean:
        """Replaces scores by weights relative to new maxima; returns whether one of the warp's rows has a new one."""
        unit, shifts, grown = self.score.unit, [], Boolean(False)
        for i, x in enumerate(softmax.row_maxima(scores, 1, blocks)):
            old = self.maxima[i]
            grown = Boolean(grown | (x > old))
            new = ptx.maximum(old, x)
            # A row may have seen no key yet: -inf minus -inf is not a number.
            shift = ptx.where(new == Float32(softmax.NEVER), Float32(0.0), new)
            self.maxima[i] = new
            self.factors[i] = ptx.exp2((old - shift) * unit)
            shifts.append(shift * unit)
        for i, total in enumerate(softmax.exponentials(scores, 1, blocks, unit, shifts)):
            self.sums[i] = ptx.fma(self.sums[i], self.factors[i], total)
        return cute.arch.vote_any_sync(grown)

    def _rescale(self, grown: Boolean) -> None:
        """Makes the accumulator relative to the new maxima."""

        def rescale() -> None:
            for index in range(self.memory.v_head_dim // 2):
                self.out[index] = self.out[index] * self.factors[index // 2 % 2]

        cutlass.if_generate(grown, rescale)

    def _live_values(
        self, load: Callable[[int, int], mma.Fragment], entry: Entry, key: Int32, bits: SeenKeys | None
    ) -> Callable[[int, int], mma.Fragment]:
        """Returns what loads fragments of V without rows that no query sees, given the lane's first key.

        A weight of 0 does not hide them: 0 times NaN is NaN.
        """
        strip = self.memory.config.strip
        if bits is not None:
            words = bits.pairs(strip)
        elif self.spec.bounds_kind.hides_last_keys and self.source.keeps_hidden:
            words = entry.pairs(key, strip)
        else:
            return load
        # A register has the first of two neighboring rows in its lower half.
        return lambda n, k: [x & words[2 * k + i % 2] for i, x in enumerate(load(n, k))]

    # The end of a segment.

    def _share(self, own: _Own) -> None:
        """Stores what the warp has of its rows to shared memory."""
        memory = self.memory
        first = (self.block * memory.config.parts + self.part) * BLOCK_ROWS
        for i in range(2):
            place = first + own.rows[i] % BLOCK_ROWS
            total, log_max = softmax.quad_sum(self.sums[i]), self.maxima[i] * self.score.unit
            target = memory.partial(place) + own.column * 4

            def store_stats(place: Int32 = place, log_max: Float32 = log_max, total: Float32 = total) -> None:
                ptx.store_shared_pair(memory.stats(place), log_max, total)

            cutlass.if_generate(own.column == 0, store_stats)
            for n in range(memory.v_head_dim // 8):
                ptx.store_shared_pair(target + n * 32, self.out[4 * n + 2 * i], self.out[4 * n + 2 * i + 1])
