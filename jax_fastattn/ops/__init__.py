# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The JAX primitives of attention and their rules. Nothing above knows platforms; nothing below knows JAX tracing."""
