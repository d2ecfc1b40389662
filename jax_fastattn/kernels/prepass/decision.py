# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What a mask function says of all pairs of a tile, by intervals in registers."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from jax_fastattn.kernels.device import instructions, ptx
from jax_fastattn.kernels.prepass.program import MaskProgram
from jax_fastattn.kernels.tiles.intervals import Interval, Tile, Truth
from jax_fastattn.programs.code import Place


class DeviceArithmetic:
    """How intervals are computed in registers."""

    def minimum(self, x: Any, y: Any) -> Any:
        return Int32(cutlass.min(Int32(x), Int32(y)))

    def maximum(self, x: Any, y: Any) -> Any:
        return Int32(cutlass.max(Int32(x), Int32(y)))

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return ptx.where(condition, x, y) if isinstance(condition, bool) else ptx.where(condition, Int32(x), Int32(y))

    def quotient(self, x: Any, divisor: int) -> Int32:
        return instructions.apply("div", "ii", [x, divisor])


def truth(program: MaskProgram, lane: Int32, query_tile: Int32, key_tile: Int32) -> Truth:
    """Returns what the function says of a tile. All lanes of a warp call it."""
    config, lengths = program.parts.config, (program.scalars.query_length, program.scalars.key_length)
    sides = {"query": (query_tile * config.rows, config.rows), "key": (key_tile * config.keys, config.keys)}

    def plane(number: int) -> Interval | None:
        place = program.parts.places[number]
        kind = place.plane.kind
        if kind == "head":
            x = ptx.load_global_int(program.first(place))
            return Interval(x, x)
        return _extent(program, place, lane, *sides[kind]) if kind in sides else None

    ends = [
        (first, Int32(cutlass.min(first + rows, length)) - 1)
        for (first, rows), length in zip(sides.values(), lengths, strict=True)
    ]
    return Tile(program.parts.code, *ends, plane, DeviceArithmetic()).result()


def _extent(program: MaskProgram, place: Place, lane: Int32, first: Int32, rows: int) -> Interval:
    """Returns the smallest and the largest number of a plane in some rows."""
    plane, last = program.first(place), program.length(place.plane.kind) - 1
    at = [cutlass.min(first + cutlass.min(lane + 32 * i, rows - 1), last) for i in range((rows + 31) // 32)]
    found = [ptx.load_global_int(plane + Int64(x) * 4) for x in at]
    low = high = found[0]
    for x in found[1:]:
        low, high = Int32(cutlass.min(low, x)), Int32(cutlass.max(high, x))
    return Interval(cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max"))
