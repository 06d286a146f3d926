"""Draws the figures of docs/tuning.md from the tables of docs/results, so that figure and result cannot differ.

    python -m bench.tuning_plots [--results docs/results]

Nothing is measured here. Every value stands as text in its figure, and `tests/unit/bench/test_tuning_plots.py`
compares them with the tables. Needs matplotlib, the extra `bench`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

Row = dict[str, str]
_WIDTH_INCHES = 8.0
_BARS = ("#0a5fb4", "#7438c4", "#0b6e46", "#8a5a00")
_HASH_SALT = "baton"
"""Makes the ids in a file the same in every run."""


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars by group and series; `values[series][group]` as the table has them."""

    title: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class TuningFigure:
    """One file: panels that `panels` makes of the rows of `source`'s tables."""

    name: str
    source: str
    panels: Callable[[Sequence[Row]], Sequence[BarChart]]


def read_rows(page: str) -> list[Row]:
    """Every row of every table of a Markdown page, by the names of its columns."""
    rows: list[Row] = []
    head: list[str] = []
    for line in page.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = cells
        elif not set(line) <= set("|-: "):
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def number(cell: str) -> float:
    """The first number of a cell: `92,072`, `**8.4%**`, `15.1 [13.9, 16.1]`."""
    found = re.search(r"[\d,]*\d(?:\.\d+)?(?:e[+-]\d+)?", cell)
    if found is None:
        raise ValueError(f"{cell!r} has no number")
    return float(found[0].replace(",", ""))


def growth_reserve(rows: Sequence[Row]) -> list[BarChart]:
    """Tokens of 1,000 steps by reserve."""
    chosen = [row for row in rows if "reserve" in row]
    groups = list(dict.fromkeys(row["workload"] for row in chosen))
    reserves = list(dict.fromkeys(row["reserve"] for row in chosen))
    panels = []
    for title, column in (("tokens in 1,000 steps", "tokens"), ("preemptions a request", "preemptions each")):
        values = {name: [row[column] for row in chosen if row["reserve"] == name] for name in reserves}
        panels.append(BarChart(title, [group.replace(", output", "\noutput") for group in groups], values))
    return panels


def chunk_sizes(rows: Sequence[Row]) -> list[BarChart]:
    """Step time and time of the prompt by kind of chunk."""
    chosen = [row for row in rows if "chunks" in row]
    groups = [row["chunks"] for row in chosen]
    steps = {name: [row[column] for row in chosen] for name, column in (("p50", "p50, ms"), ("longest", "longest, ms"))}
    return [
        BarChart("CPU time of a step, ms", groups, steps),
        BarChart("CPU time of the prompt, s", groups, {"prompt": [row["prompt, s"] for row in chosen]}),
    ]


def eviction(rows: Sequence[Row]) -> list[BarChart]:
    """Cached blocks by pool size and policy, a panel for each trace."""
    sizes = [name for name in rows[0] if name != "policy"]
    half = len(rows) // 2
    traces = (("conversation trace: cached blocks, %", rows[:half]), ("synthetic trace: cached blocks, %", rows[half:]))
    return [
        BarChart(
            title, [size.replace(" ", "\n", 1) for size in sizes], {r["policy"]: [r[s] for s in sizes] for r in part}
        )
        for title, part in traces
    ]


def interference(rows: Sequence[Row]) -> list[BarChart]:
    """Gaps between tokens beside long prompts, and their first tokens: all rotations."""
    found = {row["what"]: row["all rotations"] for row in rows if "all rotations" in row}
    modes = ["unchunked", "mixed chunks of 64", "mixed chunks of 32", "mixed chunks of 16", "split"]
    panels = []
    for title, what in (
        ("p99 gap beside long prompts, ms", "beside prompts: p99 gap"),
        ("p50 first token of a prompt, ms", "p50 first token of a prompt"),
    ):
        cells = [found[f"{mode}: {what}"] for mode in modes]
        panels.append(BarChart(title, [mode.replace(" of", "\nof") for mode in modes], {"all rotations": cells}))
    return panels


FIGURES = (
    TuningFigure("growth-reserve", "growth-reserve.md", growth_reserve),
    TuningFigure("chunk-sizes", "step-time.md", chunk_sizes),
    TuningFigure("eviction", "eviction.md", eviction),
    TuningFigure("interference", "interference.md", interference),
)


def draw(panels: Sequence[BarChart], path: Path) -> None:
    """Writes an SVG whose texts stay text. Raises `OSError`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": _HASH_SALT, "font.size": 8}):
        figure = Figure(figsize=(_WIDTH_INCHES, 2.7 * len(panels)), layout="constrained")
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            width = 0.8 / len(panel.values)
            for index, (series, cells) in enumerate(panel.values.items()):
                places = [group + width * index for group in range(len(cells))]
                bars = axes.bar(places, [number(cell) for cell in cells], width, color=_BARS[index], label=series)
                axes.bar_label(bars, [f"{number(cell):g}" for cell in cells], padding=1, fontsize=7)
            middle = width * (len(panel.values) - 1) / 2
            axes.set_xticks([group + middle for group in range(len(panel.groups))], panel.groups)
            axes.set_title(panel.title, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(y=0.25)
            if len(panel.values) > 1:
                axes.legend(frameon=False, ncols=len(panel.values), loc="upper right")
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    results = parser.parse_args().results
    for figure in FIGURES:
        path = results / f"{figure.name}.svg"
        draw(figure.panels(read_rows((results / figure.source).read_text(encoding="utf-8"))), path)
        Console(stderr=True).print(f"wrote {path}")


if __name__ == "__main__":
    main()
