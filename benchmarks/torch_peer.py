# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-2 by PyTorch's flash backend, as a peer of functions of JAX: same operands, same way of timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch  # noqa: TID253 (peers.py imports this module only where it is asked for)
from refusals import refuse, refuse_alignment
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: TID253 (as above)

from jax_fastattn.cases.case import Case
from jax_fastattn.spec import Operands


@dataclass(frozen=True)
class TorchArray:
    """A tensor `[B, N, T, D]` as an array `[B, T, N, D]`, with what the runner asks of one."""

    tensor: torch.Tensor

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.tensor.numel()

    @property
    def dtype(self) -> np.dtype[Any]:
        """A dtype of the same size."""
        return np.dtype(f"V{self.tensor.element_size()}")

    def block_until_ready(self) -> TorchArray:
        """Waits for the device."""
        if self.tensor.is_cuda:
            torch.cuda.synchronize()
        return self

    def to_jax(self) -> jax.Array:
        """Returns a copy in JAX."""
        self.block_until_ready()
        return jax.dlpack.from_dlpack(self.tensor.detach().transpose(1, 2).contiguous())


def _from_jax(x: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(jax.block_until_ready(x)).transpose(1, 2).detach()


def compiled(
    case: Case, operands: Operands, dout: jax.Array, mode: str
) -> tuple[Callable[..., Any], tuple[TorchArray, ...]]:
    """Returns what is timed and its arguments; the backward pass alone, as in `run.compiled`."""
    refuse(
        case, "bias", "mask", "logits_soft_cap", "sinks", "segments", "documents", "packed", "query_offset", "window"
    )
    refuse(case, "query_seq_lengths", "key_value_seq_lengths", "deterministic", "v_head_dim")
    refuse_alignment(case)
    options = {"is_causal": case.is_causal, "scale": case.scale, "enable_gqa": case.group > 1}
    inputs = [_from_jax(x) for x in operands[:3]]

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*inputs, **options)

    if mode == "forward":

        def forward(*inputs: TorchArray) -> TorchArray:
            with torch.no_grad():
                return TorchArray(attend(*(x.tensor for x in inputs)))

        return forward, tuple(TorchArray(x) for x in inputs)
    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves)

    def backward(dout: TorchArray, *residuals: TorchArray) -> dict[str, TorchArray]:
        del residuals  # held by `out`
        found = torch.autograd.grad(out, leaves, dout.tensor, retain_graph=True)
        return {name: TorchArray(x) for name, x in zip(("query", "key", "value"), found, strict=True)}

    return backward, tuple(TorchArray(x) for x in (_from_jax(dout), *leaves, out))
