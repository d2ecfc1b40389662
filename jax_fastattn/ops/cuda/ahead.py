# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels that calls will launch which are traced and not lowered yet, so that workers can compile them.

A trace leaves a note of each call. When the first kernel has to be compiled, the launches of all noted calls are traced
for the GPU of that lowering, and their kernels are known: the backward pass's too, while the forward pass's compiles.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_fastattn.kernels.key import KernelSpec

# Calls of programs that are never lowered for CUDA leave notes, too. The oldest are forgotten.
_MOST_NOTES = 64

# A function of the arrays and parameters of a call that traces its launches.
Launches = Callable[..., Any]

_lock = threading.Lock()
_notes: dict[Any, tuple[Launches, list[jax.ShapeDtypeStruct], dict[str, Any]]] = {}

_collected: contextvars.ContextVar[list[KernelSpec] | None] = contextvars.ContextVar("kernels", default=None)


def note(launches: Launches, arrays: Sequence[Any], **params: Any) -> None:
    """Notes that a call is traced, which launches what `launches` does with such arrays.

    The calls of a ring leave no notes. Their launches differ from device to device.
    """
    if params["spec"].ring is not None:
        return
    key = (launches, tuple((x.shape, x.dtype) for x in arrays), *params.items())
    with _lock:
        if key not in _notes:
            _notes[key] = launches, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays], params
            if len(_notes) > _MOST_NOTES:
                del _notes[next(iter(_notes))]


def collect(kernel: KernelSpec) -> None:
    """Says that a launch of this kernel is traced."""
    kernels = _collected.get()
    if kernels is not None:
        kernels.append(kernel)


def foreseen() -> list[KernelSpec]:
    """Returns the kernels of all noted calls, for the GPU to lower for, and forgets the calls."""
    with _lock:
        notes = list(_notes.values())
        _notes.clear()
    found: list[KernelSpec] = []
    for one in notes:
        with contextlib.suppress(Exception):  # if something is wrong with a call, its own lowering says so
            found += _kernels(*one)
    return list(dict.fromkeys(found))


def _kernels(launches: Launches, arrays: list[jax.ShapeDtypeStruct], params: dict[str, Any]) -> list[KernelSpec]:
    """Returns the kernels of a call."""
    found: list[KernelSpec] = []
    token = _collected.set(found)
    try:
        jax.eval_shape(lambda *arrays: launches(*arrays, **params), *arrays)
    finally:
        _collected.reset(token)
    return found
