# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The rings of stages of the forward kernel in which features have what they load for each key tile."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cutlass import Int32

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.features import stages
from jax_fastattn.kernels.features.places import LoadedTile
from jax_fastattn.kernels.score import Score
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.softmax import ScoreRows
from jax_fastattn.kernels.sm90.forward.state import QueryTile
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


class LoadedStage(NamedTuple):
    """Holds a stage that a warpgroup has waited for.

    Attributes:
        rows: what becomes of scores, with what features have loaded.
        stage: the stage; None if there are none.
    """

    rows: ScoreRows
    stage: Int32 | None


@dataclass(frozen=True, eq=False)
class FeatureRing:
    """Holds one side's position in the rings. It emits nothing if no feature loads.

    Each warpgroup has a ring with its own queries, so that it gives stages back without waiting for others. Stages come
    in the order of key tiles, one for each tile that the CTA visits.

    Attributes:
        at: stage and phase, the same in all rings of the producer; None if no feature loads.
        group: the warpgroup; the producer has all.
    """

    shared: ForwardShared
    at: wgmma.Uniform | None
    group: Int32

    @classmethod
    def start(cls, shared: ForwardShared, group: Int32 | None = None) -> "FeatureRing":
        """Returns the position before the first tile, of a warpgroup or by default of the producer."""
        loads = stages.NAME in shared.regions.table
        at = wgmma.Uniform(Int32(0), Int32(0)) if loads else None
        return cls(shared, at, Int32(0) if group is None else group)

    def producer_load(self, score: Score, tile: QueryTile, index: Int32) -> None:
        """Loads the next stage of each warpgroup for a key tile, in the producer."""
        if self.at is None:
            return
        config, nbytes = tile.config, score.loaded_nbytes(WARPGROUP_ROWS, tile.config.keys)
        stage, phase = self.at[0], self.at[1] ^ 1
        wgmma.advance(self.at, stages.RING_STAGES)
        for group in range(config.warpgroups):
            own = stage + group * stages.RING_STAGES
            full = self.shared.regions.barriers[f"{stages.NAME}_full"] + own
            wgmma.wait(self.shared.regions.barriers[f"{stages.NAME}_empty"] + own, phase)
            wgmma.expect(full, nbytes)
            loaded = self._loaded(tile, index, tile.row + group * WARPGROUP_ROWS)
            score.copy(loaded, self.shared.regions.stage(stages.NAME, own), full)

    def consumer_wait(self, rows: ScoreRows, tile: QueryTile, index: Int32) -> LoadedStage:
        """Waits in a consumer for the next stage, which holds what is loaded for a key tile."""
        if self.at is None:
            return LoadedStage(rows, None)
        stage, own_row = self._wait(), tile.row + self.group * WARPGROUP_ROWS
        loaded = self._loaded(tile, index, own_row)
        score = rows.score.load(loaded, self.shared.regions.stage(stages.NAME, stage))
        return LoadedStage(replace(rows, score=score), stage)

    def consumer_release(self, loaded: LoadedStage) -> None:
        """Gives a stage back."""
        if loaded.stage is not None:
            wgmma.release(self.shared.regions.barriers[f"{stages.NAME}_empty"] + loaded.stage)

    def pass_by(self) -> None:
        """Lets the stage of a tile go by that only other warpgroups see."""
        if self.at is not None:
            wgmma.release(self.shared.regions.barriers[f"{stages.NAME}_empty"] + self._wait())

    def make_uniform(self) -> None:
        """Makes its positions warp-uniform; see `wgmma.Ring.make_uniform`."""
        if self.at is not None:
            self.at.make_uniform()

    def _wait(self) -> Int32:
        """Waits for the warpgroup's next stage and returns its index among the stages of all warpgroups."""
        assert self.at is not None
        stage, phase = self.at[0] + self.group * stages.RING_STAGES, self.at[1]
        wgmma.advance(self.at, stages.RING_STAGES)
        wgmma.wait(self.shared.regions.barriers[f"{stages.NAME}_full"] + stage, phase)
        return stage

    def _loaded(self, tile: QueryTile, index: Int32, row: Int32) -> LoadedTile:
        keys = tile.config.keys
        return LoadedTile(tile.score_head, row, index * keys, WARPGROUP_ROWS, keys)
