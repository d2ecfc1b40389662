# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What becomes of a score, and which scores count: one feature per file, for both families and both passes.

`feature.py` has the hooks that a feature may define, `of_launch.py` makes features of the codes in a compile key, and
`score.py` has their composition, which is all that a kernel calls. Hooks that change a score run in one order: a bias,
then the features of the key in their order. The predicate comes after them: first the limits of window, lengths and
offset, then the rules of features. A bias of rows and sinks join a row when it is finished.
"""
