"""Reads /metrics of processes without a full parser, because it is polled many times a second.

`cluster` polls; phases, checks and the soak read the samples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

BUSY_OWNERS = ("pinned", "live", "reserved", "draining")
OPEN_STATES = ("received", "queued", "reserved", "prefilling", "sealed", "decoding", "interrupted")


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One line."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """One process's metrics at one moment."""

    samples: tuple[MetricSample, ...]

    def sum(self, name: str, **labels: str) -> float:
        """Sum of all samples with these labels; 0 without any."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())

    @property
    def busy_pages(self) -> int:
        """Held pages of a worker."""
        return int(sum(self.sum("baton_kv_pages", owner=owner) for owner in BUSY_OWNERS))

    @property
    def open_requests(self) -> int:
        """Open requests of a router."""
        return int(sum(self.sum("baton_requests_in_state", state=state) for state in OPEN_STATES))


def parse_metrics(text: str) -> ProcessMetrics:
    """Baton's samples in Prometheus' text format."""
    found = (_LINE.match(line) for line in text.splitlines() if line.startswith("baton_"))
    return ProcessMetrics(tuple(MetricSample(m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in found if m))
