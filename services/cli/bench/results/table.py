"""The table of one or more runs, a column each. Called by `commands`; `summary` computes the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from baton.services.cli.bench.results.distribution import Distribution
from baton.services.cli.bench.results.summary import RunSummary
from baton.settings.base import SettingsError

_NO_VALUE = "-"
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Metrics and percentiles of the table."""

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]

    @classmethod
    def parse(cls, metrics: str, percentiles: str) -> TableLayout:
        """Parses comma-separated lists. Raises `SettingsError`."""
        names = tuple(name.strip() for name in metrics.split(",") if name.strip())
        if unknown := [name for name in names if name not in _NAMES]:
            why = f"{unknown[0]!r} is none of {', '.join(_NAMES)}"
            raise SettingsError(f"--percentile-metrics {metrics}", why=why, hint="Correct it.")
        try:
            numbers = tuple(float(number) for number in percentiles.split(",") if number.strip())
        except ValueError:
            numbers = (-1.0,)
        if not all(0.0 <= number <= 100.0 for number in numbers):
            why = "percentiles are numbers from 0 to 100"
            raise SettingsError(f"--metric-percentiles {percentiles}", why=why, hint="Correct it.")
        return cls(names, numbers)


def make_table(titles: Sequence[str], summaries: Sequence[RunSummary], shape: TableLayout) -> Table:
    """One column a run. Times are in milliseconds."""
    table = Table(show_header=True)
    table.add_column("")
    for title in titles:
        table.add_column(title, justify="right")
    for name, show in _total_rows():
        table.add_row(name, *map(show, summaries))
    for metric in shape.metrics:
        table.add_section()
        for name, figure in _distribution_rows(shape):
            cells = (_ms(getattr(summary, metric), figure) for summary in summaries)
            table.add_row(f"{_NAMES[metric]} {name} (ms)", *cells)
    return table


def _total_rows() -> tuple[tuple[str, Callable[[RunSummary], str]], ...]:
    return (
        ("requests answered", lambda s: f"{s.num_answered}"),
        ("requests failed", lambda s: f"{s.num_requests - s.num_answered}"),
        ("wall time (s)", lambda s: f"{s.wall_s:.2f}"),
        ("input tokens", lambda s: f"{s.num_input_tokens}"),
        ("output tokens", lambda s: f"{s.num_output_tokens}"),
        ("requests / s", lambda s: f"{s.requests_per_s:.3f}"),
        ("goodput (requests / s)", lambda s: f"{s.goodput.per_s:.3f}" if s.goodput else _NO_VALUE),
        ("attainment (%)", lambda s: f"{s.goodput.attainment:.1%}".rstrip("%") if s.goodput else _NO_VALUE),
        ("output tokens / s", lambda s: f"{s.output_tokens_per_s:.1f}"),
        ("all tokens / s", lambda s: f"{s.total_tokens_per_s:.1f}"),
        ("client's lag p99 (ms)", lambda s: _ms(s.lag, lambda lag: lag.percentile(99))),
    )


def _distribution_rows(shape: TableLayout) -> list[tuple[str, Callable[[Distribution], float]]]:
    figures: list[tuple[str, Callable[[Distribution], float]]] = [("mean", lambda d: d.mean), ("std", lambda d: d.std)]
    return figures + [(f"p{percent:g}", lambda d, p=percent: d.percentile(p)) for percent in shape.percentiles]


def _ms(values: Distribution | None, figure: Callable[[Distribution], float]) -> str:
    return f"{figure(values) * 1000.0:.2f}" if values is not None else _NO_VALUE
