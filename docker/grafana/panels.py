"""Panels, expressions, and the panels that several dashboards show."""

from __future__ import annotations

from dataclasses import dataclass

RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Row:
    """A heading."""

    title: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: (expression, legend). `kind`: timeseries, stat or heatmap. `steps`: (value, colour) of a stat."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    exemplars: bool = False
    steps: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard; its file is named after `uid`."""

    uid: str
    title: str
    description: str
    parts: tuple[Row | Panel, ...]


def rate(series: str, by: str = "") -> str:
    """Events a second, summed, by some labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({series}[{RATE}]))"


def of(series: str, label: str, values: str) -> str:
    """A series whose label has one of the values, separated by bars."""
    return f'{series}{{{label}{"=~" if "|" in values else "="}"{values}"}}'


def zero(expression: str) -> str:
    """0 until the first event."""
    return f"{expression} or on () vector(0)"


def quantile(fraction: float, histogram: str, by: str = "", matcher: str = "") -> str:
    """A quantile of a histogram over the last minutes."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({fraction}, sum by ({labels}) (rate({histogram}_bucket{matcher}[{RATE}])))"


def quantiles(histogram: str, by: str, *fractions: float) -> tuple[tuple[str, str], ...]:
    """One query a fraction."""
    return tuple((quantile(f, histogram, by), f"p{f * 100:g} {{{{{by}}}}}") for f in fractions)


def stat(title: str, description: str, unit: str, expression: str, *steps: tuple[float, str]) -> Panel:
    """A number with a small graph."""
    return Panel(title, description, unit, ((expression, title),), kind="stat", width=3, steps=steps)


def heatmap(title: str, description: str, histogram: str, matcher: str = "") -> Panel:
    """Buckets over time; the points are exemplars, with the ids of requests."""
    query = (f"sum by (le) (increase({histogram}_bucket{matcher}[{RATE}]))", "{{le}}")
    return Panel(title, description, "s", (query,), kind="heatmap", width=12, exemplars=True)


STAGES = Panel(
    "Where the time goes",
    "Mean time in each stage; those up to `emit` add up to the time to first token (baton_request_stage_seconds).",
    "s",
    (
        (
            f"{rate('baton_request_stage_seconds_sum', 'stage')} / "
            f"{rate('baton_request_stage_seconds_count', 'stage')}",
            "{{stage}}",
        ),
    ),
    stacked=True,
)
TTFT = Panel(
    "Time to first token",
    "Arrival to first token sent (baton_ttft_seconds). `split`: another worker computed the prompt.",
    "s",
    quantiles("baton_ttft_seconds", "path", 0.5, 0.95, 0.99),
)
FAILURES = Panel(
    "Requests ended per second",
    "By outcome and, for those that did not finish, error code (baton_requests_total).",
    "reqps",
    ((rate("baton_requests_total", "outcome, code"), "{{outcome}} {{code}}"),),
)
RETRIES = Panel(
    "Lost attempts per second",
    "By phase, error code and outcome: retried or given up (baton_retries_total).",
    "ops",
    ((zero(rate("baton_retries_total", "phase, reason, outcome")), "{{phase}} {{reason}} {{outcome}}"),),
)
