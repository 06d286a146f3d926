"""Objectives of `--goodput`: a good request meets all of them. Used by `summary`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from baton.services.cli.bench.results.records import RequestRow
from baton.settings.base import SettingsError


class LatencyMetric(StrEnum):
    """The bounded metric, with the names of `vllm bench serve`."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2EL = "e2el"


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """`measure` of a good request is at most `bound_s`."""

    measure: LatencyMetric
    bound_s: float

    def is_met(self, row: RequestRow) -> bool:
        """True if an answered request meets the bound. An answer of one token has no TPOT and meets any bound on it."""
        match self.measure:
            case LatencyMetric.TTFT:
                return row.ttft_s <= self.bound_s
            case LatencyMetric.E2EL:
                return row.e2el_s <= self.bound_s
            case LatencyMetric.TPOT:
                return row.tpot_s is None or row.tpot_s <= self.bound_s


def parse_objectives(words: Iterable[str]) -> tuple[LatencyObjective, ...]:
    """Parses `name:milliseconds`. Raises `SettingsError` naming the first invalid one."""
    return tuple(_parse(word) for word in words)


def is_good(row: RequestRow, objectives: Iterable[LatencyObjective]) -> bool:
    """True if a request was answered and met every objective."""
    return row.failure is None and all(objective.is_met(row) for objective in objectives)


def _parse(word: str) -> LatencyObjective:
    name, _, bound_ms = word.partition(":")
    try:
        objective = LatencyObjective(LatencyMetric(name), float(bound_ms) / 1000.0)
    except ValueError:
        raise _bad(word) from None
    if not objective.bound_s > 0.0:
        raise _bad(word)
    return objective


def _bad(word: str) -> SettingsError:
    names = ", ".join(LatencyMetric)
    return SettingsError(f"--goodput {word}", why=f"it is not one of {names}, a colon and ms", hint="E.g. ttft:500.")
