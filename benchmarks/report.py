# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables in README.md and the plots from the records in benchmarks/results/. No figure is typed by hand.

    python benchmarks/report.py

Where a case was measured again, by the same implementation on the same GPU, the last record counts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cases import GRID, OTHERS, PACKED
from peers import IMPLEMENTATIONS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

Records = dict[tuple[str, str, str], dict[str, Any]]  # by case, mode and implementation


def load(folder: Path) -> dict[str, Records]:
    """The records of run.py of each GPU, of the files in the order of their names, which begin with a date.

    Those of the tiles of another card are left out.
    """
    found: dict[str, Records] = {}
    for path in sorted(folder.glob("20*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if not record.get("arch"):
                found.setdefault(record["gpu"], {})[record["case"], record["mode"], record["impl"]] = record
    return found


def rows(records: Records) -> list[tuple[str, str]]:
    """Case and mode of each row of a table, in the order of cases.py."""
    measured, cases = {key[:2] for key in records}, GRID | OTHERS | PACKED
    return [(case, mode) for mode in ("forward", "backward") for case in cases if (case, mode) in measured]


def columns(records: Records) -> list[str]:
    """The implementations that have a time, in the order of peers.py."""
    return [name for name in IMPLEMENTATIONS if any(key[2] == name and "ms" in x for key, x in records.items())]


def figure(record: dict[str, Any] | None) -> float | None:
    """TFLOP/s, or TB/s when decoding, which is bound by memory; None without a correct result."""
    if record is None or record["error"] is not None:
        return None
    return record["tb_per_s" if record["case"].startswith("decode") else "tflops"]


def cell(record: dict[str, Any] | None, best: float | None) -> str:
    """A figure, in bold where it is the best; "-" where there is nothing to measure; else what went wrong."""
    if record is None or (record["error"] or "").startswith("Unsupported"):
        return "-"
    value = figure(record)
    if value is None:
        return "wrong" if record["error"].startswith("wrong") else "error"
    text = f"{value:.2f} TB/s" if record["case"].startswith("decode") else f"{value:.0f}"
    return f"**{text}**" if value == best else text


def table(gpu: str, records: Records) -> str:
    """A Markdown table of one GPU: best in bold."""
    names = columns(records)
    dates = sorted({x["date"][:10] for x in records.values()})
    lines = [
        f"### {gpu}",
        "",
        f"TFLOP/s, higher is better; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.",
        "A dash: not measured, or cannot be asked for. Figures of a row may be of different runs: the last ones count.",
        "",
        "| case | mode | " + " | ".join(names) + " |",
        "|---|---|" + "---:|" * len(names),
    ]
    for case, mode in rows(records):
        found = [records.get((case, mode, name)) for name in names]
        best = max((value for value in map(figure, found) if value is not None), default=None)
        lines.append(f"| {case} | {mode} | " + " | ".join(cell(record, best) for record in found) + " |")
    return "\n".join(lines)


def section(folder: Path = RESULTS) -> str:
    """What stands between the markers in README.md."""
    parts = []
    for gpu, records in load(folder).items():
        parts += [table(gpu, records), f"![the same as bars](benchmarks/results/{slug(gpu)}.png)"]
    return "\n\n".join(parts) or "There are no records yet."


def slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def plot(gpu: str, records: Records, path: Path) -> None:
    """Bars of TFLOP/s by case and implementation, modes side by side; lines from p20 to p80 of the time."""
    from matplotlib.figure import Figure

    names = columns(records)
    by_mode: dict[str, list[str]] = {}
    for case, mode in rows(records):
        by_mode.setdefault(mode, []).append(case)
    height = max(len(cases) for cases in by_mode.values()) * (0.12 * len(names) + 0.2) + 1.5
    canvas = Figure(figsize=(6.5 * len(by_mode), height), layout="constrained")
    panels = canvas.subplots(1, len(by_mode), squeeze=False)[0]
    for axes, (mode, cases) in zip(panels, by_mode.items(), strict=True):
        for i, name in enumerate(names):
            found = [records.get((case, mode, name)) for case in cases]
            shown = [(at, x) for at, x in enumerate(found) if x is not None and figure(x) is not None]
            values = [x["tflops"] for _, x in shown]
            spread = [
                [value * (1 - x["ms"]["p50"] / x["ms"]["p80"]) for value, (_, x) in zip(values, shown, strict=True)]
            ]
            spread += [
                [value * (x["ms"]["p50"] / x["ms"]["p20"] - 1) for value, (_, x) in zip(values, shown, strict=True)]
            ]
            places = [at + (i - (len(names) - 1) / 2) * 0.8 / len(names) for at, _ in shown]
            axes.barh(places, values, 0.8 / len(names), xerr=spread, label=name, error_kw={"linewidth": 0.8})
        axes.set_yticks(range(len(cases)), cases, fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="TFLOP/s", title=mode)
        axes.grid(axis="x", alpha=0.3)
    canvas.axes[0].legend(fontsize=8)
    canvas.suptitle(gpu)
    canvas.savefig(path, dpi=110)


def write(readme: Path = ROOT / "README.md", folder: Path = RESULTS) -> None:
    """Puts the tables into the README and the plots beside the records."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{section(folder)}\n\n{END}{after}")
    for gpu, records in load(folder).items():
        plot(gpu, records, folder / f"{slug(gpu)}.png")


if __name__ == "__main__":
    write()
