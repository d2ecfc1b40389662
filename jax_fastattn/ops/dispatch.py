# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The choice of an implementation, made when a call is lowered for CUDA and reported by `explain`."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Collection
from dataclasses import dataclass

import jax

from jax_fastattn import ffi
from jax_fastattn.kernels.arguments.precision import PRODUCTS_IN_WORDS, rule
from jax_fastattn.kernels.choose import configured, forward_spec, kernel_spec, reads_pages
from jax_fastattn.kernels.decode.config import DecodeConfig
from jax_fastattn.kernels.sums.out_rests import describe_rests
from jax_fastattn.kernels.support import (
    Reason,
    describe_kernels,
    describe_lists,
    describe_portable_split,
    gradient_reasons,
    speed_note,
    tangent_reasons,
    unsupported_reasons,
)
from jax_fastattn.ops import call_sites
from jax_fastattn.spec import Problem

# This is why second derivatives take the XLA path in every call.
NO_SECOND_DERIVATIVES = (
    "no kernel computes second derivatives; outputs, gradients and tangents (forward mode) still run the kernels"
)

# `explain` also says this of a paged call.
READ_PAGES = "the pages are read where they lie; there is no gradient"
GATHERED_PAGES = "the pages are first gathered into dense keys and values, which takes a copy; there is no gradient"


@dataclass(frozen=True)
class Explanation:
    """The implementation that a call would run, and the reasons.

    Attributes:
        implementation: "cuda" or "xla".
        kernel: families of the CUDA kernels, such as "sm90 forward, sm90 backward", or "sm90 decode" alone for pages,
            which have no gradient; None on the XLA path.
        tile: tile sizes of these kernels, in words; None on the XLA path.
        variant: which kernels of the families run, how dq is added up, and the products of float32 operands with their
            error class and the rule that chose them, in words; None on the XLA path.
        reasons: every reason why the CUDA kernels are not taken; empty if they are.
        advice: the reasons in one text, each with what to do instead; empty if the CUDA kernels are taken.
        note: caveats about the speed of the CUDA kernels on some GPUs, what is done with pages, what travels if a mesh
            splits the rows, and how `score_mod` and `mask_mod` were understood; else empty.
    """

    implementation: str
    kernel: str | None
    tile: str | None
    variant: str | None
    reasons: tuple[str, ...]
    advice: str
    note: str = ""

    def __str__(self) -> str:
        if self.implementation == "cuda":
            text = f"CUDA kernels {self.kernel} ({self.tile}; {self.variant})"
        else:
            text = "XLA path, because " + self.advice
        return f"{text}; {self.note}" if self.note else text


def cuda_reasons(problem: Problem) -> list[Reason]:
    """Returns every reason against the CUDA kernels for a call that is lowered for CUDA.

    Raises:
        NotImplementedError: symbolic sizes are the only reason. The slower path would replace kernels in every program
            that is exported then, so the caller has to ask for it.
    """
    missing = ffi.missing_parts()
    arch = None if missing else ffi.arch()
    missing += ffi.compiler_reasons(arch)
    found = [Reason("installation", text) for text in missing]
    found += [reason for reason in unsupported_reasons(problem, arch) if arch or reason.kind != "architecture"]
    if [reason.kind for reason in found] == ["symbolic"]:
        raise NotImplementedError(f"jax_fastattn's CUDA kernels cannot run this call: {found[0]}.")
    return found


def has_kernels(problem: Problem, wanted: Collection[str] = ()) -> bool:
    """Returns whether a call that is lowered for CUDA runs the kernels, and neither warns nor raises.

    Args:
        wanted: the operands whose gradients are computed; none for a forward pass.
    """
    sizes_are_known = not problem.is_empty and not problem.symbolic_sizes
    reasons = gradient_reasons(problem, wanted)
    return problem.spec.implementation != "xla" and sizes_are_known and not (cuda_reasons(problem) or reasons)


def takes_cuda(problem: Problem, wanted: Collection[str] = ()) -> bool:
    """Returns whether a call that is lowered for CUDA runs the kernels; see `has_kernels`.

    Raises:
        NotImplementedError: `implementation` is "cuda" and no kernel can run the call; the message lists every reason.
    """
    implementation = problem.spec.implementation
    if implementation == "xla" or problem.is_empty:
        return False
    reasons = cuda_reasons(problem) + gradient_reasons(problem, wanted)
    if reasons and implementation == "cuda":
        raise _refusal(reasons)
    # The XLA path is what a caller has asked for who sets such a precision.
    if reasons and all(reason.kind != "precision" for reason in reasons):
        _warn_once(problem, reasons)
    return not reasons


def takes_tangent_kernel(problem: Problem) -> bool:
    """Returns whether a tangent that is lowered for CUDA runs a kernel; warns if the call alone does.

    Raises:
        NotImplementedError: `implementation` is "cuda" and no kernel can run the tangent.
    """
    if not takes_cuda(problem):
        return False
    reasons = tangent_reasons(problem, ffi.arch())
    if not reasons:
        return True
    causes = " and ".join(reason.text for reason in reasons)
    text = f"no kernel computes tangents (forward mode) of this call: {causes}; outputs and gradients still run kernels"
    _note_derivative(problem, Reason("derivative", text))
    return False


def note_second_derivative(problem: Problem) -> None:
    """Warns of a second derivative that is lowered for CUDA, if the call itself runs the kernels.

    Raises:
        NotImplementedError: `implementation` is "cuda".
    """
    _note_derivative(problem, Reason("derivative", NO_SECOND_DERIVATIVES))


def _note_derivative(problem: Problem, reason: Reason) -> None:
    if problem.spec.implementation == "cuda" and not problem.is_empty:
        raise _refusal([reason])
    if takes_cuda(problem):
        _warn_once(problem, [reason])


def refuse_platform(problem: Problem) -> None:
    """Raises when the caller insists on CUDA kernels and the call is lowered for another platform."""
    if problem.spec.implementation == "cuda":
        raise _refusal([Reason("platform", "the platform is not CUDA"), *unsupported_reasons(problem, "sm_80")])


def explain(problem: Problem) -> Explanation:
    """Returns what would run `problem` on the GPU that `ffi.target_arch` names, else on the default backend."""
    if not problem.page:
        return _explain(problem)
    step = problem if reads_pages(problem) else dataclasses.replace(problem, page=0, pages=0)
    found = _explain(step, has_gradient=False)
    is_read = found.implementation == "cuda" and reads_pages(problem)
    return with_note(found, READ_PAGES if is_read else GATHERED_PAGES)


def _explain(problem: Problem, *, has_gradient: bool = True) -> Explanation:
    if problem.spec.implementation == "xla":
        reasons = [Reason("implementation", '`implementation` is "xla"')]
    elif problem.is_empty:
        reasons = [Reason("empty", "there is nothing to compute: a size is 0")]
    elif ffi.named_arch() is None and jax.default_backend() not in ("gpu", "cuda"):
        platform = Reason("platform", f"the platform is {jax.default_backend()}")
        reasons = [platform, *unsupported_reasons(problem, "sm_80")]
    else:
        reasons = cuda_reasons(problem)
    if reasons:
        texts = tuple(reason.text for reason in reasons)
        return Explanation("xla", None, None, None, texts, "; ".join(map(str, reasons)))
    arch = ffi.arch()
    kernels = describe_kernels(problem, arch, has_gradient=has_gradient)
    variant = _variant(problem, arch, has_gradient=has_gradient)
    found = Explanation("cuda", *kernels, variant, (), "", speed_note(arch))
    found = with_note(found, describe_portable_split(problem, arch))
    found = with_note(found, describe_rests(problem.spec, problem.dtype))
    return with_note(found, describe_lists(problem, arch, has_gradient=has_gradient))


def with_note(found: Explanation, note: str) -> Explanation:
    """Returns an explanation with one more note, which may be empty."""
    return dataclasses.replace(found, note="; ".join(filter(None, (found.note, note))))


def _variant(problem: Problem, arch: str, *, has_gradient: bool) -> str:
    """Describes which kernels run, how dq is added up, and by which products float32 is multiplied."""
    words = _passes(problem, arch, has_gradient=has_gradient)
    products = forward_spec(problem, arch).products
    if products not in PRODUCTS_IN_WORDS:
        return words
    return f"{words}; {PRODUCTS_IN_WORDS[products]}, since {rule(problem.spec.precision)}"


def _passes(problem: Problem, arch: str, *, has_gradient: bool) -> str:
    """Describes which kernels run, and how dq is added up."""
    forward = forward_spec(problem, arch)
    if forward.op == "decode":
        forward_words = f"forward with keys {_split_words(forward.config)}"
    else:
        forward_words = f"forward for {'any length' if forward == configured(forward) else 'short lengths'}"
    if not has_gradient:
        return forward_words
    backward = kernel_spec(problem, "backward", arch)
    if not backward.config.adds_dq:
        return f"{forward_words}; dq in a kernel of its own, in registers"
    order = "in semaphore order, always the same bits" if backward.ordered else "by atomics, in an order that may vary"
    return f"{forward_words}; backward in one kernel, dq added {order}"


def _split_words(config: DecodeConfig) -> str:
    """Says where a decoding kernel cuts the keys of a head."""
    if not config.splits:
        return "of whole heads in turn"
    if config.portion:
        return f"split at every {config.portion * config.keys}, the same bits in every batch"
    return "split over all multiprocessors"


def _refusal(reasons: list[Reason]) -> NotImplementedError:
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    return NotImplementedError(
        f'implementation="cuda" cannot run this call:{listed}\nimplementation=None falls back to the XLA path.'
    )


def _warn_once(problem: Problem, reasons: list[Reason]) -> None:
    """Warns of the XLA path, once for each set of reasons."""
    warned = _warned(tuple(reasons))
    if warned:
        return
    warned.append(True)
    warnings.warn(
        f"jax_fastattn takes the XLA path for the call at {call_sites.find(problem)}: {'; '.join(map(str, reasons))}. "
        'Pass implementation="xla" to accept that without this warning.',
        stacklevel=2,
    )


@functools.lru_cache(maxsize=1024)  # a new head dim is a new reason
def _warned(reasons: tuple[Reason, ...]) -> list[bool]:
    """Returns a list that is empty until `_warn_once` has warned of these reasons."""
    del reasons
    return []
