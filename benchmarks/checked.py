# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Whether results of implementations are right: by the rule of the tests, or because two implementations agree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import cut
from peers import IMPLEMENTATIONS, Unsupported

from jax_fastattn.cases.case import Case
from jax_fastattn.reference import attention_reference
from jax_fastattn.spec import DIFFERENTIABLE, OPERANDS, AttentionSpec, Operands

# Scripts that import this one, or `run.py`, find `testing` there, too.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from testing.combinations import wanted
from testing.compare import Results, assert_within_budget, evaluate, same_dtype_attention

# Logits of what is checked, in float32.
CHECKED_BYTES = 1 << 31
# Root-mean-square difference of two implementations over that of the first one's results. Roundings to bfloat16 make
# some 0.3 % of it, and those of P and dS in gradients up to 1 %.
MOST_DIFFERENT = 0.03


class Checked:
    """What results must be: found once per case, on the first heads (and as many batch entries as memory allows).

    The rule is that of the tests (`testing.compare`): the error may be twice that of the same arithmetic
    in the dtype of the case. The oracle is jax.nn's XLA path in float32, or the executable specification where jax.nn
    lacks a feature; for packed sequences our XLA path, in float32 for the oracle.
    """

    def __init__(self, case: Case, operands: Operands, dout: jax.Array) -> None:
        logits = 4 * case.group * case.query_length * case.key_length
        self.case = cut(case, min(case.batch, max(CHECKED_BYTES // logits, 1)))
        self.is_whole_batch = self.case.batch == case.batch
        given = {name: x for name, x in operands._asdict().items() if x is not None}
        by_head = {f"d{name}": given[name].shape[1] for name in ("bias", "sinks") if name in given}
        self.sums_over_heads = {name for name, heads in by_head.items() if heads < operands.query.shape[2]}
        self.operands = Operands(**{name: self.cut(x, OPERANDS[name].letters) for name, x in given.items()})
        self.dout = self.cut(dout, "BTND")
        self.expected: tuple[Results, Results] | None = None

    def cut(self, x: jax.Array, axes: str) -> jax.Array:
        """The part of an array that is checked; broadcast axes stay."""
        kept = {"B": self.case.batch, "N": self.case.group, "K": 1}
        return x[tuple(slice(kept.get(axis)) for axis in axes[: x.ndim])]

    def outcome(self, found: Any, mode: str) -> dict[str, Any]:
        """What is wrong with the results of a case, None when they are right, and each error over the baseline's."""
        if self.expected is None:
            arrays = self.operands, self.dout
            self.expected = jax.jit(self.oracle)(*arrays), jax.jit(self.baseline)(*arrays)
        oracle, baseline = (self.select(x, mode) for x in self.expected)
        if mode == "forward":
            actual = Results(self.cut(found, "BTND"), None)
        else:
            gradients = {f"d{name}": self.cut(x, OPERANDS[name].letters) for name, x in found.items()}
            actual = self.select(Results(None, None, **gradients), mode)
        error = None
        try:
            assert_within_budget(actual, oracle, baseline)
        except AssertionError as failure:
            error = f"wrong: {failure}"[:500]
        return {"error": error, "rms": rms_over_baseline(actual, oracle, baseline)}

    def select(self, results: Results, mode: str) -> Results:
        """The results of a mode; without those that sum over batch entries or heads that are not checked."""
        if mode == "forward":
            return Results(results.out, None)
        sums_over_batch = {"dbias": self.operands.bias, "dsinks": self.operands.sinks}
        left_out = [
            name
            for name, x in sums_over_batch.items()
            if x is not None and ((x.shape[0] == 1 and not self.is_whole_batch) or name in self.sums_over_heads)
        ]
        left_out += [f"d{name}" for name in DIFFERENTIABLE if name not in wanted(self.case)]
        return results._replace(out=None, lse=None, **dict.fromkeys(left_out))

    def oracle(self, operands: Operands, dout: jax.Array) -> Results:
        names = self.case.spec().present
        wide = {name: getattr(operands, name).astype(jnp.float32) for name in DIFFERENTIABLE if name in names}
        return evaluate(self.exact, self.case.spec(), operands._replace(**wide), dout)

    def baseline(self, operands: Operands, dout: jax.Array) -> Results:
        attention = self.by_chunks if self.case.packed is not None else same_dtype_attention
        return evaluate(attention, self.case.spec(), operands, dout)

    def by_chunks(self, spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Packed sequences by the XLA path: all logits of 65536 tokens at once are 17 GB a head."""
        del spec
        return IMPLEMENTATIONS["jax_fastattn-xla"].attend(self.case, operands), jnp.zeros(())

    def exact(self, spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
        with jax.default_matmul_precision("highest"):
            if self.case.packed is not None:
                return self.by_chunks(spec, operands)
            try:
                return IMPLEMENTATIONS["jax.nn-xla"].attend(self.case, operands), jnp.zeros(())
            except Unsupported:
                return attention_reference(spec, operands)


def rms_over_baseline(actual: Results, oracle: Results, baseline: Results) -> dict[str, float]:
    """The root-mean-square error of each result over the baseline's."""

    def rms(x: Any, exact: Any) -> float:
        return float(np.sqrt(np.mean((np.asarray(x, np.float64) - np.asarray(exact, np.float64)) ** 2)))

    fields = zip(Results._fields, actual, oracle, baseline, strict=True)
    found = {name: (rms(x, exact), rms(base, exact)) for name, x, exact, base in fields if base is not None}
    return {name: error / budget for name, (error, budget) in found.items() if budget > 0}


def assert_alike(found: Any, name: str, other: Any) -> dict[str, Any]:
    """Returns how far whole results are from another implementation's, of this name, and what is wrong if they are far.

    A program for each shape takes a tenth of a second, where `Checked` compiles attention and its gradients twice.
    """
    gradients = isinstance(found, dict)
    results, others = ({f"d{k}": v for k, v in x.items()} if gradients else {"out": x} for x in (found, other))
    differences = {key: float(_difference(x, others[key])) for key, x in results.items()}
    far = {key: x for key, x in differences.items() if not x <= MOST_DIFFERENT}
    error = f"wrong: differs from {name} by {far}" if far else None
    return {"error": error, "difference": {"from": name, "rms": differences}}


@jax.jit
def _difference(found: jax.Array, other: jax.Array) -> jax.Array:
    found, other = found.astype(jnp.float32), other.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((found - other) ** 2) / jnp.mean(other**2))
