# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`DqSum` with integers, of which every order of additions makes the same: gradients have equal bits in every run.

A row of dQ is multiplied by its `resolution` (`gradient.py`) and rounded to int32. Conversions take a slow unit, behind
the additions; so 1.5 2^23 is added instead, which leaves the integer in the last bits of a float32, if it is below
2^22. Beside what a bound of all sums leaves room for, larger ones are rare: a warp that finds one in a part of a tile
converts that part, and adds what is missing. The constant is subtracted when a tile is stored, as often as it was
added. Integers of neighbouring lanes lie together, so that each addition of a warp meets 128 bytes.
"""

import functools
from types import SimpleNamespace

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from jax_fastattn.kernels.device import ptx, tiles, wgmma
from jax_fastattn.kernels.sm90 import gradient
from jax_fastattn.kernels.sm90.backward_config import padded_rows
from jax_fastattn.kernels.sm90.dq_sum import BLOCK, DqSum

# 1.5 2^23, and its bits: those of its sum with an integer below 2^22 are the sum of its bits and the integer.
_MAGIC, _MAGIC_BITS = float(3 << 22), 0x4B400000
# Sign and exponent, which that sum shares.
_HEAD, _HEAD_BITS = -(1 << 23), 0x4B000000
# All bits but the sign, and those of an infinity.
_POSITIVE, _INFINITE_BITS = 0x7FFFFFFF, 0x7F800000


class DqIntegers(DqSum):
    """Emits the warpgroup's code; see `DqSum`."""

    def start(
        self, shared: SimpleNamespace, sums: tuple[cute.Pointer, ...], thread: Int32, scale: Float32
    ) -> SimpleNamespace:
        """The same, with the resolutions behind the counters in `sums`."""
        *others, resolutions = sums
        state = super().start(shared, tuple(others), thread, scale)
        state.resolutions = resolutions.toint()
        # Of the lane's rows of the next tile, asked for a tile ahead: loads wait behind additions.
        state.words = cute.make_rmem_tensor((self.config.queries // BLOCK,), Int32)
        state.asked = wgmma.Uniform(Int32(0), Int32(0))
        return state

    def _positions(self, state: SimpleNamespace) -> tuple[wgmma.Uniform, ...]:
        return *super()._positions(state), state.asked

    def _add_all(self, state: SimpleNamespace) -> None:
        state.words.fill(0)
        cutlass.if_generate(state.work.steps > 0, lambda: self._ask(state))
        super()._add_all(state)

    def _ask(self, state: SimpleNamespace) -> None:
        """Loads the resolutions of the lane's rows of the next tile to ask for."""
        address = self._resolutions(state, state.asked) + (state.thread & ~3)
        for i in range(self.config.queries // BLOCK):
            state.words[i] = ptx.load_global_int(address + 2 * BLOCK * i)
        self._advance(state.work, state.asked)

    def _resolutions(self, state: SimpleNamespace, at: wgmma.Uniform) -> Int64:
        """Address of the resolutions of a tile; each block of 64 rows has 128 bytes, each warp 32 of them."""
        head = Int64(state.work.batch) * state.work.num_heads + at[0]
        return state.resolutions + head * (2 * padded_rows(state.work.query_length)) + at[1] * (2 * self.config.queries)

    def _add(self, state: SimpleNamespace, i: Int32) -> None:
        shared, turn, chunks = state.shared, state.turn[0], self._chunks()
        buffer = turn % 2
        words = [state.words[block] for block in range(self.config.queries // BLOCK)]
        cutlass.if_generate(i + 1 < state.work.steps, lambda: self._ask(state))
        wgmma.wait(shared.dscore_full + buffer, turn // 2 % 2)
        self._start(state, buffer, *chunks[0])
        for chunk, (row_block, _) in enumerate(chunks):
            warpgroup.wait_group(0)
            factors = ptx.unpack(words[row_block])
            products = [state.dq[j] for j in range(self.columns // 2)]
            rounded = [ptx.bits(ptx.fma(x, factors[j % 4 // 2], Float32(_MAGIC))) for j, x in enumerate(products)]
            # The accumulator has been read: the next product goes on under the additions.
            if chunk + 1 < len(chunks):
                self._start(state, buffer, *chunks[chunk + 1])
            else:
                wgmma.release(shared.dscore_empty + buffer)
            self._add_rounded(state, chunk, row_block, rounded)
        wgmma.release(shared.added + state.slot[0])
        self._advance(state.work, state.added)
        state.turn[0] = turn + 1

    def _add_rounded(self, state: SimpleNamespace, chunk: int, row_block: int, rounded: list[Int32]) -> None:
        """Adds a part of a tile to its sums; then, where an integer was too large, what is missing."""
        address = self._sums(state, state.added, chunk) + state.thread % 32 * 4
        for j, x in enumerate(rounded):
            ptx.add_global_int(address + 128 * j, x)

        def correct() -> None:
            for j, x in enumerate(rounded):
                # The sum with the constant has the integer to 24 bits.
                integer = ptx.round_to_int(ptx.from_bits(x) - Float32(_MAGIC)) + _MAGIC_BITS
                ptx.add_global_int(address + 128 * j, integer - x)
            # Of what is no number no integer says so: dS may overflow float16.
            flags = self._resolutions(state, state.added) + 2 * BLOCK * row_block + (state.thread & ~3)
            for i in range(2):
                largest = functools.reduce(
                    cutlass.max, [x & _POSITIVE for j, x in enumerate(rounded) if j % 4 // 2 == i]
                )
                clear = functools.partial(ptx.store_global_half, flags + 2 * i, Int32(0))
                cutlass.if_generate(largest >= _INFINITE_BITS, clear)

        # Whether any head differs, three operands at a time: (a ^ c) | (b ^ c), then a | b | c.
        heads = [ptx.lop3(*rounded[j : j + 2], Int32(_HEAD_BITS), 0x7E) for j in range(0, len(rounded), 2)]
        while len(heads) > 1:
            heads = [ptx.lop3(*(heads[j : j + 3] + heads[j : j + 1] * 2)[:3], 0xFE) for j in range(0, len(heads), 3)]
        cutlass.if_generate(cute.arch.vote_any_sync((heads[0] & _HEAD) != 0), correct)

    def _totals(self, state: SimpleNamespace, chunk: int, row_block: int) -> list[Float32]:
        work, row = state.work, state.counted[1] * self.config.queries
        seen = tiles.key_tiles(row, self.config.queries, self.config.keys, **work.bounds)
        constant = (seen.end - seen.begin) * _MAGIC_BITS
        word = ptx.load_global_int(
            self._resolutions(state, state.counted) + 2 * BLOCK * row_block + (state.thread & ~3)
        )
        units = [gradient.reciprocal(x) for x in ptx.unpack(word)]
        address = self._sums(state, state.counted, chunk) + state.thread % 32 * 4
        sums = [ptx.load_global_int(address + 128 * j) for j in range(self.columns // 2)]
        return [Float32(x - constant) * units[j % 4 // 2] for j, x in enumerate(sums)]
