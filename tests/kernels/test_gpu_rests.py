# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`precise_gradients` on a GPU, by the kernels of both families: errors of dq and dk of peaked weights."""

from __future__ import annotations

import jax
import pytest
from testing import peaked
from testing.borrow import portable_forward, portable_kernel

from jax_fastattn.ops.cuda import passes as cuda

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["own", "portable"])
@pytest.mark.parametrize("name", peaked.CALLS)
def test_errors_of_peaked_weights(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "portable":
        monkeypatch.setattr(cuda, "kernel_spec", portable_kernel)
        monkeypatch.setattr(cuda, "forward_spec", portable_forward)
    call = peaked.CALLS[name]
    with jax.numpy_dtype_promotion("standard"):
        without, precise = peaked.errors(call, *peaked.draw(call), on_gpu=True)
    assert max(x / y for x, y in zip(precise, without, strict=True)) < peaked.SHARE, (precise, without)
