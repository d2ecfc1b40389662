# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Strict JAX settings, eight CPU devices for sharding tests, and skips that say why."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _cuda_devices() -> int:
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    del config
    found = _cuda_devices()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if marker in item.keywords and found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}"))


@pytest.fixture
def key() -> jax.Array:
    """A PRNG key."""
    return jax.random.key(2026)
