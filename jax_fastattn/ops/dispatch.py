# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs: asked when a call is lowered for CUDA, and by `explain`."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import jax

from jax_fastattn import ffi
from jax_fastattn.kernels.support import describe_kernels, unsupported_reasons
from jax_fastattn.spec import Problem

# From how many keys on, and up to which share of a GPU's multiprocessors, one query takes the XLA path; see
# `faster_on_xla`.
ONE_QUERY_KEYS = 4096
ONE_QUERY_SHARE = 1 / 8


@dataclass(frozen=True)
class Explanation:
    """What a call would run, and why.

    Attributes:
        implementation: "cuda" or "xla".
        kernel: families of the CUDA kernels, such as "sm90 forward, sm80 backward"; None on the XLA path.
        tile: tile sizes of forward and backward, in words; None on the XLA path.
        reasons: why the CUDA kernels are not taken, each one; empty if they are.
    """

    implementation: str
    kernel: str | None
    tile: str | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        if self.implementation == "cuda":
            return f"CUDA kernels {self.kernel} ({self.tile})"
        return "XLA path, because " + "; ".join(self.reasons)


def cuda_reasons(problem: Problem) -> list[str]:
    """Every reason against the CUDA kernels for a call that is lowered for CUDA."""
    missing = ffi.missing_parts()
    arch = None if missing else ffi.arch()
    return missing + [reason for reason in unsupported_reasons(problem, arch) if arch or "architecture" not in reason]


def faster_on_xla(problem: Problem, multiprocessors: int) -> str | None:
    """Says why the XLA path is the faster one for a call that the kernels can run; None if it is not.

    A kernel gives all keys of a key/value head to one CTA for each tile of queries. One query over few heads leaves
    most multiprocessors idle, whereas XLA splits the keys. This holds for calls that read every key: XLA reads those
    that lengths or a window hide, too.
    """
    heads = problem.batch * problem.num_kv_heads
    reads_all = problem.spec.bounds == (None, None) and "key_value_seq_lengths" not in problem.spec.present
    few = problem.query_length == 1 and heads <= ONE_QUERY_SHARE * multiprocessors
    if not (reads_all and few and problem.key_length >= ONE_QUERY_KEYS):
        return None
    return (
        f"the XLA path is faster: one query over {heads} key/value heads, batch included, keeps {heads} of "
        f"{multiprocessors} multiprocessors busy in the kernels; XLA splits the {problem.key_length} keys"
    )


def takes_cuda(problem: Problem) -> bool:
    """Whether a call that is lowered for CUDA runs the kernels.

    Raises:
        NotImplementedError: the caller insisted on them, and they cannot; names every reason.
    """
    implementation = problem.spec.implementation
    if implementation == "xla" or problem.is_empty:
        return False
    reasons = cuda_reasons(problem)
    if reasons and implementation == "cuda":
        raise _refusal(reasons)
    if reasons:
        _warn_once("; ".join(reasons))
        return False
    return implementation == "cuda" or faster_on_xla(problem, ffi.multiprocessors()) is None


def refuse_platform(problem: Problem) -> None:
    """Raises when the caller insists on CUDA kernels and the call is lowered for another platform."""
    if problem.spec.implementation == "cuda":
        raise _refusal(["the platform is not CUDA", *unsupported_reasons(problem, "sm_80")])


def explain(problem: Problem) -> Explanation:
    """What `attention` would do with `problem` on the GPU that `ffi.target_arch` names, else on the default backend."""
    if problem.spec.implementation == "xla":
        reasons = ['`implementation` is "xla"']
    elif problem.is_empty:
        reasons = ["there is nothing to compute: a size is 0"]
    elif ffi.named_arch() is None and jax.default_backend() not in ("gpu", "cuda"):
        reasons = [f"the platform is {jax.default_backend()}", *unsupported_reasons(problem, "sm_80")]
    else:
        reasons = cuda_reasons(problem)
        slower = (
            None if reasons or problem.spec.implementation == "cuda" else faster_on_xla(problem, ffi.multiprocessors())
        )
        reasons = reasons if slower is None else [slower]
    if reasons:
        return Explanation("xla", None, None, tuple(reasons))
    return Explanation("cuda", *describe_kernels(problem, ffi.arch() or ""), ())


def _refusal(reasons: list[str]) -> NotImplementedError:
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    return NotImplementedError(
        f'implementation="cuda" cannot run this call:{listed}\nimplementation=None falls back to the XLA path.'
    )


@functools.lru_cache(maxsize=1024)  # a new head dim is a new reason
def _warn_once(reasons: str) -> None:
    warnings.warn(
        f"jax_fastattn takes the XLA path, which is slower than its CUDA kernels: {reasons}. "
        'Pass implementation="xla" to accept that without this warning.',
        stacklevel=2,
    )
