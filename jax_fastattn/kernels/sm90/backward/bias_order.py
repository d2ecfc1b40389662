# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which heads should be worked on together in the backward pass since they share a bias of pairs."""

from cutlass import Int32

from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device import ptx
from jax_fastattn.kernels.key import KernelSpec

# L2 keeps a bias of up to this many bytes from one batch entry to the next.
RESIDENT_BIAS = 16 << 20


def entries_together(spec: KernelSpec, scalars: Scalars) -> Int32 | None:
    """Returns how many batch entries have heads that come together, see `HeadOrder.sharing`."""
    if not spec.matrix_bias:
        return None
    row_nbytes = scalars.bias_pitch * (2 * spec.bias_terms)
    # A bias is large if its planes have more rows than `RESIDENT_BIAS` holds.
    is_large = scalars.query_length > RESIDENT_BIAS // row_nbytes // scalars.bias_planes
    entries = ptx.where(is_large, scalars.batch, Int32(1))
    return ptx.where(scalars.bias_batch == 0, entries, Int32(1))
