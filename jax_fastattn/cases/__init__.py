# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention problems by name, for commands, tests and benchmarks; `tests/testing/cases/` has the tables of tests."""
