# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""A score function in the attention kernels: each lane evaluates its code (`programs/code.py`) for its scores.

`score.py` has the features, `values.py` evaluates, `forms.py` has what values are before they are numbers, and
`planes.py` loads.
"""
