# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The warp of the forward kernel that loads Q, K and V, in the order in which the consumers take them."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from jax_fastattn.kernels.device import wgmma
from jax_fastattn.kernels.sm90.forward.feature_ring import FeatureRing
from jax_fastattn.kernels.sm90.forward.key_bias import copy_with_keys
from jax_fastattn.kernels.sm90.forward.shared import ForwardShared
from jax_fastattn.kernels.sm90.forward.state import Call, QueryTile
from jax_fastattn.kernels.sm90.geometry import WARPGROUP_ROWS


@dataclass(frozen=True, eq=False)
class ForwardProducer:
    """Emits the warp's code.

    Attributes:
        ring: the warp's position in the ring of K and V.
        features: its position in the ring of what features load.
        query_phase: phase of the barriers on which the consumers give Q back.
    """

    call: Call
    shared: ForwardShared
    ring: wgmma.Ring
    features: FeatureRing
    query_phase: wgmma.Uniform

    @classmethod
    def start(cls, call: Call, shared: ForwardShared) -> "ForwardProducer":
        """Returns the role with its registers."""
        ring = wgmma.Ring(shared.full, shared.empty, call.config.stages)
        query_phase = wgmma.Uniform(Int32(1))
        return cls(call, shared, ring, FeatureRing.start(shared), query_phase)

    def run(self) -> None:
        """Loads everything for all tiles of queries of the CTA."""
        self.call.each_tile(self.load)

    def load(self, tile: QueryTile) -> None:
        """Loads Q of a tile, and the key tiles that it visits: the last K before Q, all others after it."""
        config, memory, tma, shared = self.call.config, self.call.memory, self.call.tma, self.shared
        visit, last = tile.visit, tile.visit.end - 1
        copy_query = tma.query.copy_terms(shared.query, tile.head, tile.queries)
        copy_key = tma.key.copy_terms(shared.key, tile.kv_head, tile.keys)
        copy_key, key_nbytes = copy_with_keys(self.call, shared, tile, copy_key)
        copy_value = tma.value.copy_terms(shared.value, tile.kv_head, tile.keys)
        value_nbytes = memory.tile_nbytes(config.keys, memory.v_head_dim)

        def load_key(index: Int32) -> None:
            self.ring.producer_load(copy_key, visit.tile(index), key_nbytes)

        def load_features(index: Int32) -> None:
            self.features.producer_load(self.call.score, tile, visit.tile(index))

        def load_value(index: Int32) -> None:
            self.ring.producer_load(copy_value, visit.tile(index), value_nbytes)

        def load_step(i: Int32) -> None:
            # With overlap, a consumer takes K of the next tile before V of this one.
            if config.overlap_qk_pv:
                load_key(last - 1 - i)
                load_features(last - 1 - i)
                load_value(last - i)
            else:
                load_value(last - i)
                load_key(last - 1 - i)
                load_features(last - 1 - i)

        def load_rest() -> None:
            load_features(last)
            wgmma.loop(last - visit.begin, load_step)
            load_value(visit.begin)

        some = visit.begin < visit.end
        cutlass.if_generate(some, lambda: load_key(last))
        for group in range(config.warpgroups):
            barrier = shared.query_full + group
            if config.persistent:
                wgmma.wait(shared.query_empty + group, self.query_phase[0])
            wgmma.expect(barrier, memory.tile_nbytes(WARPGROUP_ROWS, memory.head_dim))
            copy_query(tile.index * config.warpgroups + group, group, barrier)
        self.query_phase[0] = self.query_phase[0] ^ 1
        cutlass.if_generate(some, load_rest)
