# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks in a tiny size: records, what becomes of a failing peer, and the tables made of them."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calls
import jax
import numpy as np
import pytest

from jax_fastattn import ffi
from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.reference import visible_pairs as visible_array

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cases
import clocks
import compare
import forward_mode
import jax_nn
import lowering
import parallel
import peers
import report
import run

TINY_PACKED = "tiny-packed-window-softcap-sinks"
QUICK = ["--repeats", "2", "--measurement-ms", "0.1", "--warm-up-seconds", "0"]


@pytest.fixture(scope="module", autouse=True)
def lenient() -> Iterator[None]:
    """Lets jax.nn, which is measured too, promote dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def measure(output: Path, *options: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The records of a run, by case, implementation and mode."""
    run.main([*QUICK, "--output", str(output), *options])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    return {(x["case"], x["impl"], x["mode"]): x for x in records}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], dict[str, Any]]:
    names = ["jax_fastattn", "jax.nn-xla", "tokamax"]
    output = tmp_path_factory.mktemp("benchmarks") / "records.jsonl"
    return measure(output, "--set", "tiny", "--implementations", *names, "--commit", "0" * 40)


def test_calls_run_before_they_are_measured() -> None:
    times: list[float] = []
    options = run.parse_arguments([*QUICK, "--warm-up-seconds", "0.2"])
    record = run.timing(lambda: times.append(time.monotonic()), (), options)
    assert record["warm_up_seconds"] == 0.2 < times[-1] - times[0]


def test_implementations_take_turns_there_and_back() -> None:
    """One that always runs after another one gets what that leaves of the GPU's power."""
    order: list[str] = []
    options = run.parse_arguments([*QUICK, "--measurement-ms", "0", "--repeats", "1"])
    found = run.by_turns([(lambda name=name: order.append(name), ()) for name in "abc"], options)
    assert "".join(order[-9:]) == "abccbaabc"
    assert all(x["rounds"] == len(x["clocks"]) == 3 for x in found)


@pytest.mark.parametrize(("ours", "expected"), [(1.0, "2.000 of b"), (1.95, "1.026 of b, level")])
def test_a_lead_inside_of_the_spread_is_level(ours: float, expected: str) -> None:
    times = {"a": 3.0, "b": 2.0, "jax_fastattn": ours, "jax_fastattn-xla": 0.5}
    ms = {name: {"p20": 0.97 * x, "p50": x, "p80": 1.03 * x} for name, x in times.items()}
    records = [{"impl": name, "mode": "forward", "error": None, "ms": x} for name, x in ms.items()]
    assert run.lead("case", records).endswith(f"forward   {expected}")
    assert run.lead("case", records[2:]).endswith("no peer to compare with")


def test_the_peer_that_led_is_measured(tmp_path: Path) -> None:
    """And of cells without a record all are. The last record of a cell counts."""
    earlier = tmp_path / "earlier.jsonl"
    speeds = {"jax.nn-xla": 0.5, "fa4-jax": 3.0, "jax_fastattn-xla": 0.1, "tokamax": 2.0}
    lines = [_record(name, 1.0) | {"ms": dict.fromkeys(("p20", "p50", "p80"), x)} for name, x in speeds.items()]
    lines.append(lines[0] | {"error": "wrong: out"})
    earlier.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ["jax_fastattn", "jax_fastattn-xla", "jax.nn-xla", "fa4-jax", "tokamax"]
    before = report.load_files([earlier])
    assert run.implementations("d64-full-1k", "forward", names, before) == [*names[:2], "tokamax"]
    assert run.implementations("d64-full-1k", "forward", names[:4], before) == [*names[:2], "fa4-jax"]
    assert run.implementations("d64-full-1k", "backward", names, before) == names


def test_close_cells_have_modes_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert set(cases.CLOSE) <= set(report.REPORTED) and set(cases.CLOSE.values()) > {("forward",), ("backward",)}
    monkeypatch.setitem(cases.SETS, "close", ["tiny-causal"])
    monkeypatch.setitem(cases.CLOSE, "tiny-causal", ("backward",))
    chosen = ["--set", "close", "--implementations", "jax_fastattn", "--check", "none"]
    found = measure(tmp_path / "x.jsonl", *chosen)
    assert found.keys() == measure(tmp_path / "y.jsonl", *chosen, "--cases", "tiny-causal").keys()
    assert list(found) == [("tiny-causal", "jax_fastattn", "backward")]
    assert not {"rms", "difference"} & set(*found.values())


def test_implementations_are_compared_with_the_first_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = peers.IMPLEMENTATIONS["jax_fastattn"]
    bad = peers.Implementation("jax", "jax", lambda case, operands: right.attend(case, operands) * 1.1)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "tokamax", bad)
    names = ["jax_fastattn", "jax.nn-xla", "tokamax"]
    found = measure(tmp_path / "x.jsonl", "--cases", "tiny-causal", "--implementations", *names, "--check", "pair")
    for mode, results in (("forward", {"out"}), ("backward", {"dquery", "dkey", "dvalue"})):
        ours, theirs, wrong = (found["tiny-causal", name, mode] for name in names)
        assert ours["error"] is theirs["error"] is None
        assert theirs["difference"]["from"] == "jax_fastattn" and set(theirs["difference"]["rms"]) == results
        assert 0 <= max(theirs["difference"]["rms"].values()) < 0.02
        assert wrong["error"].startswith("wrong: differs from jax_fastattn by")
        assert set(ours["seconds"]) == {"compiling", "checking"}


def test_clocks_are_those_of_the_gpu_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Library:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
            return asked.append(index.value) or 0

        def nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> int:
            return asked.append(name) or 0

        def nvmlDeviceGetClockInfo(self, device: Any, kind: int, value: Any) -> int:
            value._obj.value = 1000 * kind
            return 0

        def nvmlDeviceGetPowerUsage(self, device: Any, value: Any) -> int:
            value._obj.value = 654321
            return 0

        def nvmlDeviceGetTemperature(self, device: Any, kind: int, value: Any) -> int:
            value._obj.value = 55
            return 0

    for visible in ("3,1", "GPU-12"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = clocks._device.__wrapped__(lambda name: Library())
        monkeypatch.setattr(clocks, "_device", lambda found=found: found)
        values = {"clocks.sm": "1000", "clocks.mem": "2000", "power.draw": "654.321", "temperature.gpu": "55"}
        assert clocks.clocks() == values
        monkeypatch.undo()
    assert asked == [3, b"GPU-12"]


def test_sums_over_heads_that_are_not_checked_are_left_out() -> None:
    """The rule compares a part of the heads, which lacks most of the gradient of a bias that all heads share."""
    case = Case(batch=2, query_length=16, key_length=24, num_kv_heads=3, head_dim=8, bias="bs")
    operands, (dout, _) = case.operands(jax.random.key(0)), case.cotangents(jax.random.key(1))
    attend = peers.IMPLEMENTATIONS["jax_fastattn-xla"].attend
    call, arrays = run.compiled(attend, case, operands, dout, "backward")
    found = run.Checked(case, operands, dout).outcome(call(*arrays), "backward")
    assert found["error"] is None and set(found["rms"]) == {"dquery", "dkey", "dvalue"}


@pytest.mark.parametrize("mode", run.MODES)
@pytest.mark.parametrize("case", cases.TINY)
def test_ours_is_timed_and_right_in_every_kind_of_case(records: Any, case: str, mode: str) -> None:
    record = records[case, "jax_fastattn", mode]
    assert record["error"] is None
    names = {"out"} if mode == "forward" else {"dquery", "dkey", "dvalue"}
    assert names <= record["rms"].keys() and max(record["rms"].values()) < 2
    assert 0 < record["ms"]["p20"] <= record["ms"]["p50"] <= record["ms"]["p80"]
    assert record["tflops"] == pytest.approx(record["flops"] / record["ms"]["p50"] / 1e9)
    assert record["ran"].startswith("XLA path")
    assert record["versions"]["jax"] == jax.__version__
    assert record["commit"] == "0" * 40


def test_what_cannot_run_is_a_record_with_its_error(records: Any) -> None:
    assert len(records) == len(cases.TINY) * 3 * 2
    assert (
        records[TINY_PACKED, "jax.nn-xla", "forward"]["error"]
        == "Unsupported: no argument for logits_soft_cap, sinks, packed"
    )
    assert records["tiny-causal", "jax.nn-xla", "backward"]["error"] is None
    if peers.IMPLEMENTATIONS["tokamax"].version() is None:
        assert {x["error"] for key, x in records.items() if key[1] == "tokamax"} == {"Unsupported: not installed"}


def test_tiles_of_another_card_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the GPU that is there would be measured instead, or its figures lost."""
    with pytest.raises(SystemExit):
        run.parse_arguments(["--set", "portable"])
    assert "--arch" in capsys.readouterr().err
    context = {"date": "2026-01-02T", "gpu": "NVIDIA X", "arch": "sm_90-a100"}
    assert run.default_output(context).name == "2026-01-02-x-sm_90-a100.jsonl"
    assert run.default_output(context | {"arch": None}).name == "2026-01-02-x.jsonl"


def test_wrong_results_are_seen(monkeypatch: Any, tmp_path: Path) -> None:
    right = peers.IMPLEMENTATIONS["jax_fastattn"]
    bad = peers.Implementation("jax", "jax", lambda case, operands: right.attend(case, operands) * 1.1)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "jax_fastattn", bad)
    found = measure(tmp_path / "x.jsonl", "--cases", "tiny-bias-mask", "--implementations", "jax_fastattn")
    assert found["tiny-bias-mask", "jax_fastattn", "forward"]["error"].startswith("wrong: out")
    assert found["tiny-bias-mask", "jax_fastattn", "backward"]["error"].startswith("wrong: dquery")


def test_no_case_is_begun_after_the_budget(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "x.jsonl"
    run.main([*QUICK, "--set", "tiny", "--budget-seconds", "-1", "--output", str(output)])
    assert "tiny-causal, " in capsys.readouterr().out
    assert not output.exists()


@pytest.mark.parametrize("name", cases.TINY)
def test_flops_count_the_visible_pairs(name: str) -> None:
    case = cases.TINY[name]
    operands = case.operands(jax.random.key(0))
    operands = operands if case.spelled else operands._replace(mask=None)
    visible = np.asarray(visible_array(case.spec(), operands))[:, 0].sum()
    share = case.mask_density if case.mask and not case.spelled else 1
    assert cases.visible_pairs(case) == round(share * visible)
    assert cases.flops(case, "backward") == 2.5 * cases.flops(case, "forward")


def test_figures_of_masks_compare() -> None:
    """Ways to spell one predicate have as many visible pairs, and all cases as many tokens."""
    assert {case.batch * case.query_length for case in cases.MASKS.values()} == {cases.TOKENS}
    pairs = {name: cases.visible_pairs(case) for name, case in cases.MASKS.items()}
    for flag in ("lengths-d64", "causal-d64", "causal-d128"):
        assert pairs[flag] == pairs[flag.replace("-d", "-as-mask-d")]
    assert len({pairs[name] for name in pairs if name.startswith("documents") and name.endswith("d128")}) == 1
    assert pairs["documents-as-mask-d64"] == 8 * 4 * 512 * 512
    assert pairs["mask-random-d64"] == round(0.7 * 8 * 2048 * 2048)


def test_each_bias_is_measured_with_its_gradient_and_without() -> None:
    constant = {name for name, case in cases.BIASES.items() if case.constant_bias}
    learnt = {name for name in cases.BIASES if f"{name}-constant" in constant}
    alone = {"bias-none-d64", "bias-none-d128", "bias-spells-causal-d64", "bias-alibi"}
    assert set(cases.BIASES) == learnt | constant | alone
    assert {"bias-d64", "bias-d128", "bias-keys-d64", "bias-t5-base", "bias-alphafold-triangle"} <= learnt
    assert len({cases.visible_pairs(cases.BIASES[name]) for name in ("bias-d64", "bias-spells-causal-d64")}) == 1
    assert all(case.bias is None or case.bias_dtype == case.dtype for case in cases.CASES.values())


def test_the_grid_is_of_one_size() -> None:
    for case in cases.GRID.values():
        assert (case.batch * case.query_length, case.num_heads * case.head_dim) == (cases.TOKENS, cases.WIDTH)
    assert cases.flops(cases.GRID["d128-full-4k"], "forward") == 4 * 4 * 16 * 4096 * 4096 * 128


def _record(impl: str, tflops: float | None, error: str | None = None, mode: str = "forward") -> dict[str, Any]:
    base = {
        "case": "d64-full-1k",
        "mode": mode,
        "impl": impl,
        "gpu": "NVIDIA X",
        "date": "2026-01-02T",
        "error": error,
    }
    if tflops is None:
        return base
    ms = {name: x / tflops for name, x in (("p20", 0.98), ("p50", 1.0), ("p80", 1.01))}
    return base | {"ms": ms, "tflops": tflops, "tb_per_s": 1.25}


def _page(folder: Path, cases: Any = report.REPORTED, link: str = "") -> report.Page:
    page = folder / f"page-{link}.md"
    page.write_text(f"above\n{report.BEGIN}\nyesterday\n{report.END}\nbelow\n")
    return report.Page(page, cases, link)


def test_tables_and_plots_are_made_from_records(tmp_path: Path) -> None:
    lines = [
        _record("jax_fastattn", 100.0),
        _record("jax_fastattn", 412.3) | {"commit": "12345678"},
        _record("jax_fastattn", 212.0, mode="backward") | {"commit": "abcdefgh"},
        _record("jax.nn-cudnn", 399.0),
        _record("jax.nn-cudnn", 313.0, mode="backward"),
        _record("jax.nn-xla", 900.0, "wrong: out"),
        _record("fa4-jax", None, "RuntimeError: out of memory"),
        _record("tokamax", None, "Unsupported: not installed"),
        _record("jax_fastattn", 500.0) | {"arch": "sm_90-a100"},
        _record("jax_fastattn", 3.0) | {"case": "decode-64x8k-gqa-32-8-d128"},
    ]
    (tmp_path / "2026-01-02-x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, part = pages = [_page(tmp_path, link="up"), _page(tmp_path, ["d64-full-1k"])]
    report.write(pages, tmp_path)
    text, short = whole.path.read_text(), part.path.read_text()
    row = "| d64-full-1k | **412** / 212 | 399 / **313** | wrong / - | 1234567 / abcdefg |"
    for found in text, short:
        assert "| case | jax_fastattn | jax.nn-cudnn | jax.nn-xla | commit of ours |" in found and row in found
        assert found.startswith("above\n") and found.endswith("\nbelow\n") and "yesterday" not in found
    assert "| decode-64x8k-gqa-32-8-d128 (TB/s) | **1.25** / - | - | - |  |" in text
    assert "[2026-01-02-x.jsonl](up/2026-01-02-x.jsonl)" in text and "(up/x.png)" in text
    assert not any(word in short for word in ("decode", "TB/s", "jsonl", "png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x-summary.png").exists()  # decoding is a case of the README
    assert not report.summary({key: x for key, x in report.load(tmp_path).popitem()[1].items() if "full" in key[0]})


def test_a_figure_inside_of_the_spread_of_the_best_one_is_level() -> None:
    speeds = {"jax_fastattn": 100.0, "jax.nn-cudnn": 101.0, "fa4-jax": 90.0, "tokamax": 98.5}
    found = {("d64-full-1k", "forward", name): _record(name, speed) for name, speed in speeds.items()}
    row = report.row("d64-full-1k", found, [*speeds])
    assert row.startswith("| d64-full-1k | **100** / - | **101** / - | 90 / - | **98** / - |")


def test_models_have_a_table_of_their_own(tmp_path: Path) -> None:
    names = ("llama3-8b-ids", "llama3-8b", "lengths-as-mask-d64", "d64-full-1k")
    records = [_record("jax_fastattn", 100.0) | {"case": case} for case in names]
    path = tmp_path / "2026-01-02-x.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in records))
    before, title, after = report.section(link="up", folder=tmp_path).partition("### Models, NVIDIA X")
    assert title and "llama3" not in before and "d64" not in after
    assert before.index("| d64-full-1k |") < before.index("### Masks and segment ids") < before.index("| lengths-as-")
    assert after.index("| llama3-8b |") < after.index("| llama3-8b-ids |") < after.index("(up/2026-01-02-x.jsonl)")
    assert "(up/x.png)" in before and "(up/x-models.png)" in after
    report.write([], tmp_path)
    (tmp_path / "x.png").unlink()
    (tmp_path / "x-models.png").unlink()
    path.write_text(json.dumps(records[0]) + "\n")
    report.write([], tmp_path)
    assert (tmp_path / "x-models.png").exists() and not (tmp_path / "x.png").exists()


def test_the_readme_has_a_plot_of_its_cases(tmp_path: Path) -> None:
    records = [_record("jax_fastattn", 100.0) | {"case": case} for case in ("d64-full-1k", *report.README_CASES)]
    (tmp_path / "2026-01-02-x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (loaded,) = report.load(tmp_path).values()
    shown = {case for case, _, _ in report.summary(loaded)}
    assert shown == {*report.README_CASES}
    report.write([], tmp_path)
    assert (tmp_path / "x-summary.png").read_bytes().startswith(b"\x89PNG")


def test_the_newest_training_run_is_shown(tmp_path: Path) -> None:
    for day, rate in ((1, 5.0), (2, 98765.4)):
        runs = [
            {
                "options": {"length": length, "layers": 3, "width": 32},
                "device": "1 x NVIDIA X",
                "implementation": name,
                "tokens_per_second": rate + extra,
            }
            for length, name, extra in ((64, "fa4-jax", 10), (64, "jax_fastattn (cuda)", 20), (16, "fa4-jax", 30))
        ]
        (tmp_path / f"2026-01-0{day}-x-gpt-sm90-abc.json").write_text(json.dumps({"runs": runs}))
    text = "\n\n".join(report.training(tmp_path, "up"))
    assert "| length | jax_fastattn (cuda) | fa4-jax |\n" in text and "3 layers of width 32" in text
    assert "| 16 | - | **98,795** |\n| 64 | **98,785** | 98,775 |" in text
    assert "(up/2026-01-02-x-gpt-sm90-abc.json)" in text


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.path.name)
def test_pages_hold_the_tables_of_the_committed_records(page: report.Page) -> None:
    """Else: python benchmarks/report.py."""
    assert page.path.read_text() == report.filled(page)


def test_plots_are_there() -> None:
    for gpu in report.load(report.RESULTS):
        assert (report.RESULTS / f"{report.slug(gpu)}.png").exists()
        assert (report.RESULTS / f"{report.slug(gpu)}-summary.png").exists()


def _names_in(*paths: Path) -> set[str]:
    """Returns every word of these files that may be the name of a record."""
    return {word for path in paths for word in re.findall(r"[\w.-]*\w", path.read_text())}


def test_each_record_is_cited() -> None:
    """Else it moves to notebook/records, or goes; see CONTRIBUTING.md, Benchmarks."""
    documents = [*report.ROOT.glob("*.md"), *(report.ROOT / "docs").rglob("*.md")]
    code = [path for top in ("benchmarks", "jax_fastattn", "examples") for path in (report.ROOT / top).rglob("*.py")]
    assert {path.name for path in report.RESULTS.iterdir()} <= _names_in(*documents, *code)
    notebook = report.ROOT / "notebook"
    assert {path.name for path in (notebook / "records").iterdir()} <= _names_in(*notebook.glob("*.md"))


def test_trees_are_compared_in_alternating_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "compare.json"
    arguments = ["compare.py", "--cases", "tiny-causal", "--modes", "forward", "--rounds", "3", "--repeats", "1"]
    arguments += ["--measurement-ms", "0.1", "--warm-up-seconds", "0", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    times, steps = iter([10.0, 1.0, 4.0, 2.0, 5.0, 3.0]), []

    def run_side(side: str, options: Any, cache: str, step: str) -> dict[str, Any]:
        steps.append((side, step))
        options.one_side = (side, step)
        found = compare.prepare(options) if step == "prepare" else compare.measure(options)
        return found if step == "prepare" else {cell: next(times) for cell in found}

    monkeypatch.setattr(compare, "run_side", run_side)
    compare.main()
    assert steps == [(side, "prepare") for side in compare.SIDES] + [(side, "measure") for side in compare.SIDES] * 3
    record = json.loads(output.read_text())
    cell = "tiny-causal forward"
    assert record["ms"] == {cell: {"before": [10.0, 4.0, 5.0], "after": [1.0, 2.0, 3.0]}}
    assert (record["ratios"], record["worst"], record["rounds"]) == ({cell: 0.4}, {cell: 0.4}, 3)


@pytest.mark.parametrize("implementation", [jax_nn.WHOLE, jax_nn.CHUNKS])
def test_what_shows_the_bound_of_a_cpu_computes_what_jax_nn_does(implementation: str) -> None:
    row = jax_nn.Row(1, 4, 600, 8, "float32", kv_heads=2, is_causal=True)  # more than one chunk
    arrays = row.draw()
    found, wanted = (jax.tree.leaves(row.program(x, "both")[0](arrays)) for x in (implementation, jax_nn.THEIRS))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_beside_jax_nn(tmp_path: Path) -> None:
    output = tmp_path / "records.jsonl"
    jax_nn.main(["--set", "tiny", "--rounds", "2", "--measurement-ms", "0.1", "--output", str(output), "--commit", "0"])
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(x["row"], x["mode"]) for x in found] == [("tiny", "forward"), ("tiny", "both")]
    for record in found:
        assert set(record["ms"]) == {jax_nn.OUR_XLA, jax_nn.THEIRS}
        assert [len(times) for times in record["times_ms"].values()] == [2, 2]
        assert record["ratio"] == {
            jax_nn.OUR_XLA: pytest.approx(record["ms"][jax_nn.OUR_XLA] / record["ms"][jax_nn.THEIRS], rel=0.2)
        }
        assert max(record["largest_difference"].values()) < 1e-5


def test_forward_mode_next_to_jax_nn(tmp_path: Path) -> None:
    """A case has a record for each mode, and who cannot run one has an error (here cuDNN, which needs a GPU)."""
    output = tmp_path / "records.jsonl"
    quick = ["--rounds", "2", "--measurement-ms", "0.1", "--warm-up-seconds", "0", "--commit", "0"]
    forward_mode.main(["--set", "tiny", "--rows", "d8-causal-32-float32", "--output", str(output), *quick])
    records = {x["mode"]: x for x in map(json.loads, output.read_text().splitlines())}
    assert tuple(records) == forward_mode.MODES
    for record in records.values():
        assert set(record["ms"]) == {forward_mode.OURS, forward_mode.THEIRS} == set(record["temporaries_mib"])
        assert min(record["cpu_ms"].values()) > 0
        assert set(record["errors"]) == {forward_mode.CUDNN}
        assert record["largest_difference"][forward_mode.OURS] < 1e-5


@pytest.mark.parametrize("mode", forward_mode.MODES)
def test_forward_mode_differentiates_both_alike(mode: str) -> None:
    case = forward_mode.SETS["tiny"]["d8-causal-16-float32"]
    arrays = forward_mode.draw(case)
    names = forward_mode.OURS, forward_mode.THEIRS
    ours, theirs = (jax.tree.leaves(forward_mode.program(name, mode, case)[0](*arrays)) for name in names)
    assert len(ours) == {"forward": 1, "grad": 3, "jvp": 2, "hvp": 3}[mode]
    assert forward_mode.largest_difference(ours, [2 * x for x in ours]) == pytest.approx(0.5)
    assert forward_mode.largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    ("module", "option", "selected", "cases"),
    [
        (forward_mode, "--rows", "gpu", list(forward_mode.SETS["gpu"])),
        (run, "--cases", "models", cases.SETS["models"]),
    ],
)
def test_gpus_share_the_cases(
    module: Any, option: str, selected: str, cases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, list[str]]] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str]):
            started.append((env["CUDA_VISIBLE_DEVICES"], command[command.index(option) + 1 :]))
            assert module.parse_arguments(command[2:]).gpus == 1

        def wait(self) -> int:
            return int(len(started) > 3)

    monkeypatch.setattr(run.subprocess, "Popen", Process)
    module.main(["--set", selected, "--gpus", "3"])
    assert [gpu for gpu, _ in started] == ["0", "1", "2"]
    assert sorted(name for _, names in started for name in names) == sorted(cases)
    with pytest.raises(SystemExit, match="2 of 2 processes failed"):
        module.main(["--set", selected, "--gpus", "2"])


def test_kernels_of_cases_are_prepared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prepared: list[Any] = []

    class Pool:
        def __init__(self, processes: int):
            assert processes == 3

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def map(self, function: Any, specs: Any, chunksize: int) -> None:
            assert (function, chunksize) == (ffi.prepare, 1)
            prepared.extend(specs)

    monkeypatch.setattr(run.multiprocessing, "get_context", lambda _: argparse.Namespace(Pool=Pool))
    names = ["bert-large-mask-bs", "mask-d64-2k"]
    run.main(["--cases", *names, "--prepare", "--processes", "3"])
    assert prepared == kernel_specs([cases.CASES[name] for name in names], "sm_90a")
    assert {spec.op for spec in prepared} == {"prepass", "forward", "backward"}
    assert f"{len(prepared)} kernels of 2 cases" in capsys.readouterr().out


def test_two_devices_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        parallel, "RUNS", {name: parallel.RUNS[name] for name in ("one-key-head", "tensor-one-key-head")}
    )
    monkeypatch.setattr(parallel, "KEY_HEADS", (1,))
    sizes = ["--layers", "1", "--width", "32", "--heads", "4", "--length", "24", "--batch", "2"]
    parallel.main(["--output", str(tmp_path / "record.json"), "--steps", "2", "--commit", "x", "--", *sizes])
    record = json.loads((tmp_path / "record.json").read_text())
    (found,) = record["blocks"].values()
    assert max(found["relative_difference"].values()) < 0.01 and found["collectives"] and not found["gathered"]
    run = record["runs"]["tensor-one-key-head"]
    assert run["largest_difference_of_losses"] < 1e-3 and run["collectives"] and not run["gathered"]
    activations = ["all-gather bf16[2,24,4,8]", "all-gather bf16[48,32]"]
    others = ["all-gather f32[32,241]", "all-gather (f32[16,4]{1,0}, f32[32,4]{1,0})", "all-reduce f32[24]"]
    assert parallel.gathered(dict.fromkeys(activations + others, 1), 24) == activations


def test_texts_of_plain_programs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.refuse_float32(monkeypatch)  # then no kernel is compiled
    grad = lowering.plain_programs()["grad-float32"]
    monkeypatch.setattr(lowering, "plain_programs", lambda: {"grad": grad})
    before, after = tmp_path / "before", tmp_path / "after"
    with pytest.warns(UserWarning, match="float32"):
        lowering.write_texts(before, "sm_90a")
    after.mkdir()
    for path in before.iterdir():
        (after / path.name).write_text(path.read_text())
    assert lowering.compare_texts(before, after)[-1] == "| grad | equal | equal | 0 |"
    text = (after / "grad.cpu.mlir").read_text()
    (after / "grad.cpu.mlir").write_text(text.replace("stablehlo.exponential %", "stablehlo.negate %", 1))
    assert lowering.compare_texts(before, after)[-1] == "| grad | differs, 1 lines less, 1 more | equal | 0 |"
    (after / "grad.cpu.mlir").write_text(re.sub(r"%(\d+)", r"%1\1", text))
    assert lowering.compare_texts(before, after)[-1] == "| grad | differs, 0 lines less, 0 more | equal | 0 |"
