"""The last minutes of routers: latencies, errors, refusals and output tokens. Owned by `view`; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.services.router.cluster.snapshot import ServiceWindow
from baton.telemetry.fast.fast_histogram import quantile
from baton.telemetry.request_trace import Outcome, RequestTrace

WINDOW_S = 300.0
MAX_REQUESTS = 4096
RATE_S = 2.0
"""Span of the rate of output tokens."""
MAX_TOTALS = 400


@dataclass(frozen=True, slots=True)
class _Ended:
    at_s: float
    outcome: Outcome
    replayed: bool
    ttft_us: int | None


@dataclass(frozen=True, slots=True)
class _Totals:
    at_s: float
    num_tokens: int
    itl_counts: tuple[int, ...]


class WindowTotals(msgspec.Struct, frozen=True, array_like=True):
    """What one router adds to a `ServiceWindow`. `itl_counts`: gaps between tokens, by bucket of the ITL histogram."""

    requests: int
    failed: int
    refused: int
    replayed: int
    output_tok_s: float
    ttft_us: list[int]
    itl_counts: list[int]


class RequestWindow:
    """The requests of one router that ended lately."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=MAX_REQUESTS)
        self._totals: deque[_Totals] = deque(maxlen=MAX_TOTALS)

    def add(self, trace: RequestTrace, now: float) -> None:
        """Adds a request that ended."""
        self._ended.append(_Ended(now, trace.outcome, trace.num_attempts > trace.n, trace.ttft_us))

    def observe(self, num_tokens: int, itl_counts: tuple[int, ...], now: float) -> None:
        """Adds the totals of this moment; called about once a second."""
        if not self._totals or now - self._totals[-1].at_s >= RATE_S / 4:
            self._totals.append(_Totals(now, num_tokens, itl_counts))

    def output_tokens_per_s(self, num_tokens: int, now: float) -> float:
        """Output tokens a second over about `RATE_S`, with the total of this moment."""
        base = next((each for each in reversed(self._totals) if now - each.at_s >= RATE_S), None)
        base = base or (self._totals[0] if self._totals else None)
        if base is None or now <= base.at_s:
            return 0.0
        return max(0.0, (num_tokens - base.num_tokens) / (now - base.at_s))

    def totals(self, num_tokens: int, itl_counts: tuple[int, ...], now: float) -> WindowTotals:
        """The window that ends now."""
        while self._ended and now - self._ended[0].at_s > WINDOW_S:
            self._ended.popleft()
        while self._totals and now - self._totals[0].at_s > WINDOW_S:
            self._totals.popleft()
        outcomes = [each.outcome for each in self._ended]
        return WindowTotals(
            requests=len(outcomes),
            failed=outcomes.count(Outcome.FAILED),
            refused=outcomes.count(Outcome.REFUSED),
            replayed=sum(each.replayed for each in self._ended),
            output_tok_s=round(self.output_tokens_per_s(num_tokens, now), 1),
            ttft_us=[each.ttft_us for each in self._ended if each.ttft_us is not None],
            itl_counts=self._new_gaps(itl_counts),
        )

    def _new_gaps(self, itl_counts: tuple[int, ...]) -> list[int]:
        """The gaps between tokens within the window, by bucket."""
        before = self._totals[0].itl_counts if self._totals else ()
        base = before or (0,) * len(itl_counts)
        return [b - a for a, b in zip(base, itl_counts, strict=True)]


def summarize(windows: Sequence[WindowTotals], itl_bounds: Sequence[float]) -> ServiceWindow:
    """The windows of several routers as one; quantiles are those of all their requests together."""
    requests, failed = sum(each.requests for each in windows), sum(each.failed for each in windows)
    refused = sum(each.refused for each in windows)
    served = requests - refused
    gaps = [sum(column) for column in zip(*(each.itl_counts for each in windows if each.itl_counts), strict=True)]
    itl_s = quantile(itl_bounds, gaps, 0.99) if gaps else None
    return ServiceWindow(
        seconds=round(WINDOW_S),
        requests=requests,
        failed=failed,
        refused=refused,
        replayed=sum(each.replayed for each in windows),
        error_ratio=failed / served if served > 0 else 0.0,
        output_tok_s=round(sum(each.output_tok_s for each in windows), 1),
        ttft_p95_ms=_ms(_percentile([us for each in windows for us in each.ttft_us], 0.95)),
        itl_p99_ms=None if itl_s is None else round(1000 * itl_s, 1),
    )


def _percentile(values: list[int], fraction: float) -> int | None:
    """The smallest value that is at least as large as `fraction` of them; None without one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None


def _ms(us: int | None) -> float | None:
    return None if us is None else us / 1000
