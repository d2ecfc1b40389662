# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts of operands: axes of heads, packed sequences, and keys and values in pages."""
