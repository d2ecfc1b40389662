# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The JAX primitives of attention and their rules.

Layers that import this one do not know platforms; layers that it imports do not know JAX tracing.
"""
