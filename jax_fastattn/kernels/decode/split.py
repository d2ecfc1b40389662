# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""How key tiles are dealt to CTAs where few queries see many keys, so that every CTA gets as many as the others.

A unit is a batch entry and a key/value head. The tiles of a unit follow each other in a line, and so do the units, the
heads of a batch entry first. CTA c of `ctas` takes the tiles of `share`, which are neighbors in the line. What it takes
of one unit is a segment. A segment that is a whole unit gives its results. Every other one gives a partial result. This
lies in slot 2 c + 1 if the CTA begins a unit that it does not end, and in slot 2 c if the CTA goes on with one that it
did not begin. A CTA has one of each at most, so scratch memory does not grow with the batch.

In deterministic calls a row's bits may not depend on other units. Every unit is then cut into portions of a fixed
number of tiles, from its own first tile on, and each portion is a segment. A CTA takes the portions that begin in its
share. A unit has slots for as many portions as S keys can have, next to each other. The combine kernel adds up the
partial results of a unit in order.

Some heads are read side by side: there is a line for each of them. With n lines, a line has every n-th head and every
n-th CTA, and CTAs go the same way along all lines.

Functions run on Python integers as well as on device integers, as in `tiles/plan.py`.
"""

from __future__ import annotations

from typing import Any

Int = Any  # a Python int or a device integer

# At most this share of the CTAs may be left without work, so that heads are read side by side.
_IDLE = 0.04


def share(cta: Int, ctas: Int, total: Int) -> tuple[Int, Int]:
    """Returns the tiles [begin, end) of a CTA, of `total` tiles; the first CTAs have one tile more than the others."""
    each, more = total // ctas, total % ctas
    begin = cta * each + min(cta, more)
    return begin, begin + each + min(max(more - cta, 0), 1)


def owner(tile: Int, ctas: Int, total: Int) -> Int:
    """Returns the CTA whose share has a tile: the inverse of `share`."""
    each, more = total // ctas, total % ctas
    longer = more * (each + 1)  # tiles of the CTAs that have one more
    return min(tile // (each + 1), more) + max(tile - longer, 0) // max(each, 1)


def portions(tiles: Int, portion: Int) -> Int:
    """Returns how many portions a unit has, given its tiles and the tiles of a portion."""
    return (tiles + (portion - 1)) // portion


def portion_end(tile: Int, tiles: Int, portion: Int) -> Int:
    """Returns the tile that the portion with a given tile ends before, in a unit of `tiles` tiles."""
    return min((tile // portion + 1) * portion, tiles)


def heads_side_by_side(heads: int, ctas: int) -> int:
    """Returns how many key/value heads are read side by side: what are neighbors in memory is read at one time.

    It is the largest divisor of `heads` that leaves few CTAs without work.
    """
    return next(n for n in range(heads, 0, -1) if heads % n == 0 and (ctas % n <= _IDLE * ctas or n == 1))
