"""Plots findings: one PNG for every unit of an experiment.

Called by `bench.report`, only where matplotlib is installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.harness.rotations import Finding

_INCHES_A_BAR = 0.38
_WIDTH_INCHES = 9.0
_DPI = 120


def plot_run(name: str, findings: Sequence[Finding], directory: Path) -> list[Path]:
    """Bars with their intervals; hatched where no rotation was steady. Returns the paths. Raises `OSError`."""
    paths = []
    by_unit = sorted(findings, key=lambda finding: finding.unit)
    for unit, group in itertools.groupby(by_unit, key=lambda finding: finding.unit):
        path = directory / f"{name}-{unit.replace('/', '-a-') or 'ratio'}.png"
        _draw(f"{name} ({unit or 'ratio'})", list(group)).savefig(path, dpi=_DPI)
        paths.append(path)
    return paths


def _draw(title: str, findings: Sequence[Finding]) -> Figure:
    figure = Figure(figsize=(_WIDTH_INCHES, 1.4 + _INCHES_A_BAR * len(findings)), layout="constrained")
    axes = figure.subplots()
    for place, finding in enumerate(findings):
        interval = finding.steady or finding.overall
        hatch = None if finding.steady is not None else "//"
        error = [[max(0.0, interval.median - interval.low)], [max(0.0, interval.high - interval.median)]]
        axes.barh(place, interval.median, xerr=error, hatch=hatch, color="tab:blue", alpha=0.8, capsize=3)
    axes.set_yticks(range(len(findings)), [f"{f.name} ({f.num_steady}/{f.num_rotations})" for f in findings])
    axes.invert_yaxis()
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    return figure
