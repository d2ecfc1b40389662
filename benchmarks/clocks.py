# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Clocks, power and temperature of the GPU, by NVIDIA's management library: `nvidia-smi` takes 0.1 to 1 s a call."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

# Functions of the library by the name that `nvidia-smi --query-gpu` has for the number, what they take after the
# device, and the unit of the number.
_QUERIES: dict[str, tuple[str, tuple[int, ...], float]] = {
    "clocks.sm": ("nvmlDeviceGetClockInfo", (1,), 1),
    "clocks.mem": ("nvmlDeviceGetClockInfo", (2,), 1),
    "power.draw": ("nvmlDeviceGetPowerUsage", (), 1e-3),
    "temperature.gpu": ("nvmlDeviceGetTemperature", (0,), 1),
}


def clocks() -> dict[str, str] | None:
    """Clocks in MHz, watts and degrees of the first GPU that this process sees; None without one."""
    if (found := _device()) is None:
        return None
    library, device = found
    values = {}
    for name, (function, arguments, unit) in _QUERIES.items():
        value = ctypes.c_uint()
        if getattr(library, function)(device, *arguments, ctypes.byref(value)):
            return None
        values[name] = f"{value.value * unit:g}"
    return values


@functools.cache
def _device(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """Returns the library and its handle of the GPU, or None if one of them is not there."""
    try:
        library = load("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if library.nvmlInit_v2():
        return None
    if visible.isdecimal():
        status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(visible)), ctypes.byref(device))
    else:
        status = library.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(device))
    return None if status else (library, device)
