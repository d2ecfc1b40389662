# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The GPU architectures that the kernels run on, and what is known of them. Imports nothing of the package."""

from __future__ import annotations

# One CTA may ask for this much dynamic shared memory, in KB: CUDA programming guide, appendix "Compute Capabilities",
# table "Memory Information per Compute Capability", columns 8.0 to 12.x. By the same table an SM has 1 KB more, and
# every one of these architectures has 64 K registers, at most 255 for a thread.
_LISTED = {
    **{"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90a": 227},
    **{"sm_100a": 227, "sm_103a": 227, "sm_110a": 227, "sm_120a": 99, "sm_121a": 99},
}
# Tests and benchmarks run the portable family on a Hopper GPU with these: compiled for it, with the shared memory of
# an A100, of an RTX card, or its own.
_BORROWED = {"sm_90-a100": 163, "sm_90-rtx": 99, "sm_90": 227}
ARCHITECTURES, BORROWED = tuple(_LISTED), tuple(_BORROWED)

# The speed is not known on these. Their tensor cores have instructions that the portable kernels do not use.
UNTIMED = ("sm_100a", "sm_103a", "sm_110a")

# An H100 SXM has this many; the number affects speed alone.
H100_MULTIPROCESSORS = 132


def shared_memory_limit(arch: str) -> int:
    """Returns the bytes of shared memory that one CTA may use; unknown architectures get the smallest limit."""
    return 1024 * (_LISTED | _BORROWED).get(arch, 99)
