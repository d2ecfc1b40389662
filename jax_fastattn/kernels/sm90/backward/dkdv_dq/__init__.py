# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel of dk, dv and dq, for head dims up to 128, and the warpgroup that adds up dq."""
