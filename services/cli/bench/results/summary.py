"""Figures of a run and their definitions, computed from its rows alone. Used by `table`.

TTFT: send -> first event with content. ITL: gap between two tokens, of a bundled event divided by its tokens. TPOT:
(E2E - TTFT)/(output tokens - 1). Goodput: requests that met every objective / wall time. Attainment: their share of all
requests sent. Failed requests are in no distribution and never good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.services.cli.bench.results.distribution import Distribution
from baton.services.cli.bench.results.objectives import LatencyObjective, is_good
from baton.services.cli.bench.results.records import RequestRow

MAX_LAG_S = 0.005
"""Bound on the client's lag at the 99th percentile; above it, the client measures itself."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every objective."""

    num_good: int
    per_s: float
    attainment: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """`failures`: reason -> requests. Rates are over `wall_s`: the run's start to the last answer's end."""

    num_requests: int
    num_answered: int
    failures: tuple[tuple[str, int], ...]
    wall_s: float
    num_input_tokens: int
    num_output_tokens: int
    goodput: Goodput | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    lag: Distribution | None

    @property
    def requests_per_s(self) -> float:
        return self.num_answered / self.wall_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    @property
    def total_tokens_per_s(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.wall_s


def summarize(rows: Sequence[RequestRow], objectives: Sequence[LatencyObjective]) -> RunSummary:
    """The figures of a run. Raises `ValueError` for a run without requests."""
    if not rows:
        raise ValueError("a run without requests has no figures")
    answered = [row for row in rows if row.failure is None]
    wall_s = max(row.sent_s + row.ended_s for row in rows)
    return RunSummary(
        num_requests=len(rows),
        num_answered=len(answered),
        failures=tuple(Counter(row.failure for row in rows if row.failure is not None).most_common()),
        wall_s=wall_s,
        num_input_tokens=sum(row.num_prompt_tokens for row in answered),
        num_output_tokens=sum(row.num_output_tokens for row in answered),
        goodput=_goodput(rows, objectives, wall_s) if objectives else None,
        ttft=Distribution.of([row.ttft_s for row in answered]),
        tpot=Distribution.of([row.tpot_s for row in answered if row.tpot_s is not None]),
        itl=Distribution.of([gap_s for row in answered for gap_s in row.itls_s]),
        e2el=Distribution.of([row.e2el_s for row in answered]),
        lag=Distribution.of([row.lag_s for row in rows]),
    )


def lag_verdict(rows: Sequence[RequestRow], *, is_scheduled: bool) -> str | None:
    """Why the run does not count, None if it does. Without a schedule no request is late."""
    lag = Distribution.of([row.lag_s for row in rows])
    if not is_scheduled or lag is None or lag.percentile(99) <= MAX_LAG_S:
        return None
    late_ms, allowed_ms = lag.percentile(99) * 1000.0, MAX_LAG_S * 1000.0
    return (
        f"refused: the client itself sent {late_ms:.1f} ms late at the 99th percentile, over {allowed_ms:.0f} ms. "
        "Give it a core of its own, or lower the rate."
    )


def _goodput(rows: Sequence[RequestRow], objectives: Sequence[LatencyObjective], wall_s: float) -> Goodput:
    num_good = sum(is_good(row, objectives) for row in rows)
    return Goodput(num_good, num_good / wall_s, num_good / len(rows))
