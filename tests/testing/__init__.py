# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Code that tests and benchmarks share: tables of cases, random calls, the comparison rule, poison."""
