# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of scores and positions: traced, cut into planes that XLA computes, and code of single numbers."""
