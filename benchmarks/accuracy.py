# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Measures errors of the output and the gradients, ours and those of peers, against float64.

    python benchmarks/accuracy.py                        # ours and jax.nn's XLA path
    python benchmarks/accuracy.py --implementations jax_fastattn jax.nn-cudnn fa4-jax dew-flash-attn jax.nn-xla
    python benchmarks/accuracy.py --rows                 # errors of rows in float32: a minute on a GPU
    python benchmarks/accuracy.py --report               # makes the tables and plots of docs/numerics.md from records

The draws vary one thing at a time: the spread of logits, a channel of outliers, the length, the head dim, the mask, the
dtype, and in float32 the setting of `jax.default_matmul_precision`, which holds for every implementation. An error is
the root mean square, or the largest element, of the difference to NumPy in float64 on the same rounded operands. Tables
divide it by the error of jax.nn's XLA path in the same dtype and setting. Draws by row also have the median and the
99th percentile of the error of a row over the size of the row.

Each implementation has a process of its own, and all of them run at once: times are not measured. The output is one
record with the errors themselves.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from peers import IMPLEMENTATIONS
from report import RESULTS, ROOT, slug
from run import describe_run

from jax_fastattn.cases.case import Case
from jax_fastattn.cases.kernels import kernel_specs
from jax_fastattn.kernels.support import unsupported_reasons
from jax_fastattn.spec import Operands

RESULT_NAMES = ("out", "dq", "dk", "dv")
KINDS = {"rms": "root-mean-square errors", "max": "largest errors"}
ROW_KINDS = {"median": "medians of the errors of rows", "p99": "99th percentiles of the errors of rows"}
BASELINE = "jax.nn-xla"
PAGE = ROOT / "docs" / "numerics.md"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"

Errors = dict[str, dict[str, float | None]]  # by result, by kind; None for NaN


@dataclass(frozen=True)
class Draw:
    """Random operands.

    Attributes:
        case: sizes, dtype and mask; as many queries as keys.
        spread: the standard deviation of the logits.
        has_outliers: whether channel 7 of the queries is 448, and that of the keys uniform in 1692 to 1880, as in a
            served model.
        large: operands, rows, and factors on all elements of the row.
        falling: rows of the cotangent fall from 1 to 2 to the power of minus this.
        has_rows: whether errors of rows count.
    """

    case: Case = field(default=Case("bfloat16", 1, 1024, 1024, 2, 1, 128))
    spread: float = 1.0
    has_outliers: bool = False
    large: tuple[tuple[str, int, float], ...] = ()
    falling: int = 0
    has_rows: bool = False

    def arrays(self) -> list[np.ndarray]:
        """Returns query, key, value and the cotangent of the output, `[B, T, N, H]`, in the dtype of the case."""
        case, rng = self.case, np.random.default_rng(2026)
        shape = (case.batch, case.query_length, case.num_kv_heads, case.head_dim)
        query, key, value, dout = (rng.standard_normal(shape) for _ in range(4))
        query, key = (x * math.sqrt(self.spread) for x in (query, key))
        if self.has_outliers:
            query[..., 7], key[..., 7] = 448.0, rng.uniform(1692, 1880, shape[:3])
        dout *= np.exp2(-np.linspace(0, self.falling, shape[1]))[:, None, None]
        for name, row, factor in self.large:
            {"query": query, "key": key, "value": value, "dout": dout}[name][:, row] *= factor
        return [x.astype(jax.numpy.dtype(case.dtype)) for x in (query, key, value, dout)]


def _at(length: int = 1024, head_dim: int = 128, **options: Any) -> Case:
    return Case(options.pop("dtype", "bfloat16"), 1, length, length, 2, 1, head_dim, **options)


DRAWS = {f"spread-{spread:g}": Draw(spread=spread) for spread in (1, 3, 11, 30, 1e3, 1e5)}
DRAWS |= {"outlier-channel": Draw(has_outliers=True)}
DRAWS |= {f"length-{length}": Draw(_at(length)) for length in (128, 4096)}
DRAWS |= {f"head-dim-{head_dim}": Draw(_at(head_dim=head_dim)) for head_dim in (64, 256)}
DRAWS |= {f"head-dim-64-spread-{spread}": Draw(_at(head_dim=64), spread) for spread in (3, 11)}
DRAWS |= {"causal": Draw(_at(is_causal=True)), "float16": Draw(_at(dtype="float16"))}
# JAX's settings for products of float32 that differ on a GPU; "high" and "tensorfloat32" are others of the default.
SETTINGS = ("default", "TF32_TF32_F32", "BF16_BF16_F32", "BF16_BF16_F32_X3", "TF32_TF32_F32_X3", "highest")
DRAWS |= {f"float32-{setting}": Draw(_at(dtype="float32", precision=setting)) for setting in SETTINGS}
DRAWS |= {"float32-X3-8192": Draw(_at(8192, dtype="float32", precision="BF16_BF16_F32_X3"))}


def _row_draws(precision: str) -> dict[str, Draw]:
    """Returns the draws of which errors of rows count, in float32 under a setting."""

    def draw(length: int, head_dim: int = 64, spread: float = 1.0, *, is_causal: bool = True, **more: Any) -> Draw:
        case = _at(length, head_dim, dtype="float32", precision=precision, is_causal=is_causal)
        return Draw(case, spread, has_rows=True, **more)

    found = {f"spread-{x:g}-{length}": draw(length, spread=x) for length in (512, 4096) for x in (1, 3, 5, 11)}
    found |= {f"full-{length}": draw(length, is_causal=False) for length in (512, 4096)}
    found |= {
        "head-dim-128": draw(512, 128),
        "head-dim-256": draw(512, 256),
        "head-dim-256-spread-5": draw(512, 256, 5),
    }
    found["cotangent-row"] = draw(512, large=(("dout", 100, 1e3),))
    found["cotangents-fall"] = draw(512, falling=10)
    found["outliers"] = draw(1024, 128, is_causal=False, has_outliers=True)
    found["value-and-cotangent"] = draw(512, large=(("value", 300, 1e3), ("dout", 400, 1e3)))
    found["ranges"] = draw(512, large=(("key", 200, 30.0), ("value", 300, 1e3)), falling=24)
    return found


ROWS = {f"half-{name}": draw for name, draw in _row_draws("TF32_TF32_F32").items()}
ROWS |= {f"x3-{x}": _row_draws("BF16_BF16_F32_X3")[x] for x in ("spread-5-512", "spread-11-4096", "ranges")}
TINY = {f"tiny-{name}": Draw(_at(40, 16), 1.0, name == "outliers") for name in ("plain", "outliers")}
TINY |= {"tiny-float32": Draw(_at(40, 16, dtype="float32", precision="highest"))}
TINY |= {"tiny-rows": Draw(_at(40, 16), large=(("dout", 3, 1e3),), falling=10, has_rows=True)}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["jax_fastattn", BASELINE], metavar="NAME"
    )
    parser.add_argument("--draws", nargs="+", choices=DRAWS | ROWS | TINY, default=list(DRAWS), metavar="DRAW")
    parser.add_argument("--rows", dest="draws", action="store_const", const=list(ROWS), help="draws by row")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/accuracy-<date>-<gpu>.json")
    parser.add_argument("--report", action="store_true", help="write tables and plots of all records, measure nothing")
    parser.add_argument("--arch", help="what a Hopper GPU counts as: sm_90-a100, sm_90-rtx or sm_90 (portable kernels)")
    parser.add_argument("--commit", help="to record, where this is not a git checkout")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    if options.report:
        write(PAGE, RESULTS)
        return
    if options.arch:
        from testing.borrow import borrow  # tests are importable since `run` is imported

        borrow(options.arch)
    if len(options.implementations) > 1:
        found = _apart(options.implementations, options.draws, options.arch)
    else:
        found = measured(options.implementations[0], options.draws)
    record = {"benchmark": "accuracy", "errors": found} | describe_run(options.commit) | {"arch": options.arch}
    parts = [record["date"][:10], slug(record["gpu"]), options.arch]
    output = options.output or RESULTS / f"accuracy-{'-'.join(filter(None, parts))}.json"
    output.write_text(json.dumps(record, indent=1) + "\n")
    if len(options.implementations) > 1:
        print(*(table(record, kind) for kind in kinds(record)), f"the record is {output}", sep="\n\n")


def _apart(names: list[str], draws: list[str], arch: str | None) -> dict[str, dict[str, Any]]:
    """Returns the errors by draw and implementation, which processes of their own measure."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{i}.json") for i, name in enumerate(names)}
        command = [sys.executable, __file__, "--commit", "none", *(["--arch", arch] if arch else []), "--draws", *draws]
        processes = [
            subprocess.Popen([*command, "--implementations", name, "--output", str(path)], env=environment)
            for name, path in paths.items()
        ]
        if any([process.wait() for process in processes]):
            sys.exit("a process failed; see above")
        parts = [json.loads(path.read_text())["errors"] for path in paths.values()]
    return {draw: {name: x for part in parts for name, x in part[draw].items()} for draw in draws}


def measured(name: str, draws: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the errors of one implementation by draw; for the baseline also the sizes of exact results."""
    chosen = {draw: (DRAWS | ROWS | TINY)[draw] for draw in draws}
    if name == "jax_fastattn" and jax.default_backend() == "gpu":
        prepare(draw.case for draw in chosen.values())
    found: dict[str, dict[str, Any]] = {}
    for label, draw in chosen.items():
        arrays = draw.arrays()
        exact = exact_results(draw.case, *arrays)
        found[label] = {"exact": errors(exact, [np.zeros_like(x) for x in exact])} if name == BASELINE else {}
        try:
            if IMPLEMENTATIONS[name].version() is None:
                raise ModuleNotFoundError("not installed")
            results = [np.asarray(x).astype(np.float64) for x in program(name, draw.case)(*arrays)]
            found[label][name] = errors(results, exact, by_row=draw.has_rows)
        except Exception as error:  # whatever a peer raises is its record
            found[label][name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return found


def prepare(cases: Iterable[Case]) -> None:
    """Compiles our kernels in several processes, since one would take a minute."""
    from jax_fastattn import ffi

    arch = ffi.arch() or "sm_90a"
    specs = kernel_specs([case for case in cases if not unsupported_reasons(case.problem(), arch)], arch)
    with multiprocessing.get_context("spawn").Pool(min(len(specs), os.cpu_count() or 1)) as pool:
        pool.map(ffi.prepare, specs, chunksize=1)


@functools.cache
def program(name: str, case: Case) -> Callable[..., list[jax.Array]]:
    """Returns a compiled function of query, key, value and dout to the output and the three gradients."""
    attend = IMPLEMENTATIONS[name].attend

    def function(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> list[jax.Array]:
        with jax.default_matmul_precision(case.precision):
            out, pullback = jax.vjp(lambda *x: attend(case, Operands(*x)), query, key, value)
            return [out, *pullback(dout.astype(out.dtype))]

    return jax.jit(function)


def exact_results(
    case: Case, query: np.ndarray, key: np.ndarray, value: np.ndarray, dout: np.ndarray
) -> list[np.ndarray]:
    """Returns the output and the gradients in float64, head by head."""
    query, key, value, dout = (x.astype(np.float64) for x in (query, key, value, dout))
    results = [np.zeros_like(x) for x in (value, query, key, value)]
    out, dquery, dkey, dvalue = results
    scale, hidden = case.head_dim**-0.5, np.triu(np.ones((case.query_length, case.key_length), bool), 1)
    for head in np.ndindex(case.batch, case.num_kv_heads):
        at = (head[0], slice(None), head[1])
        logits = scale * query[at] @ key[at].T  # [T, S]
        if case.is_causal:
            logits[hidden] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[at] = weights @ value[at]
        dvalue[at] = weights.T @ dout[at]
        dweights = dout[at] @ value[at].T
        dlogits = weights * (dweights - np.sum(dout[at] * out[at], axis=1, keepdims=True))
        dquery[at], dkey[at] = scale * dlogits @ key[at], scale * dlogits.T @ query[at]
    return results


def errors(results: list[np.ndarray], exact: list[np.ndarray], *, by_row: bool = False) -> Errors:
    """Returns the root mean square and the largest of the differences, and statistics of rows."""
    found: Errors = {}
    for name, x, y in zip(RESULT_NAMES, results, exact, strict=True):
        difference = x - y
        values = {"rms": float(np.sqrt(np.mean(difference**2))), "max": float(np.abs(difference).max())}
        if by_row:
            error, size = (np.sqrt((z**2).mean(-1)) for z in (difference, y))
            # Causal masks leave rows of dq 0. Errors of rows that are almost 0 are another question.
            counts = size > 1e-12 * size.max()
            relative = error[counts] / size[counts]
            values |= {"median": float(np.median(relative)), "p99": float(np.percentile(relative, 99))}
        found[name] = {kind: float(f"{z:.3g}") if math.isfinite(z) else None for kind, z in values.items()}
    return found


def kinds(record: dict[str, Any]) -> dict[str, str]:
    """Returns the kinds of errors of a record, and their titles."""
    rows = any("p99" in x["out"] for row in record["errors"].values() for x in row.values() if "out" in x)
    return KINDS | (ROW_KINDS if rows else {})


def columns(record: dict[str, Any]) -> list[str]:
    """Returns the implementations of a record that have a result, without the baseline."""
    found = [name for name in IMPLEMENTATIONS if name != BASELINE]
    return [name for name in found if any("out" in row.get(name, {}) for row in record["errors"].values())]


def ratio(row: dict[str, Any], name: str, result: str, kind: str) -> float | None:
    """Returns an error over that of the baseline; None if there is none, NaN if the results are not finite."""
    if "out" not in row.get(name, {}) or "out" not in row[BASELINE]:
        return None
    error, base = row[name][result][kind], row[BASELINE][result][kind]
    if error is None:
        return math.nan
    return error / base if base else (1.0 if error == 0 else math.inf)


def table(record: dict[str, Any], kind: str) -> str:
    """Returns a Markdown table: errors of the baseline relative to the size of results, and ratios of the others.

    Where the baseline has no result, errors of the others are relative to the size of results, too.
    """
    names = columns(record)
    header = ["draw", "jax.nn XLA, relative", *names]
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for draw, row in record["errors"].items():
        if kind in ROW_KINDS and not any(kind in x.get("out", {}) for x in row.values()):
            continue
        cells = [draw, _relative(row, BASELINE, kind)]
        for name in names:
            ratios = [ratio(row, name, x, kind) for x in RESULT_NAMES]
            shown = [x for x in ratios if x is not None]
            cells.append(" / ".join(f"{x:.2g}" for x in shown) or _alone(row, name, kind))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _alone(row: dict[str, Any], name: str, kind: str) -> str:
    found = _relative(row, name, kind)
    return found if found == "-" else f"{found}, relative"


def _relative(row: dict[str, Any], name: str, kind: str) -> str:
    """Returns the errors of an implementation over the root mean square of each exact result."""
    if "out" not in row.get(name, {}):
        return "-"
    # Errors of rows are relative already.
    sizes = {x: 1.0 if kind in ROW_KINDS else row["exact"][x]["rms"] for x in RESULT_NAMES}
    found = {x: (row[name][x][kind], sizes[x]) for x in RESULT_NAMES}
    return " / ".join("nan" if error is None else f"{error / size:.2g}" for error, size in found.values())


def section(path: Path) -> str:
    """Returns the part of the page about one record."""
    record = json.loads(path.read_text())
    link = f"../benchmarks/results/{path.name}"
    missing = {name: x["error"] for row in record["errors"].values() for name, x in row.items() if "error" in x}
    tiles = f", tiles of {record['arch']}" if record.get("arch") else ""
    header = f"### {record['gpu']}, {record['date'][:10]}{tiles}"
    parts = [header, f"[Record]({link}) of commit {record['commit'][:7]}."]
    if missing:
        reasons = ", ".join(f"{name} ({error})" for name, error in sorted(missing.items()))
        parts[-1] += f" Some draws have no result of {reasons}."
    for kind, title in kinds(record).items():
        parts += [f"Ratios of {title}, output / dq / dk / dv:", table(record, kind)]
    return "\n\n".join([*parts, f"![The ratios of root-mean-square errors]({link.removesuffix('json')}png)"])


def plot(record: dict[str, Any], path: Path) -> None:
    """Draws the ratios of root-mean-square errors by draw, a panel for each result."""
    from matplotlib.figure import Figure

    canvas, names = Figure(figsize=(11, 6.5), layout="constrained"), columns(record)
    draws = list(record["errors"])
    for axes, result in zip(canvas.subplots(2, 2).flat, RESULT_NAMES, strict=True):
        for name, marker in zip(names, "os^Dvx*+", strict=False):
            shown = [ratio(row, name, result, "rms") for row in record["errors"].values()]
            axes.plot(draws, [math.nan if x is None else x for x in shown], marker, label=name, markersize=5)
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set(yscale="log", title=result, ylabel="error / that of jax.nn's XLA path")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.4), max(high, 2.5))  # else equal errors would fill a panel
        axes.tick_params(axis="x", rotation=60, labelsize=8)
        axes.grid(axis="y", alpha=0.3)
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=max(len(labels), 1), fontsize=8)
    canvas.savefig(path, dpi=100)


def filled(page: Path, folder: Path) -> str:
    """Returns the text of the page with the tables of all records between its markers."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [section(path) for path in sorted(folder.glob("accuracy-*.json"), reverse=True)]
    return "\n\n".join([before + BEGIN, *parts, END + after])


def write(page: Path, folder: Path) -> None:
    """Writes the tables into the page and the plots next to the records."""
    page.write_text(filled(page, folder))
    for path in folder.glob("accuracy-*.json"):
        plot(json.loads(path.read_text()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
