# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Exports a program for another GPU. It carries its kernels, so the process that loads
it needs no compiler. This machine needs the extras `cuda13` and `export`, and no GPU.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.export
import jax.numpy as jnp

import jax_fastattn


def attend(q, k, v):
    return jax_fastattn.attention(q, k, v, is_causal=True, implementation="cuda")


q = jax.ShapeDtypeStruct((1, 512, 8, 64), jnp.bfloat16)
kv = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)

with jax_fastattn.target_arch("sm_80"):  # an A100; "sm_90a" is an H100
    # JAX cannot know that the launch of a kernel stays compatible; you say so.
    launch = jax.export.DisabledSafetyCheck.custom_call("jax_fastattn_launch")
    export = jax.export.export(
        jax.jit(attend), platforms=["cuda"], disabled_checks=[launch]
    )
    exported = export(q, kv, kv)

with TemporaryDirectory() as folder:
    path = Path(folder, "attend.bin")
    path.write_bytes(exported.serialize())

    # In the process that runs it, which needs this package and that GPU:
    jax_fastattn.register_ffi_targets()
    loaded = jax.export.deserialize(path.read_bytes())
    # out = loaded.call(q, k, v)

assert loaded.platforms == ("cuda",) and loaded.out_avals[0].shape == q.shape
assert loaded.mlir_module().count("custom_call @jax_fastattn_launch") == 1
