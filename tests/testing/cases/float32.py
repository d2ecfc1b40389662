# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""float32 by both kinds of products: each kernel of both passes that has words or powers of two of its own.

compute-sanitizer runs them; random calls of the GPU suite have float32, too.
"""

from __future__ import annotations

from testing.cases.base import GQA, MHA, on

FLOAT32 = {
    f"{name}, {precision}": on(case, dtype="float32", precision=precision)
    for precision in ("default", "tensorfloat32")
    for name, case in {
        "d64": on(MHA, is_causal=True),
        "d128": on(GQA, head_dim=128, sinks="n", dlse=True),
        "d160": on(MHA, head_dim=160, query_length=64, key_length=65),
        "pairs": on(MHA, bias="nts", query_seq_lengths=(193, 65)),
        "keys and a mask": on(GQA, bias="bs", mask="bts", mask_density=0.05, deterministic=True),
    }.items()
}
