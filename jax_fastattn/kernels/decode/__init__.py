# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Few queries over long keys, for both families: shares of the keys, a warp that computes, and the merges."""
