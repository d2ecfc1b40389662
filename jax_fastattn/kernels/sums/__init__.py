# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Sums for both families: of the rows of a softmax, of rows for dS, and of dS over what a bias lacks."""
