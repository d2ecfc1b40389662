# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention problems by name: what commands, tests and benchmarks ask for; `testing/cases/` has the tables of tests."""
