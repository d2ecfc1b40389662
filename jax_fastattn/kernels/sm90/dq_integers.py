# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`DqSum` with integers, of which every order of additions makes the same: gradients have equal bits in every run.

A row of dQ is multiplied by its `resolution` (`gradient.py`) and rounded to int32. Conversions take a slow unit, behind
the additions; so 3 is added instead, which leaves the integer in the last bits of a float32, if it is below 2^22.
Beside what a bound of all sums leaves room for, larger ones are rare: a warp that finds one in a part of a tile adds
what such sums lack. The constant is subtracted when a tile is stored, as often as it was added.

Integers of neighbouring lanes lie together, so that each addition of a warp meets 128 bytes. Those are four times as
many instructions as `DqSum` has, and the unit behind them takes one in 30 cycles: some of a part of a tile are held
until the next product has been started.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.device.layout import accumulator_lane
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import SLOTS, padded_rows
from jax_fastattn.kernels.sm90.dq_sum import BLOCK, DqSum, Position
from jax_fastattn.kernels.sm90.magnitudes import Magnitudes

# 3, and its bits: those of its sum with an integer below 2^22, in units of 2^-22, are the sum of its bits and the
# integer. The last bit of the sum is such a unit.
_MAGIC, _MAGIC_BITS = 3.0, 0x40400000
_UNITS = float(1 << 22)
# Bits of sign and exponent that no such sum has. Every other sum has one of them, but for 0.
_OTHERS = 0xBF800000 - (1 << 32)
# All bits but the sign, and those of an infinity.
_POSITIVE, _INFINITE_BITS = 0x7FFFFFFF, 0x7F800000
# Integers of a lane that are added behind the start of the next product: 8 to 16 are equally fast, of 28 the last ones
# hold up the part after them; of 12 those of some kernels spill.
_HELD = 8


class DqIntegers(DqSum):
    """Emits the warpgroup's code; see `DqSum`."""

    def start(self, shared: SimpleNamespace, sums: tuple, thread: Int32, scale: Float32) -> SimpleNamespace:
        """The same; behind the counters `sums` has resolutions, magnitudes, and K and V (`Rows`)."""
        *others, resolutions, _, _ = sums
        state = super().start(shared, tuple(others), thread, scale)
        state.resolutions = resolutions.toint()
        # Of the lane's rows of the next tile, asked for a tile ahead: loads wait behind additions.
        state.words = cute.make_rmem_tensor((self.config.queries // BLOCK,), Int32)
        state.held = cute.make_rmem_tensor((_HELD,), Int32)
        state.held.fill(0)
        return state

    def _add_all(self, state: SimpleNamespace) -> None:
        state.words.fill(0)
        state.head = self._head_part(state)
        adds = state.work.steps > 0
        cutlass.if_generate(adds, lambda: self._ask(state, state.added))
        super()._add_all(state)
        cutlass.if_generate(adds, lambda: self._hand_over(state))

    def zero(self, shared: SimpleNamespace, work: SimpleNamespace, sums: tuple, who: tuple[Int32, Int32]) -> None:
        """The same; the first warp adds what the consumers have found to the magnitudes of the head, before."""
        (slot, phase), (*_, magnitudes, _), target = who, sums, work.head_index + work.ahead

        def add() -> None:
            wgmma.wait(shared.found_full, phase)
            emit, warps = Magnitudes(self.spec), self.config.consumer_threads // 32
            both = emit.over_warps(shared.found, warps)
            # The last lanes to load a word, one of each.
            wgmma.release(shared.found_empty, ptx.thread_index() % 32 >= 32 - warps)
            cutlass.if_generate(target < work.all_heads, lambda: emit.add(magnitudes, target, both))

        cutlass.if_generate(slot == 0, add)
        super().zero(shared, work, sums, who)

    def prepare(self, shared: SimpleNamespace, work: SimpleNamespace, sums: tuple) -> Callable[[], None]:
        """The same; loads the head's magnitudes too, and hands over what resolutions have of the head."""
        super().prepare(shared, work, sums)
        (*_, magnitudes, _), lane = sums, ptx.thread_index() % 32
        key, value = Magnitudes(self.spec).of_head(magnitudes.toint(), work.head_index, lane)
        parts = gradient.head_part(key, value, self.spec.dlse)

        def hand_over() -> None:
            for i, part in enumerate(parts):
                cutlass.if_generate(lane == 0, lambda i=i, part=part: ptx.store_shared(shared.head + 4 * i, part))
            cute.arch.sync_warp()

        return hand_over

    def _head_part(self, state: SimpleNamespace) -> list[Int32]:
        """What the resolutions of a key/value head's rows have of the head."""
        words = [ptx.load_shared(state.shared.head + 4 * i) for i in range(1 + self.spec.dlse)]
        return [cute.arch.make_warp_uniform(word) for word in words]

    def _ask(self, state: SimpleNamespace, at: Position) -> None:
        """Loads the row parts of the resolutions of the lane's rows of a tile."""
        address = self._resolutions(state, at)
        for i in range(self.config.queries // BLOCK):
            state.words[i] = ptx.load_global_int(address + 2 * BLOCK * i)

    def _resolutions(self, state: SimpleNamespace, at: Position) -> Int64:
        """Address of the row parts of the lane's rows of a tile.

        Each block of 64 rows has 128 bytes, each warp 32 of them.
        """
        head = Int64(state.work.batch) * state.work.num_heads + at[0]
        address = state.resolutions + head * (2 * padded_rows(state.work.query_length))
        return ptx.offset(address + at[1] * (2 * self.config.queries), ptx.move(state.thread) & ~3)

    def _integers(self, state: SimpleNamespace, at: Position, chunk: int) -> Int64:
        """Address of the lane's first integer of a part of a tile."""
        # From the thread's index in every step: what is kept between them would take registers.
        return ptx.offset(self._sums(state, at, chunk), ptx.move(state.thread) % 32 * 4)

    def _previous(self, work: SimpleNamespace, at: wgmma.Uniform) -> Position:
        """The tile before this one."""
        begins = at[1] == work.visit.end - 1
        return at[0] - ptx.where(begins, Int32(1), Int32(0)), ptx.where(begins, work.visit.begin - 1, at[1]) + 1

    def _add(self, state: SimpleNamespace, i: Int32) -> None:
        work, shared, turn, chunks = state.work, state.shared, state.turn[0], self._chunks()
        buffer, count = turn & 1, self.columns // 2
        wgmma.wait(shared.dscore_full + buffer, turn >> 1 & 1)
        self._begin(state, buffer, 0)
        cutlass.if_generate(i > 0, lambda: self._hand_over(state))
        for chunk, (row_block, _) in enumerate(chunks):
            warpgroup.wait_group(0)
            integers = self._rounded(state, gradient.resolutions(state.words[row_block], state.head))
            cutlass.if_generate(
                cute.arch.vote_any_sync(self._any_large(integers)),
                lambda chunk=chunk, integers=integers: self._correct(state, chunk, integers),
            )
            early, late = integers[: count - _HELD], integers[count - _HELD :]
            if chunk + 1 < len(chunks):
                self._add_integers(state, state.added, chunk, early)
                self._begin(state, buffer, chunk + 1)
                self._add_integers(state, state.added, chunk, late, count - _HELD)
            else:
                asks = i + 1 < work.steps
                cutlass.if_generate(asks, lambda: self._ask(state, self._next(work, state.added)))
                wgmma.release(shared.dscore_empty + buffer)
                self._add_integers(state, state.added, chunk, early)
                for j, x in enumerate(late):
                    state.held[j] = x
        self._advance(work, state.added)
        state.turn[0] = turn + 1

    def _begin(self, state: SimpleNamespace, buffer: Int32, chunk: int) -> None:
        """Starts the product of a part of a tile, before any addition that follows here."""
        self._start(state, buffer, *self._chunks()[chunk])
        cute.arch.sync_warp()

    def _rounded(self, state: SimpleNamespace, word: Int32) -> list[Int32]:
        """The accumulator as sums with the constant, given the resolutions of the lane's two rows."""
        # Powers of two with a last bit: times one of those no float32 is -3, so that no sum is 0.
        factors = [ptx.from_bits(pair | 1) for pair in (word << 16, word & Int32(-0x10000))]
        products = [state.dq[j] for j in range(self.columns // 2)]
        return [ptx.bits(ptx.fma(x, factors[j % 4 // 2], Float32(_MAGIC))) for j, x in enumerate(products)]

    def _any_large(self, integers: list[Int32]) -> Boolean:
        """Whether any of these sums with the constant is not the integer's."""
        while len(integers) > 1:
            triples = [integers[j : j + 3] for j in range(0, len(integers), 3)]
            integers = [ptx.lop3(*(x + x + x)[:3], 0xFE) for x in triples]  # a | b | c
        return (integers[0] & Int32(_OTHERS)) != 0

    def _add_integers(
        self, state: SimpleNamespace, at: Position, chunk: int, integers: list[Int32], first: int = 0
    ) -> None:
        """Adds integers of the lane, from number `first` on, to those of a part of a tile."""
        address = self._integers(state, at, chunk)
        for j, x in enumerate(integers):
            ptx.add_global_int(address + 128 * (first + j), x)

    def _add_held(self, state: SimpleNamespace) -> None:
        """Adds what is held, of the last part of the tile before this one; 0 is held then."""
        held = [state.held[j] for j in range(_HELD)]
        at, last = self._previous(state.work, state.added), len(self._chunks()) - 1
        self._add_integers(state, at, last, held, self.columns // 2 - _HELD)
        state.held.fill(0)

    def _hand_over(self, state: SimpleNamespace) -> None:
        """Has the tile before this one counted."""
        self._add_held(state)
        slot = state.slot[0]
        slot = ptx.where(slot == 0, Int32(SLOTS - 1), slot - 1)
        wgmma.release(state.shared.added + slot, ptx.move(state.thread) % 32 == 31)

    def _correct(self, state: SimpleNamespace, chunk: int, integers: list[Int32]) -> None:
        """Adds what sums with the constant lack."""
        address = self._integers(state, state.added, chunk)
        for j, x in enumerate(integers):
            # Such a sum has the integer to 24 bits.
            integer = ptx.round_to_int((ptx.from_bits(x) - Float32(_MAGIC)) * Float32(_UNITS)) + _MAGIC_BITS
            ptx.add_global_int(address + 128 * j, integer - x)
        # Of what is no number no integer says so: dS may overflow float16.
        row_block, _ = self._chunks()[chunk]
        words = self._resolutions(state, state.added) + 2 * BLOCK * row_block
        for i in range(2):
            largest = functools.reduce(cutlass.max, [x & _POSITIVE for j, x in enumerate(integers) if j % 4 // 2 == i])
            clear = functools.partial(ptx.store_global_half, words + 2 * i, Int32(0))
            cutlass.if_generate(largest >= _INFINITE_BITS, clear)

    def _ended(self, state: SimpleNamespace, behind: Int32) -> Position:
        at = wgmma.Uniform(state.added[0], state.added[1])

        def back(_: Int32) -> None:
            at[0], at[1] = self._previous(state.work, at)

        wgmma.loop(behind, back)
        return at

    def _store(self, state: SimpleNamespace, at: Position) -> None:
        # What is seldom needed has no registers.
        thread = ptx.move(state.thread)
        lane_row, _ = accumulator_lane(thread % 32)
        now = {"thread": thread, "row": state.warp * 16 + lane_row}
        super()._store(SimpleNamespace(**(vars(state) | now)), at)

    def _totals(self, state: SimpleNamespace, at: Position, chunk: int) -> list[Float32]:
        row_block, _ = self._chunks()[chunk]
        seen = tiles.key_tiles(at[1] * self.config.queries, self.config.queries, self.config.keys, **state.work.bounds)
        constant = (seen.end - seen.begin) * _MAGIC_BITS
        word = ptx.load_global_int(self._resolutions(state, at) + 2 * BLOCK * row_block)
        units = [gradient.unit(x) for x in ptx.unpack(gradient.resolutions(word, state.head))]
        address = self._integers(state, at, chunk)
        integers = [ptx.load_global_int(address + 128 * j) for j in range(self.columns // 2)]
        return [Float32(x - constant) * units[j % 4 // 2] for j, x in enumerate(integers)]
