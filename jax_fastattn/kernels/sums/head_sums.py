# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The sums over queries that kernels which compute dk keep for a launch."""

from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sums.key_sums import KeySums
from jax_fastattn.kernels.sums.plane_means import PlaneSums
from jax_fastattn.kernels.sums.sums import HeadSums


def head_sums(spec: KernelSpec, m_blocks: int, n_blocks: int) -> tuple[HeadSums, ...]:
    """Returns the registers of a lane for each gradient that is asked for.

    The accumulator of dS has `m_blocks` of 16 keys and `n_blocks` of 8 queries.
    """
    if not spec.dkey_bias:
        return ()
    sums = KeySums.start(m_blocks, n_blocks)
    return (PlaneSums.start(sums, spec.mean_slope) if spec.has_row_means else sums,)
