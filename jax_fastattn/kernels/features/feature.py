# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The hooks of a feature. docs/design.md says which kernels call them, and in which order."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cutlass import Boolean, Float32, Int32, cute

from jax_fastattn.kernels.codes import Code
from jax_fastattn.kernels.features.places import Element, Head, LoadedTile, Logit, ScoreTile
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.tiles.plan import LiveRange


class FeatureArguments(NamedTuple):
    """What a launch has for its features.

    Attributes:
        buffers: operands of features are in `buffers.added`, by name.
        scalars: `Scalars`, or `Sizes` in Hopper's backward kernels.
        scale: the factor, of any sign, from what enters a feature to logits.
        copied_bias: a bias of pairs that the kernel copies to shared memory; None if it copies none.
    """

    spec: KernelSpec
    buffers: Any
    scalars: Any
    scale: Float32
    copied_bias: "Feature | None" = None


@dataclass(frozen=True)
class Feature:
    """What a kernel may be told about scores. A hook that a feature does not define emits nothing.

    Each public method here except `defines` is a hook. Hooks that read return a copy of the feature which holds what
    was read, and are called when

        of                      a launch begins
        start                   a warp comes to a query head
        hold, hold_queries      a lane comes to its two keys or queries
        load                    a tile is in shared memory
        read, preload           a pass over the scores of a tile begins
        end                     all scores of a head's rows are in

    Attributes:
        hides_in_full: whether it may hide all that a row sees, other than by `sees`: tiles without an edge may then be
            hidden.
        sums_plane: whether the gradient of a plane of its numbers is summed, for which it has `partial`.
    """

    hides_in_full: ClassVar[bool] = False
    sums_plane: ClassVar[bool] = False

    @classmethod
    def defines(cls, hook: str) -> bool:
        """Returns whether a feature defines a hook."""
        return getattr(cls, hook) is not getattr(Feature, hook)

    @classmethod
    def of(cls, code: Code, arguments: FeatureArguments) -> "Feature":
        """Returns the feature of a launch whose compile key has a code of this class."""
        raise NotImplementedError

    def start(self, head: Head) -> "Feature":
        """Returns the feature with what it reads once for each query head that a warp comes to."""
        raise NotImplementedError

    def hold(self, key: Int32, live: LiveRange) -> "Feature":
        """Returns the feature with what it reads once for a lane's two keys, where rows of the accumulator are keys.

        Args:
            key: the first one; the other one is 8 rows below.
            live: keys that some query sees. What it reads for others changes nothing.
        """
        raise NotImplementedError

    def hold_queries(self, query: Int32) -> "Feature":
        """Returns the feature with what it reads once for a lane's two queries, where these are rows.

        Args:
            query: the first one; the other one is 8 rows below.
        """
        raise NotImplementedError

    def copy(self, tile: LoadedTile, address: Int32, barrier: cute.Pointer) -> None:
        """Starts bulk copies of a tile to shared memory, of `Code.score_nbytes` a score, in one warp, on a barrier."""
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
        """Returns what becomes of a logit: a logit in base 2 over `unit`."""
        raise NotImplementedError

    def shifted(self, x: Logit, at: Element, less: Float32) -> Logit:
        """Returns what `logit` does, in base 2 and less a number, which joins a product or a term."""
        raise NotImplementedError

    def unit(self) -> Float32:
        """Returns the factor that `logit` leaves to what comes next; without this hook it is 1 (`Logit.plus`)."""
        raise NotImplementedError

    def partial(self, x: Logit, at: Element) -> Float32:
        """Returns the derivative of what `logit` makes by a number of the plane whose gradient is summed."""
        raise NotImplementedError

    def has_wild_slopes(self) -> bool:
        """Returns whether a slope of `logit` may be no number where P is 0; without this hook none is."""
        raise NotImplementedError

    def term(self, at: Element, less: Float32) -> Float32:
        """Returns what `logit` adds to a logit in base 2, less a number, if it adds something and does nothing else."""
        raise NotImplementedError

    def keep(self, at: Element) -> Int32:
        """Returns 16 ones for each of two neighbors in a row, `at` and the next one, that has a part in the output."""
        raise NotImplementedError

    def survival(self) -> Float32:
        """Returns the factor on weights that `keep` keeps; backward passes ask for it once for each query head."""
        raise NotImplementedError

    def sees(self, at: Element) -> Boolean:
        """Returns whether a score counts. A feature with this hook has no full tiles, except for those of lists."""
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
