# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Code that tests and benchmarks share: named cases, comparison against an error budget, poison."""
