# SPDX-FileCopyrightText: 2026 The jax_fastattn authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables in README.md and docs/benchmarks.md, and the plots, from the records in benchmarks/results/.

    python benchmarks/report.py

README.md has a few cases and a small plot of them, docs/benchmarks.md has all of them. No figure is typed by hand. If a
case was measured again, by the same implementation on the same GPU, the last record counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases import BIASES, GRID, MASKS, MODELS, OTHERS, PACKED
from peers import IMPLEMENTATIONS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
MODES = ("forward", "backward")
UNITS = ("TFLOP/s", "TB/s")
REPORTED = GRID | OTHERS | PACKED | MASKS | BIASES | MODELS
# Cases that have a table and a plot of their own, since they are many.
OTHER_TABLES = {"Masks and segment ids": MASKS, "Biases": BIASES, "Models": MODELS}

Records = dict[tuple[str, str, str], dict[str, Any]]  # by case, mode and implementation


class Page(NamedTuple):
    """A page with tables between its markers.

    Attributes:
        cases: names of the cases in its tables.
        link: the folder of the records as the page links to it; "" if the page shows neither records nor plots.
    """

    path: Path
    cases: Collection[str]
    link: str = ""


# One case of each kind, with those in which a peer is faster.
README_CASES = (
    "d128-causal-4k",
    "d128-causal-16k",
    "d64-causal-4k",
    "d256-causal-4k",
    "gqa-32-8-d128-causal-8k",
    "window-4096-d128-32k",
    "softcap-50-d256-causal-8k",
    "mla-192-128-causal-4k",
    "packed-log-64-8k",
    "bias-t5-base",
    "mask-d64-2k",
    "decode-64x8k-gqa-32-8-d128",
)
PAGES = (
    Page(ROOT / "README.md", README_CASES),
    Page(ROOT / "docs" / "benchmarks.md", REPORTED, "../benchmarks/results"),
)


def load(folder: Path) -> dict[str, Records]:
    """Returns the records of run.py for each GPU; files are read in the order of their names, which begin with a date.

    Records of the tiles of another card are left out. Each record names its file.
    """
    found: dict[str, Records] = {}
    for key, record in load_files(sorted(folder.glob("20*.jsonl"))).items():
        found.setdefault(record["gpu"], {})[key[:3]] = record
    return found


def load_files(paths: Sequence[Path]) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """Returns the records of some files by case, mode, implementation and GPU; the last one counts."""
    found = {}
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if not record.get("arch"):
                key = record["case"], record["mode"], record["impl"], record["gpu"]
                found[key] = record | {"file": path.name}
    return found


def best_peer(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the record of the fastest peer with right results among records of a cell."""
    peers = [x for x in records if not x["impl"].startswith("jax_fastattn") and "ms" in x and x["error"] is None]
    return min(peers, key=lambda record: record["ms"]["p50"], default=None)


def are_level(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether the times of two records overlap, from p20 to p80."""
    return one["ms"]["p20"] <= other["ms"]["p80"] and other["ms"]["p20"] <= one["ms"]["p80"]


def rows(records: Records, modes: Collection[str] = MODES) -> list[str]:
    """Returns the cases that were measured in one of these modes, in the order of cases.py."""
    measured = {case for case, mode, _ in records if mode in modes}
    return [case for case in REPORTED if case in measured]


def columns(records: Records) -> list[str]:
    """Returns the implementations that have a time, in the order of peers.py."""
    return [name for name in IMPLEMENTATIONS if any(key[2] == name and "ms" in x for key, x in records.items())]


def figure(record: dict[str, Any] | None) -> float | None:
    """Returns TFLOP/s, or TB/s when decoding, which memory limits; None without a correct result."""
    if record is None or record["error"] is not None:
        return None
    return record["tb_per_s" if decodes(record["case"]) else "tflops"]


def decodes(case: str) -> bool:
    """Whether the figure of a case is its TB/s."""
    return case.startswith("decode")


def cell(record: dict[str, Any] | None, best: dict[str, Any] | None) -> str:
    """Returns a figure, in bold if it is the best one or level with it; "-" if there is none to measure; else what went
    wrong.
    """
    if record is None or (record["error"] or "").startswith("Unsupported"):
        return "-"
    value = figure(record)
    if value is None:
        return "wrong" if record["error"].startswith("wrong") else "error"
    text = f"{value:.2f}" if decodes(record["case"]) else f"{value:.0f}"
    return f"**{text}**" if best is not None and (record is best or are_level(record, best)) else text


def row(case: str, records: Records, names: Sequence[str]) -> str:
    """Returns a row of a table: forward / backward of each implementation, and the commits of ours."""
    by_mode = []
    for mode in MODES:
        found = [records.get((case, mode, name)) for name in names]
        right = [(value, i) for i, record in enumerate(found) if (value := figure(record)) is not None]
        best = found[max(right)[1]] if right else None
        by_mode.append([cell(record, best) for record in found])
    cells = ["-" if {*pair} == {"-"} else " / ".join(pair) for pair in zip(*by_mode, strict=True)]
    ours = [records.get((case, mode, "jax_fastattn")) for mode in MODES]
    commits = dict.fromkeys(record["commit"][:7] for record in ours if record and record.get("commit"))
    return f"| {case}{' (TB/s)' if decodes(case) else ''} | " + " | ".join([*cells, " / ".join(commits)]) + " |"


def table(title: str, records: Records) -> str:
    """Returns a Markdown table of records of one GPU."""
    names = columns(records)
    dates = sorted({x["date"][:10] for x in records.values()})
    period = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    unit = "TFLOP/s (for decoding TB/s)" if any(map(decodes, rows(records))) else "TFLOP/s"
    lines = [
        f"### {title}",
        "",
        f"Cells have {unit}, forward / backward; higher is better. Dates: {period}.",
        "Bold figures are the best of a mode, or level with it: times overlap from p20 to p80. `-` means no figure.",
        "",
        "| case | " + " | ".join([*names, "commit of ours"]) + " |",
        "|---|" + "---:|" * len(names) + "---|",
        *(row(case, records, names) for case in rows(records)),
    ]
    return "\n".join(lines)


def training(folder: Path, link: str) -> list[str]:
    """Returns the parts of a page about the newest record of train.py, on Hopper: tokens per second."""
    paths = sorted(folder.glob("20*-gpt-sm90-*.json"))
    if not paths:
        return []
    record = json.loads(paths[-1].read_text())
    found = {(run["options"]["length"], run["implementation"]): run for run in record["runs"]}
    names = sorted({name for _, name in found}, key=lambda name: (not name.startswith("jax_fastattn"), name))
    first = record["runs"][0]
    size = first["options"]
    lines = [
        f"The table has tokens per second of a GPT with {size['layers']} layers of width {size['width']}.",
        "",
        "| length | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(names),
    ]
    for length in sorted({length for length, _ in found}):
        rates = [found[length, name]["tokens_per_second"] if (length, name) in found else None for name in names]
        best = max(rate for rate in rates if rate is not None)
        cells = ["-" if x is None else f"**{x:,.0f}**" if x == best else f"{x:,.0f}" for x in rates]
        lines.append(f"| {length} | " + " | ".join(cells) + " |")
    return [
        f"### Training, {first['device']}",
        "\n".join(lines),
        f"Record:\n[{paths[-1].name}]({link}/{paths[-1].name}).",
    ]


def section(cases: Collection[str] = REPORTED, link: str = "", folder: Path = RESULTS) -> str:
    """Returns what stands between the markers of a page; see `Page` for the arguments."""
    parts = []
    for gpu, records in load(folder).items():
        shown = {key: record for key, record in records.items() if key[0] in cases}
        if shown and not link:  # few cases, in one table
            parts.append(table(gpu, shown))
            continue
        if main := plotted(shown):
            parts += [table(gpu, main), f"![The same figures as bars]({link}/{slug(gpu)}.png)"]
        for title, names in OTHER_TABLES.items():
            if chosen := {key: record for key, record in shown.items() if key[0] in names}:
                parts.append(table(f"{title}, {gpu}", chosen))
                parts.append(f"![{title}: the same figures as bars]({link}/{slug(gpu)}-{slug(title)}.png)")
        if shown:
            files = sorted({record["file"] for record in shown.values()})
            parts.append("Records:\n" + ",\n".join(f"[{name}]({link}/{name})" for name in files) + ".")
    parts += training(folder, link) if link else []
    return "\n\n".join(parts) or "There are no records yet."


def plotted(records: Records) -> Records:
    """Returns the records of the cases of the first table of a GPU."""
    return {key: x for key, x in records.items() if not any(key[0] in cases for cases in OTHER_TABLES.values())}


def slug(text: str) -> str:
    """Returns a part of the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().removeprefix("nvidia ")).strip("-")


def summary(records: Records) -> Records:
    """Returns the records of the cases of README.md."""
    return {key: record for key, record in records.items() if key[0] in README_CASES}


def plot(gpu: str, records: Records, path: Path, width: float = 6.5, bar: float = 0.12) -> None:
    """Bars of TFLOP/s, and of TB/s when decoding, by case and implementation, modes side by side.

    Args:
        gpu: the title.
        records: what to show.
        path: of the image.
        width: of a panel, in inches.
        bar: height of a bar, in inches.
    """
    from matplotlib.figure import Figure

    names = columns(records)
    modes = [mode for mode in MODES if rows(records, [mode])]
    most = {unit: max(len(cases_of(unit, records, mode)) for mode in modes) for unit in UNITS}
    heights = {unit: cases for unit, cases in most.items() if cases}
    inches = [cases * (bar * len(names) + 0.2) + 1.0 for cases in heights.values()]
    canvas = Figure(figsize=(width * len(modes), sum(inches) + 0.5), layout="constrained")
    panels = canvas.subplots(len(heights), len(modes), squeeze=False, height_ratios=inches)
    for line, unit in zip(panels, heights, strict=True):
        for axes, mode in zip(line, modes, strict=True):
            draw(axes, records, names, mode, unit)
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    canvas.suptitle(gpu)
    canvas.savefig(path, dpi=110)


def cases_of(unit: str, records: Records, mode: str) -> list[str]:
    """Returns the cases that were measured in a mode, and whose figure has this unit."""
    return [case for case in rows(records, [mode]) if decodes(case) == (unit == "TB/s")]


def draw(axes: Any, records: Records, names: Sequence[str], mode: str, unit: str) -> None:
    """Draws the bars of one mode and one unit; lines go from p20 to p80 of the time."""
    cases = cases_of(unit, records, mode)
    if not cases:
        axes.set_axis_off()
        return
    for i, name in enumerate(names):
        found = [records.get((case, mode, name)) for case in cases]
        shown = [(at, value, x["ms"]) for at, x in enumerate(found) if (value := figure(x)) is not None and x]
        spread = [
            [value * (1 - ms["p50"] / ms["p80"]) for _, value, ms in shown],
            [value * (ms["p50"] / ms["p20"] - 1) for _, value, ms in shown],
        ]
        places = [at + (i - (len(names) - 1) / 2) * 0.8 / len(names) for at, _, _ in shown]
        values = [value for _, value, _ in shown]
        axes.barh(places, values, 0.8 / len(names), xerr=spread, label=name, error_kw={"linewidth": 0.8})
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set(xlabel=unit, title=mode)
    axes.grid(axis="x", alpha=0.3)


def filled(page: Page, folder: Path = RESULTS) -> str:
    """Returns the text of a page, with the tables of today's records between its markers."""
    before, _, rest = page.path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section(page.cases, page.link, folder)}\n\n{END}{after}"


def write(pages: Sequence[Page] = PAGES, folder: Path = RESULTS) -> None:
    """Puts the tables into the pages, and the plots next to the records."""
    for page in pages:
        page.path.write_text(filled(page, folder))
    for gpu, records in load(folder).items():
        if main := plotted(records):
            plot(gpu, main, folder / f"{slug(gpu)}.png")
        for title, names in OTHER_TABLES.items():
            if chosen := {key: record for key, record in records.items() if key[0] in names}:
                plot(f"{title}, {gpu}", chosen, folder / f"{slug(gpu)}-{slug(title)}.png")
        if few := summary(records):
            plot(gpu, few, folder / f"{slug(gpu)}-summary.png", width=4.8, bar=0.05)


if __name__ == "__main__":
    write()
