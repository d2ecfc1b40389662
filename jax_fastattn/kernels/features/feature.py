# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The hooks of a feature. docs/design.md says which kernels call them, and in which order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.arguments.buffers import Buffer
from jax_fastattn.kernels.features.places import Element, Head, LoadedTile, Logit, ScoreTile
from jax_fastattn.kernels.tiles.plan import LiveRange


@dataclass(frozen=True)
class Feature:
    """What a kernel may be told about scores. A hook that a feature does not define emits nothing.

    An instance in `KernelSpec.programs` is hashable, has a `repr` that says what it computes, and holds no device
    value. `bind`, `start` and `end` return a copy that holds some.

    Attributes:
        hides_in_full: whether it may hide all that a row sees, other than by `sees`: tiles without an edge may then be
            hidden.
    """

    hides_in_full: ClassVar[bool] = False

    @classmethod
    def defines(cls, hook: str) -> bool:
        """Returns whether a feature defines a hook."""
        return getattr(cls, hook) is not getattr(Feature, hook)

    @property
    def changes_logits(self) -> bool:
        """Whether a logit is not a factor times the product q . k."""
        return self.defines("logit")

    @property
    def has_rule(self) -> bool:
        """Whether it hides scores one by one."""
        return self.defines("sees")

    def buffers(self) -> Mapping[str, Buffer]:
        """Returns the operands that it adds to a launch, by name."""
        raise NotImplementedError

    def bind(self, buffers: Any) -> "Feature":
        """Returns the feature with the addresses of a launch."""
        raise NotImplementedError

    def start(self, head: Head) -> "Feature":
        """Returns the feature with what it reads once for each query head that a warp comes to."""
        raise NotImplementedError

    def hold(self, key: Int32, live: LiveRange) -> "Feature":
        """Returns the feature with what it reads once for a lane's two keys, where rows of the accumulator are keys.

        Args:
            key: the first one; the other one is 8 further.
            live: keys that some query sees. What it reads for others changes nothing.
        """
        raise NotImplementedError

    def hold_queries(self, query: Int32) -> "Feature":
        """Returns the feature with what it reads once for a lane's two queries, where these are rows.

        Args:
            query: the first one; the other one is 8 further.
        """
        raise NotImplementedError

    def stage_nbytes(self, queries: int, keys: int) -> int:
        """Returns how many bytes it loads for each tile of scores `[queries, keys]`, a multiple of 16."""
        raise NotImplementedError

    def copy(self, tile: LoadedTile, address: Int32, barrier: cute.Pointer) -> None:
        """Starts bulk copies of these bytes to an address in shared memory, in one warp, on a barrier."""
        raise NotImplementedError

    def load(self, tile: LoadedTile, address: Int32) -> "Feature":
        """Returns the feature with what it has loaded for a tile, which stays there until the tile is done."""
        raise NotImplementedError

    def read(self, tile: ScoreTile) -> "Feature":
        """Returns the feature for one pass over the scores of a tile, in which it may read each number once."""
        raise NotImplementedError

    def preload(self, tile: ScoreTile) -> "Feature":
        """Returns the feature with all that a pass reads in registers, before it begins; see `read`."""
        raise NotImplementedError

    def logit(self, x: Logit, at: Element) -> Logit:
        """Returns what becomes of a logit. A program leaves no factor, since others follow (`Logit.plus`)."""
        raise NotImplementedError

    def term(self, at: Element, less: Float32) -> Float32:
        """Returns what `logit` adds to a logit in base 2, less a number, if it adds something and does nothing else."""
        raise NotImplementedError

    def sees(self, at: Element) -> Boolean:
        """Returns whether a score counts. A feature with this hook has no full tiles: each is an edge."""
        raise NotImplementedError

    def end(self, head: Head) -> "Feature":
        """Returns the feature with what it reads once the scores of a head's rows are all in, for `finish_row`."""
        raise NotImplementedError

    def shift_row(self, maximum: Float32, total: Float32, row: Int32) -> tuple[Float32, Float32]:
        """Returns a row's maximum logit in base 2, and its denominator relative to that, before `finish_row`."""
        raise NotImplementedError

    def finish_row(self, maximum: Float32, total: Float32) -> tuple[Float32, Float32, Float32]:
        """Returns a row's maximum logit in base 2, its denominator relative to that, and a factor on its output."""
        raise NotImplementedError
