# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Tiles as integers: ranges of a plan, lists of a prepass, records of packed sequences. Imports no DSL."""
