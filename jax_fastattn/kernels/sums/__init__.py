# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Sums of dS over what an operand lacks: the gradients of a bias, for both families. And the sums of rows for dS."""
