# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which scores count: bounds of positions and lengths, and bits of masks and ids."""
