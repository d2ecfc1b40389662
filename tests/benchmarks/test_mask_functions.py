# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/mask_functions.py` in a tiny size: what a record has, and that functions say what flags say."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import mask_functions
import turns

from jax_fastattn import attention

TINY = {"length": 40, "heads": 4, "kv_heads": 2, "head_dim": 8, "documents": 3}


def test_a_record_has_times_and_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {name: dataclasses.replace(mask_functions.CASES[name], **TINY) for name in ("documents", "prefix")}
    monkeypatch.setattr(mask_functions, "CASES", cases)
    output = tmp_path / "record.json"
    quick = ["--rounds", "1", "--measurement-ms", "0.1", "--commit", "0" * 40]
    mask_functions.main(["--peers", "--output", str(output), *quick])
    found = json.loads(output.read_text())["cases"]
    modes = [f"{kind} {mode}" for kind in ("mask_mod", "kept") for mode in ("forward", "backward", "both")]
    lists = {"kept lists", "lists forward", "lists backward"}
    assert {*found["prefix"]["ms"]} == {*modes, *lists} and not found["prefix"]["shares"]
    shares, ms = found["documents"]["shares"], found["documents"]["ms"]
    assert {*shares} == {f"{name} of flag" for name in modes}
    assert shares["kept backward of flag"] == pytest.approx(ms["flag backward"] / ms["kept backward"])


def test_an_error_of_ours_is_raised() -> None:
    def fail() -> NoReturn:
        raise RuntimeError("no program")

    assert turns.programs_of({"fa4": fail}, mask_functions.PEERS) == ({}, {"fa4": "RuntimeError: no program"})
    with pytest.raises(RuntimeError, match="no program"):
        turns.programs_of({"kept": fail}, mask_functions.PEERS)


@pytest.mark.parametrize("name", [name for name, case in mask_functions.CASES.items() if case.flag is not None])
def test_functions_say_what_flags_say(name: str) -> None:
    case = dataclasses.replace(mask_functions.CASES[name], **TINY | {"length": 1100 if "window" in name else 40})
    shape = (case.batch, case.length, 1, 8)
    query, key, value = (jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 3))
    ids = case.ids()
    assert case.flag is not None
    found, wanted = (
        attention(query, key, value, **options) for options in ({"mask_mod": case.mod(ids)}, case.flag(ids))
    )
    np.testing.assert_allclose(jnp.asarray(found), wanted, atol=1e-5)
