# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tables of cases for tests and benchmarks.

Sizes within a case are pairwise distinct and greater than 1 where the case is not about being 1, so that a swapped axis
cannot go unnoticed.
"""
