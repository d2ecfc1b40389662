# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/first_step.py: its steps compile what its `warmup` compiles, and its page has the table of the record."""

import json
import os
import subprocess
import sys
from pathlib import Path

import calls
import jax
import pytest

from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.cli import main as cli
from jax_fastattn.cli import shapes, warmup
from jax_fastattn.ffi import call
from jax_fastattn.kernels.key import KernelSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import first_step


@pytest.mark.parametrize("name", first_step.MODELS)
def test_warmup_compiles_what_the_step_asks_for(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in takes the compiler's place."""
    calls.lower_for_cuda(monkeypatch, tmp_path)
    asked: list[KernelSpec] = []
    compile_kernel = call._compile
    monkeypatch.setattr(call, "_compile", lambda spec: asked.append(spec) or compile_kernel(spec))
    model = first_step.MODELS[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = first_step.lowered(model)
    assert asked and found["seconds"] > 0
    options = cli.build_parser().parse_args(["warmup", *model.warmup, "--arch", first_step.ARCH])
    cases = [case for layer in shapes.layers(options).values() for case in warmup.cases_of(layer, options)]
    assert set(asked) <= set(kernel_specs(cases, first_step.ARCH))


def test_warmup_runs_in_the_package_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `-P`, `-m` takes the package of a clone in the current directory, which may lack the C++ extension."""
    commands: list[list[str]] = []
    monkeypatch.setattr(first_step, "_printed", lambda command, cache: commands.append(command) or "{}")
    assert first_step.measured("t5-base")["kernels"] == 0
    assert commands[1][:5] == [sys.executable, "-P", "-m", "jax_fastattn", "warmup"]


def test_the_page_has_the_table_of_the_newest_record() -> None:
    assert first_step.PAGE.read_text() == first_step.filled(first_step.PAGE, first_step.RESULTS)


def test_the_record_shows_that_a_warm_step_compiles_nothing() -> None:
    record = json.loads(max(first_step.RESULTS.glob("first-step-*.json")).read_text())
    assert {*record["models"]} == {*first_step.MODELS}
    for model in record["models"].values():
        assert model["warm"]["compiled"] == 0 < model["cold"]["compiled"]
        assert model["warm"]["cpu_seconds"] < model["cold"]["cpu_seconds"]


@pytest.mark.slow
def test_the_parts_of_a_step_are_its_seconds() -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    command = [sys.executable, first_step.__file__, "--step", "t5-base", "--parts"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
    parts = found["parts"]
    assert {*parts} == {"imports", "imports_cpu", "compiler", "kernels", "passes", "binary", "rest"}
    assert found["compiled"] > 0 and all(x > 0 for x in parts.values())
    inside = sum(parts[x] for x in ("kernels", "passes", "binary", "rest"))
    assert inside == pytest.approx(found["seconds"], abs=0.1)


def test_a_step_without_kernels_says_why_it_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

    def falls_back(model: first_step.Model) -> dict[str, float]:
        os.write(2, f"{model.title} takes the XLA path\n".encode())
        return {"seconds": 0.1, "cpu_seconds": 0.1, "compiled": 0}

    monkeypatch.setattr(first_step, "lowered", falls_back)
    with pytest.raises(SystemExit, match=r"No kernel was compiled.*\nT5 base encoder takes the XLA path"):
        first_step.parts(first_step.MODELS["t5-base"])
