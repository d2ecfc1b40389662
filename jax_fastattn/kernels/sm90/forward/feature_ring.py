# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The ring of stages of the forward kernel in which features have what they load for each key tile."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cutlass import Int32, cute

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.places import LoadedTile
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.softmax import ScoreRows
from jax_fastattn.kernels.sm90.forward.state import QueryTile


class LoadedStage(NamedTuple):
    """A stage that a warpgroup has waited for.

    Attributes:
        rows: what becomes of scores, with what features have loaded.
        stage: the stage; None if there are none.
    """

    rows: ScoreRows
    stage: Int32 | None


@dataclass(frozen=True, eq=False)
class FeatureRing:
    """One side's position in the ring. It emits nothing if no feature loads.

    Stages come in the order of key tiles, one for each tile that the CTA visits, with the queries of all warpgroups.

    Attributes:
        shared: tiles and barriers.
        ring: the position; None if no feature loads.
    """

    shared: ForwardShared
    ring: wgmma.Ring | None

    @classmethod
    def start(cls, shared: ForwardShared) -> "FeatureRing":
        """Returns the position before the first tile."""
        table, barriers = shared.regions.table, shared.regions.barriers
        if stages.NAME not in table:
            return cls(shared, None)
        full, empty = barriers[f"{stages.NAME}_full"], barriers[f"{stages.NAME}_empty"]
        return cls(shared, wgmma.Ring(full, empty, table[stages.NAME].count))

    def producer_load(self, score: Score, tile: QueryTile, index: Int32) -> None:
        """Loads the next stage for a key tile, in the producer."""
        if self.ring is None:
            return

        def copy(index: Int32, stage: Int32, barrier: cute.Pointer) -> None:
            score.copy(self._loaded(tile, index), self.shared.regions.stage(stages.NAME, stage), barrier)

        config = tile.config
        self.ring.producer_load(copy, index, stages.loaded_nbytes(score.features, config.rows, config.keys))

    def consumer_wait(self, rows: ScoreRows, tile: QueryTile, index: Int32) -> LoadedStage:
        """Waits for the next stage, that of a key tile, in a consumer."""
        if self.ring is None:
            return LoadedStage(rows, None)
        stage = self.ring.consumer_wait()
        score = rows.score.load(self._loaded(tile, index), self.shared.regions.stage(stages.NAME, stage))
        return LoadedStage(replace(rows, score=score), stage)

    def consumer_release(self, loaded: LoadedStage) -> None:
        """Gives a stage back."""
        if self.ring is not None:
            self.ring.consumer_release(loaded.stage)

    def pass_by(self) -> None:
        """Lets the stage of a tile go by that only other warpgroups see."""
        if self.ring is not None:
            self.ring.consumer_release(self.ring.consumer_wait())

    def make_uniform(self) -> None:
        """See `wgmma.Ring.make_uniform`."""
        if self.ring is not None:
            self.ring.make_uniform()

    def _loaded(self, tile: QueryTile, index: Int32) -> LoadedTile:
        config = tile.config
        return LoadedTile(tile.score_head, tile.row, index * config.keys, config.rows, config.keys)
