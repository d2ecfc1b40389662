# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles a CTA visits, from ranges or from lists, and the bits of their scores."""
