# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""What becomes of a score, and which scores count: a feature a file, for both families and both passes.

`feature.py` has the hooks that a feature may define, `score.py` their composition, which is all that a kernel calls.
Hooks that change a score run in one order, whatever the order in the compile key: a bias, programs
(`KernelSpec.programs`, in their order), then the soft cap. The predicate comes after them: first the limits of window,
lengths and offset, then the rules of programs. A bias of rows and sinks join a row when it is finished.
"""
