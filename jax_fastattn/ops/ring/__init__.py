# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Attention whose queries and keys are split over the devices of a mesh axis.

Every device keeps its queries and meets the keys of one other device in each step. A step is one or two ordinary calls
of the forward or the backward op, whose offsets and lengths are run-time data, so that all devices run one program. The
forward pass merges the results of steps by their log-sum-exps. In the backward pass a step takes the log-sum-exp of the
whole row, and the gradients of keys return to their device. If a causal call would leave devices without work, they
compute queries of others instead (`helping.py`).

    plan.py      what is static: steps, and the blocks of each
    layout.py    the order of rows: contiguous and zigzag
    blocks.py    the operands of a block
    permute.py   collective permutes
    merge.py     a block's forward pass, and sums over blocks
    passes.py    the forward pass and its tangent
    gradient.py  the backward pass
    helping.py   steps in which devices without work help others: which block a device computes, and what travels
    helped.py    both passes of such steps
    rules.py     registers all of these with the ops

A ring has no second derivatives.
"""
