# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Backward attention with TMA and WGMMA, after a pass over memory for the statistics of the rows.

Up to head dim 128 one key-stationary kernel computes dk, dv and dq. The five products run once. All CTAs add to float32
sums of dq, and the last CTA to add rounds them. With `spec.ordered` they add in one order; without it in any, so that
the last bits differ from run to run. Over head dim 128, and with operands in two terms, dq has a query-stationary
kernel: there are seven products, no sums in memory, and the same bits in every run.

Each kernel lets the next one begin before it ends (programmatic dependent launch), as soon as what that one cannot wait
for by itself is written: CTAs of the next one take the SMs that have nothing left to do. The last kernel ends after the
one before it, so that the launch after it waits for both.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
from cutlass import cute

from jax_fastattn.kernels.arguments.buffers import Buffers
from jax_fastattn.kernels.arguments.scalars import Scalars
from jax_fastattn.kernels.device.launch import Launch, start_all
from jax_fastattn.kernels.key import KernelSpec
from jax_fastattn.kernels.sm90.backward.config import BackwardConfigs
from jax_fastattn.kernels.sm90.backward.dbias.kernel import DbiasKernel
from jax_fastattn.kernels.sm90.backward.dkdv.kernel import DkdvKernel
from jax_fastattn.kernels.sm90.backward.dkdv_dq.kernel import DkdvDqKernel
from jax_fastattn.kernels.sm90.backward.dq.kernel import DqKernel
from jax_fastattn.kernels.sm90.backward.preprocess import PreprocessKernel
from jax_fastattn.kernels.sm90.query_order import HeadOrder


class HeadOrders(NamedTuple):
    """Holds the orders of heads for the kernels that work on tiles of keys, and for the dq kernel if there is one."""

    keys: HeadOrder
    queries: HeadOrder | None


class BackwardKernel:
    """Launches the backward kernels of one compile key."""

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        config: BackwardConfigs = spec.config
        self.main = (DkdvDqKernel if config.adds_dq else DkdvKernel)(spec)
        self.preprocess = PreprocessKernel(spec)
        if not config.adds_dq:
            self.dq = DqKernel(spec)
        if spec.sums_dbias:
            self.dbias = DbiasKernel(spec)

    @cute.jit
    def __call__(self, buffers: Buffers, scalars: Scalars, stream: cuda.CUstream):
        """Launches the kernels."""
        start_all(self.launches(buffers, scalars, self.orders(scalars)), stream)

    def orders(self, scalars: Scalars) -> HeadOrders:
        """Returns the orders in which the kernels work on heads."""
        keys = self.preprocess.order(scalars, self.main.common.schedule.order(scalars))
        return HeadOrders(keys, None if self.spec.config.adds_dq else self.dq.schedule.order(scalars))

    def launches(self, buffers: Buffers, scalars: Scalars, orders: HeadOrders) -> list[Launch]:
        """Returns what is launched, in order."""
        launches = self.preprocess.launches(buffers, scalars, orders.keys)
        if orders.queries is not None:
            launches.append(self.dq.launch(buffers, scalars, orders.queries))
        launches.append(self.main.launch(buffers, scalars, orders.keys))
        return [*launches, self.dbias.launch(buffers, scalars)] if self.spec.sums_dbias else launches
