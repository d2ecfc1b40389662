# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel of dk and dv, for head dims over 128 and operands in two terms."""
