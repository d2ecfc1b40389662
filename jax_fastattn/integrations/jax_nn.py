# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`jax_fastattn.attention` in the place of `jax.nn.dot_product_attention`, for code that calls the latter.

    with jax_nn.installed():        # or jax_nn.install(), until jax_nn.uninstall()
        model.fit(...)

equimo, ejkernel and Flax's nnx look the function up in `jax.nn` at each call, and then call ours. So do layers of Keras
without dropout; `integrations.keras` serves all of its layers. Code that
looked it up earlier (`from jax.nn import dot_product_attention`) keeps the original, and so do functions that JAX
traced and cached earlier. The replacement holds for all threads of the process.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Generator
from typing import Any

import jax

from jax_fastattn.api import attention
from jax_fastattn.keywords import explained

_NAME = "dot_product_attention"
_replaced: list[Callable[..., Any]] = []


@functools.wraps(jax.nn.dot_product_attention)
def dot_product_attention(*args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
    """Calls `jax_fastattn.attention`, and takes every `implementation` of `jax.nn`.

    Args:
        *args, **kwargs: as for `jax_fastattn.attention`.
        implementation: "xla" and "cudnn" mean None here: the CUDA kernels where they apply, else the XLA path. Other
            values are as for `jax_fastattn.attention`.

    Returns:
        The results of `jax_fastattn.attention`; docs/semantics.md lists what differs from `jax.nn`.
    """
    return attention(*args, implementation=None if implementation in ("xla", "cudnn") else implementation, **kwargs)  # pyright: ignore (attention checks it)


@explained
def install() -> None:
    """Puts `dot_product_attention` into `jax.nn`, until `uninstall`. A second call changes nothing.

    If Keras is imported, one warning names `integrations.keras`.
    """
    if "keras" in sys.modules:
        _warn_of_keras()
    if getattr(jax.nn, _NAME) is not dot_product_attention:
        _replaced.append(getattr(jax.nn, _NAME))
        setattr(jax.nn, _NAME, dot_product_attention)


@explained
def uninstall() -> None:
    """Restores the function that `install` replaced; does nothing if ours is not installed."""
    if getattr(jax.nn, _NAME) is dot_product_attention:
        setattr(jax.nn, _NAME, _replaced.pop())


@contextlib.contextmanager
@explained
def installed() -> Generator[None, None, None]:
    """Installs the function inside a `with` block, and restores the previous one after the block."""
    before = getattr(jax.nn, _NAME)
    install()
    try:
        yield
    finally:
        if before is not dot_product_attention:
            uninstall()


@functools.cache
def _warn_of_keras() -> None:
    warnings.warn(
        "Keras is imported, and its attention layers that have dropout never call jax.nn, not even in inference. Use "
        "`jax_fastattn.integrations.keras.installed()` for models of Keras.",
        stacklevel=4,
    )
