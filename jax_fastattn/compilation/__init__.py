# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""From a compile key to an object on disk, without JAX: the compiler, its libraries and the disk cache.

`ffi/` calls this layer, and makes custom calls of objects. Processes that only compile kernels import nothing above it,
so that they start sooner and take less memory.
"""
