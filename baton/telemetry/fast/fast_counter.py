"""A counter cheap enough for every request: one addition, without a lock.

One thread adds to a child; `/metrics` reads the values of all children. `prometheus_client.Counter` makes four Python
calls an increment, and takes a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily


class FastCounterChild:
    """The total of one label set."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds `amount`, which is not negative."""
        self.value += amount


class FastCounter:
    """A counter metric with labels; registers itself. `name`: without `_total`."""

    def __init__(self, name: str, documentation: str, labelnames: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._labelnames = tuple(labelnames)
        self._children: dict[tuple[str, ...], FastCounterChild] = {}
        registry.register(self)

    def labels(self, *values: str) -> FastCounterChild:
        """The child of these label values; made on first use, and shown from then on."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"{self._name} has labels {self._labelnames}, not {values}")
            child = self._children[values] = FastCounterChild()
        return child

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The metric without samples; part of prometheus_client's collector interface."""
        return [CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The metric with all its children; part of prometheus_client's collector interface."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for values, child in list(self._children.items()):
            family.add_metric(values, child.value)
        return [family]
