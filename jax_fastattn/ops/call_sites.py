# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The memory of where the user calls attention. `api` notes the places, the warnings of `dispatch.py` name them.

A warning is given when XLA programs are made. Python's stack says nothing of a jitted call then, so its place is noted
while the call is traced. It is found by what vmap and meshes leave of a call as it is. The program of an eager call is
made inside of that call, maybe long after another call traced it, so that the stack has the place.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from jax_fastattn.spec import AttentionSpec, Operands, Problem

# Frames of these packages are not the user's.
_LIBRARIES = ("jax_fastattn", "jax", "jaxlib", "flax", "keras", "equinox", "equimo", "ejkernel")

# It holds the last place of each kind of call, the latest call last.
_places: dict[object, str] = {}
_MAX_PLACES = 512  # two for each call


def note(spec: AttentionSpec, operands: Operands) -> None:
    """Notes where the user calls attention, for the warning that this call may need when it is lowered."""
    if spec.implementation is not None:
        return
    problem, place = Problem.of(spec, operands), _user_frame(inspect.currentframe())
    for key in (_key(problem), _key_of_blocks(problem)):
        _places.pop(key, None)
        _places[key] = place
    while len(_places) > _MAX_PLACES:
        _places.pop(next(iter(_places)), None)


def calling(program: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls the program of an eager call, whose place is the caller of this."""
    return program(**arguments)


def find(problem: Problem) -> str:
    """Returns where the last call like this one was made, or words that say that it is unknown."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not calling.__code__:
        frame = frame.f_back
    if frame is not None:
        return _user_frame(frame)
    known = (_places.get(key(problem)) for key in (_key, _key_of_blocks))
    return next(filter(None, known), "an unknown place")


def _key(problem: Problem) -> object:
    return problem.spec, problem.dtype, problem.head_dim, problem.v_head_dim


def _key_of_blocks(problem: Problem) -> object:
    """Returns a key that a call shares with the blocks of its ring, whose masks and operands differ."""
    call = dataclasses.replace(problem.spec, ring=None, is_part=False)
    spec = dataclasses.replace(call, is_causal=False, window=(None, None), present=())
    return _key(dataclasses.replace(problem, spec=spec))


def _user_frame(frame: FrameType | None) -> str:
    """Returns file and line of the innermost frame, from this one on, that belongs to no library."""
    assert frame is not None  # CPython has frames
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
