# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Calls in float32 by products of float16 that several devices compute, with the model of `half_model.py` for kernels.

A device has the powers of two of its own block, so that nothing in other blocks touches a bit of it.
"""

from __future__ import annotations

from typing import Any

import calls
import half_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rings

import jax_fastattn
from jax_fastattn.xla import passes as xla

ROWS = 20
# The second device has hidden keys alone in the first batch entry, and some in the second one.
LENGTHS = {"key_value_seq_lengths": jnp.array([7, 17])}
HIDDEN = jnp.arange(ROWS)[None, :, None, None] >= LENGTHS["key_value_seq_lengths"][:, None, None, None]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("ring_attention", {"is_causal": True}),
    "ring-full": ("ring_attention", {}),
    "ring-zigzag": ("ring_attention", {"is_causal": True, "layout": "zigzag"}),
    "all-to-all": ("all_to_all_attention", {"is_causal": True}),
}


def _program(function: Any) -> Any:
    """Returns a function of arrays to the output, its gradients and nothing else, compiled once."""

    def run(arrays: calls.Arrays) -> Any:
        moved = {name: arrays[name] for name in ("query", "key", "value")}
        rest = {name: x for name, x in arrays.items() if name not in ("dout", *moved)}
        out, pullback = jax.vjp(lambda moved: function(rest | moved), moved)
        return {"out": out, **pullback(arrays["dout"])[0]}

    return calls.quick_jit(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_nothing_of_another_device_changes_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden keys are 1e38, infinite or NaN; then, of a contiguous ring, a value that only later rows see is large."""
    which, options = CALLS[name]
    monkeypatch.setattr(xla, "forward", half_model.forward_model)
    monkeypatch.setattr(xla, "backward", half_model.backward_model)
    arrays = rings.draw(ROWS) | LENGTHS
    attend = getattr(jax_fastattn, which) if which == "all_to_all_attention" else None
    split = _program(rings.split(2, arrays, attend=attend, **options))
    with jax.default_matmul_precision("tensorfloat32"):
        found = split(arrays)
        for poison in (1e38, np.inf, np.nan):
            poisoned = {x: jnp.where(HIDDEN, poison, arrays[x]) for x in ("key", "value")}
            jax.tree.map(np.testing.assert_array_equal, found, split(arrays | poisoned))
        if name == "ring":
            half = ROWS // 2
            larger = split(arrays | {"value": arrays["value"].at[1, half + 3].multiply(1e30)})
            for result in ("out", "query"):
                np.testing.assert_array_equal(found[result][:, :half], larger[result][:, :half])
            assert (found["out"][1, half:] != larger["out"][1, half:]).any()
    monkeypatch.undo()
    wanted = _program(rings.whole(**{x: y for x, y in options.items() if x != "layout"}))(arrays)
    for result, x in wanted.items():
        assert half_model.size(found[result] - x) < 1e-3 * half_model.size(x), result
