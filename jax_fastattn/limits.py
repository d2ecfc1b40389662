# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers that calls and kernels share. A change here compiles every kernel again."""

# It is beyond any length. Offsets and sides of windows are clamped to it, so that no sum with a position leaves int32.
UNBOUNDED = 1 << 29

# The generator of dropout has these numbers, see `dropout.py`.
DROPOUT_MULTIPLIERS = 0x9E3779B1, 0x7FEB352D, 0x846CA68B, 0xD256D193, 0xAC4C1B51
DROPOUT_STEPS = 1 << 15
