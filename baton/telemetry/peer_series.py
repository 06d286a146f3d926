"""Series that name a peer, e.g. a link's state. They go when the peer goes, so label sets stay bounded.

The owner of the peers keeps one `PeerSeries`: decode for its links to prefill workers, the router for its workers.
"""

from __future__ import annotations

from typing import Any, TypeVar

from prometheus_client import Counter, Gauge, Histogram

PeerMetric = TypeVar("PeerMetric", Counter, Gauge, Histogram)


class PeerSeries:
    """Owned by one thread."""

    def __init__(self) -> None:
        self._series: dict[str, set[tuple[Any, tuple[str, ...]]]] = {}

    def labels(self, peer: str, metric: PeerMetric, *values: str) -> PeerMetric:
        """The child of `metric` with these label values, noted as a series of `peer`."""
        self._series.setdefault(peer, set()).add((metric, values))
        return metric.labels(*values)

    def drop(self, peer: str, metric: PeerMetric) -> None:
        """Removes the series of `peer` in one metric; idempotent."""
        series = self._series.get(peer, set())
        for each in [each for each in series if each[0] is metric]:
            series.discard(each)
            metric.remove(*each[1])

    def remove(self, peer: str) -> None:
        """Removes every series of `peer`; idempotent."""
        for metric, values in self._series.pop(peer, ()):
            metric.remove(*values)

    def peers(self) -> frozenset[str]:
        """Peers that have series."""
        return frozenset(self._series)
