# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The seam between JAX and compiled kernels: compile key -> object -> XLA custom call.

The ops call this layer. It knows `compilation/` and architectures, and nothing about attention. Importing it loads
neither the compiler nor the C++ extension: the first lowering for CUDA, or `register`, loads the extension, and the
first kernel that is in no cache loads the compiler.
"""

from jax_fastattn.ffi.call import compile_count, custom_call, prepare
from jax_fastattn.ffi.fingerprint import process_fingerprint
from jax_fastattn.ffi.registry import (
    TARGET_NAME,
    arch,
    compiler_reasons,
    missing_parts,
    multiprocessors,
    named_arch,
    register,
    target_arch,
)

__all__ = [
    "TARGET_NAME",
    "arch",
    "compile_count",
    "compiler_reasons",
    "custom_call",
    "missing_parts",
    "multiprocessors",
    "named_arch",
    "prepare",
    "process_fingerprint",
    "register",
    "target_arch",
]
