"""A router's series with the label `model`: the routers of several models may share one Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric

_OWN = "baton_"


class ModelRegistry(CollectorRegistry):
    """Shows another registry. Baton's own series get `model` unless they have it; those of others do not."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__()
        self._registry = registry
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Every metric; part of prometheus_client's interface."""
        for family in self._registry.collect():
            if family.name.startswith(_OWN):
                added = {"model": self._model}
                family.samples = [each._replace(labels=added | each.labels) for each in family.samples]
            yield family
