# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of users to the canonical operands of spec.py and back, a file for each function of `api/`."""
