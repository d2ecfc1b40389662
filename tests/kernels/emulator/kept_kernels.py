# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What CuTe DSL compiles in tests, kept between runs by the key and the files of the package's own cache.

That key holds the compile key, a digest of the sources and the version of the compiler. A damaged entry counts as
absent, see `jax_fastattn/compilation/cache.py`. Nothing is kept of code that no file of the package has: a patched
module, or a feature that a test defines.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import kept

import jax_fastattn
from jax_fastattn import kernels
from jax_fastattn.compilation import cache
from jax_fastattn.kernels.key import KernelSpec


def kernel(kind: str, spec: KernelSpec, host: Any, compiled: Callable[[], bytes]) -> bytes:
    """Returns what `compiled` returns, of an earlier run if one had the same code, compiler and key.

    Args:
        kind: what it is, with what decides about it besides.
        spec: the compile key.
        host: the host function, whose attributes count; None if it is that of `spec`.
        compiled: compiles it. It is called each time for code that is not what the package's files say: if a test has
            patched the kernels, or has features of its own.
    """
    folder = kept.folder("kernels")
    description = _described(host)
    is_foreign = any(not code.feature.startswith(f"{jax_fastattn.__name__}.") for code in spec.features)
    if folder is None or description is None or is_foreign or _are_patched():
        return compiled()
    options = sorted((x, y) for x, y in os.environ.items() if x.startswith("CUTE_DSL"))
    parts = (kind, cache.kernel_key(spec), description, str(options))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    directory = mock.patch.dict(os.environ, JAX_FASTATTN_CACHE_DIR=str(folder))
    with directory:
        found = cache.load(key)
    if found is None:
        found = compiled()
        with directory, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a disk that is full, say
            cache.store(key, found)
    return found


def _described(x: Any) -> str | None:
    """Returns a text of an object and its attributes, all the way down; None if a class of it is not the package's."""
    if isinstance(x, tuple | list | dict):
        found = [_described(member) for member in (x.items() if isinstance(x, dict) else x)]
        return None if None in found else f"{type(x).__name__}{found}"
    if not hasattr(x, "__dict__") or inspect.isroutine(x) or isinstance(x, type):
        return None if " at 0x" in repr(x) else repr(x)
    if type(x).__module__.partition(".")[0] != jax_fastattn.__name__:
        return None
    members = _described(vars(x))
    return None if members is None else f"{type(x).__module__}.{type(x).__qualname__}{members}"


def _names() -> dict[str, Any]:
    """Returns what names stand for in the modules that a kernel is compiled from, in their classes and dictionaries."""
    found = {}
    for module in _MODULES:
        for name, x in vars(module).items():
            is_class = isinstance(x, type) and x.__module__ == module.__name__
            members = vars(x) if is_class else x if isinstance(x, dict) else {}
            found[f"{module.__name__}.{name}"] = x
            found |= {f"{module.__name__}.{name}.{member}": value for member, value in members.items()}
    return {name: x for name, x in found.items() if not name.endswith("__")}


def _are_patched() -> bool:
    """Returns whether a name stands for something else than when this module was imported."""
    now = _names()
    return now.keys() != _AS_WRITTEN.keys() or any(x is not _AS_WRITTEN[name] for name, x in now.items())


_MODULES = [
    importlib.import_module(name)
    for name in (
        "jax_fastattn.compilation.compiler",
        "jax_fastattn.spec",
        *(x.name for x in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")),
    )
]
_AS_WRITTEN = _names()
