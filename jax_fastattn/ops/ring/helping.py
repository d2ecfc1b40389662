# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The steps of a causal ring over contiguous rows, in which devices that would have nothing to do help others.

Under a causal mask device i needs the keys of devices 0 to i. In step s it computes q_i with k_{i - s}, which arrives.
A device i < s has no such block. It helps device i - s + n: it computes q_{i - s + n}, which arrives, with its own k_i,
and sends the result home. All devices have equal work, and n // 2 steps are enough. If n is even, the last step has
half as many blocks as devices, so that a block has two devices: the helper computes the first half of its queries.

    n = 4       opening         step 1          step 2                      closing
    device 0    q0 with k0      q3 with k0      first half of q2 with k0    q0 with k0
    device 1    q1 with k1      q1 with k0      first half of q3 with k1    q1 with k1
    device 2    q2 with k2      q2 with k1      second half of q2 with k0   q2 with k2
    device 3    q3 with k3      q3 with k2      second half of q3 with k1   q3 with k3

Opening and closing are two parts of the block of a device's own rows. While the first one runs, the operands of step 1
arrive; while the second one runs, the results of the last step go home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_fastattn.ops.ring.blocks import BlockPlace
from jax_fastattn.ops.ring.permute import permute_during
from jax_fastattn.ops.ring.plan import Block, View
from jax_fastattn.ring import Ring
from jax_fastattn.spec import AttentionSpec, Operands

Arrays = dict[str, jax.Array]

OF_QUERIES, OF_KEYS = ("query", "query_segment_ids"), ("key", "value", "key_value_segment_ids")

# The number of rows of the opening is a multiple of this, and so a whole number of most tiles.
_TILE = 128


def balances(spec: AttentionSpec, operands: Operands) -> bool:
    """Returns whether devices help each other: rows are contiguous, and only causality hides keys.

    Packed rows are left out: most documents lie on one device, and what a step has to do depends on the documents.
    """
    ring, rows = spec.ring, operands.query.shape[1]
    assert ring is not None
    has_rows = any(x is not None and x.shape[2] > 1 for x in (operands.bias, operands.mask))
    is_causal = spec.bounds == (None, 0) and not {"query_offset", "sequences"} & {*spec.present}
    return (
        ring.balance
        and ring.size > 1
        and not ring.whole_keys
        and is_causal
        and not has_rows
        and rows == operands.key.shape[1]
        # Blocks then begin at multiples of 16 rows, which kernels with dropout need.
        and rows % (32 if "dropout" in spec.present else 2) == 0
    )


def own_blocks(rows: int) -> tuple[Block, Block]:
    """Returns opening and closing. Both see about as many pairs: 0.7 of the rows see half of a causal block."""
    first = rows * 7 // 10 // _TILE * _TILE or rows // 2
    opening, closing = View(0, first), View(first, rows)
    # Counted from its first row, the closing sees `first` more keys.
    return (
        Block(opening, opening, (0,), (0,), (None, 0), is_diagonal=True),
        Block(closing, View(0, rows), (0,), (0,), (None, first), is_diagonal=True),
    )


def steps(ring: Ring, rows: int) -> list[HelpStep]:
    """Returns the steps between opening and closing, of devices with `rows` rows each."""
    return [HelpStep(ring, shift, rows) for shift in range(1, ring.size // 2 + 1)]


class Travelers(NamedTuple):
    """Arrays by name, with an axis of queries, or of keys, on axis 1."""

    queries: Arrays
    keys: Arrays

    @classmethod
    def of(cls, operands: Operands, rows: Arrays | None = None) -> Travelers:
        """Returns the travelers among the operands of a device, and other arrays of its queries."""
        queries, keys = (
            {name: x for name in names if (x := getattr(operands, name)) is not None} for names in (OF_QUERIES, OF_KEYS)
        )
        return cls(queries | (rows or {}), keys)


@dataclass(frozen=True)
class HelpStep:
    """A step in which `shift` devices help as many others.

    Attributes:
        ring: the devices.
        shift: each device sends to the device this many places after it, and receives from the one as many before it.
        rows: how many queries, and how many keys, a device has.
    """

    ring: Ring
    shift: int
    rows: int

    @property
    def is_shared(self) -> bool:
        """Returns whether two devices compute a block, each one half of its queries."""
        return 2 * self.shift == self.ring.size

    @property
    def block(self) -> Block:
        """Returns the block of each device. All of its queries see all of its keys."""
        rows = self.rows // 2 if self.is_shared else self.rows
        return Block(View(0, rows), View(0, self.rows), (0,), (0,), (None, None))

    @property
    def there(self) -> list[tuple[int, int]]:
        """Returns pairs of devices that send operands and receive them."""
        return [(device, (device + self.shift) % self.ring.size) for device in range(self.ring.size)]

    @property
    def home(self) -> list[tuple[int, int]]:
        """Returns pairs of devices that send results and receive them. Devices that help come first."""
        return [(target, source) for source, target in self.there[-self.shift :] + self.there[: -self.shift]]

    def helps(self) -> jax.Array:
        """Returns whether this device computes queries of another one."""
        return self._device() < self.shift

    def is_helped(self) -> jax.Array:
        """Returns whether another device computes queries of this one."""
        return self._device() >= self.ring.size - self.shift

    def place(self) -> BlockPlace:
        """Returns where the block of this device lies."""
        device, helps = self._device(), self.helps()
        owner = jnp.where(helps, device - self.shift + self.ring.size, device)
        source = jnp.where(helps, device, device - self.shift)
        return BlockPlace(
            owner, source, self.rows, self.rows, 0, jnp.where(helps, 0, self.rows - self.block.queries.stop)
        )

    def fetch(self, own: Travelers, results: Any) -> tuple[Travelers, Any]:
        """Returns what arrives for the block, read as queries and as keys, and the results of a kernel.

        Args:
            own: rows of this device.
            results: the results of the kernel that runs meanwhile.
        """
        helped = {name: self.block.queries.take(x) for name, x in own.queries.items()}
        groups = list(own.keys.values()), list(helped.values())
        (keys, queries), results = permute_during(self.ring, groups, self.there, results, is_second=self.is_helped())
        return Travelers(dict(zip(helped, queries, strict=True)), dict(zip(own.keys, keys, strict=True))), results

    def choose(self, own: Travelers, arrived: Travelers) -> Travelers:
        """Returns queries and keys of the block: one of both is this device's, and the other one has arrived."""
        kept, helps = View(self.rows - self.block.queries.stop, self.rows), self.helps()
        return Travelers(
            {name: jnp.where(helps, x, kept.take(own.queries[name])) for name, x in arrived.queries.items()},
            {name: jnp.where(helps, own.keys[name], x) for name, x in arrived.keys.items()},
        )

    def _device(self) -> jax.Array:
        return jax.lax.axis_index(self.ring.axes).astype(jnp.int32)
