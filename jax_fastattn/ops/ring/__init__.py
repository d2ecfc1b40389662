# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention whose queries and keys are split over the devices of a mesh axis.

Every device keeps its queries and meets the keys of one other device in each step. A step is one or two ordinary calls
of the forward or the backward op, whose offsets and lengths are run-time data, so that all devices run one program. The
forward pass merges the results of steps by their log-sum-exps. In the backward pass a step takes the log-sum-exp of the
whole row, and the gradients of keys return to their device.

    plan.py      what is static: steps, and the blocks of each
    layout.py    the order of rows: contiguous and zigzag, and the exchange between them
    blocks.py    the operands of a block
    permute.py   collective permutes
    passes.py    the forward pass and its tangent
    gradient.py  the backward pass
    rules.py     registers all of these with the ops

A ring has no second derivatives.
"""
