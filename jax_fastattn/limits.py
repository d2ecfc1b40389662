# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Limits that calls and kernels share. A change here compiles every kernel again."""

# It is beyond any length. Offsets and sides of windows are clamped to it, so that no sum with a position leaves int32.
UNBOUNDED = 1 << 29
