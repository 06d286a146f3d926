"""A histogram cheap enough for every token: one bisection and two additions, without a lock.

One thread adds to a child; `/metrics` reads the counts of all children. `prometheus_client.Histogram` takes two locks
an observation and costs several times as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, HistogramMetricFamily


class FastHistogramChild:
    """The counts of one label set. `counts[i]`: observations at most `bounds[i]` and over `bounds[i - 1]`.

    `exemplars`: the latest one of each bucket that has one.
    """

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None, unix_s: float | None = None) -> None:
        """Adds one observation. `exemplar`: labels of an OpenMetrics exemplar; it stays until the bucket's next one.

        `unix_s`: its time.
        """
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if exemplar is not None:
            self.exemplars[bucket] = Exemplar(dict(exemplar), value, unix_s)


def observe_each(observations: Iterable[tuple[FastHistogramChild, float]]) -> None:
    """Adds observations without exemplars: one call for all stages of a request."""
    for child, value in observations:
        child.counts[bisect_left(child.bounds, value)] += 1
        child.sum += value


class FastHistogram:
    """A histogram metric; registers itself. One without labels has its series from the start."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labelnames = tuple(labelnames)
        self._bounds = tuple(buckets)
        self._children: dict[tuple[str, ...], FastHistogramChild] = {}
        if not self._labelnames:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> FastHistogramChild:
        """The child of these label values; made on first use."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"{self._name} has labels {self._labelnames}, not {values}")
            child = self._children[values] = FastHistogramChild(self._bounds)
        return child

    def observe(self, value: float) -> None:
        """Adds one observation. Raises `ValueError` if the metric has labels."""
        self.labels().observe(value)

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of the buckets, without the last, which has none."""
        return self._bounds

    def counts(self) -> tuple[int, ...]:
        """Observations by bucket, of all children together."""
        return tuple([sum(each) for each in zip(*[child.counts for child in self._children.values()], strict=True)])

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """The metric without samples; part of prometheus_client's collector interface."""
        return [HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The metric with all its children; part of prometheus_client's collector interface."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, child in list(self._children.items()):
            total, buckets = 0, list[tuple[str, float] | tuple[str, float, Exemplar]]()
            for bucket, (bound, count) in enumerate(zip((*self._bounds, "+Inf"), tuple(child.counts), strict=True)):
                total += count
                exemplar = child.exemplars.get(bucket)
                shown = str(bound), float(total)
                buckets.append(shown if exemplar is None else (*shown, exemplar))
            family.add_metric(values, buckets, child.sum)
        return [family]


def quantile(bounds: Sequence[float], counts: Sequence[int], fraction: float) -> float | None:
    """The `fraction` quantile of bucketed observations, linear within a bucket, as Prometheus computes it.

    The last bucket has no upper bound: its quantiles are its lower bound. None without an observation.
    """
    rank, below = fraction * sum(counts), 0
    if not sum(counts):
        return None
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low if index == len(bounds) else low + (bounds[index] - low) * (rank - below) / count
        below += count
    return bounds[-1]
