# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel of the gradient of a bias of pairs, or of rows under a soft cap."""
