# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A bias in the kernels: a feature for each kind of bias, and where a matrix is read from."""
