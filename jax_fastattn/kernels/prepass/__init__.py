# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The prepass of masks and segment ids: it writes lists of tiles and bits of scores, which `tiles/lists.py` defines."""
