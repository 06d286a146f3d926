"""Reports whether the state store answers. Owned by the router's `app`."""

from __future__ import annotations

from collections.abc import Callable

from baton.telemetry.metrics import DEGRADED


class StoreHealth:
    """`baton_degraded{component="redis"}`: 1 while any reporter finds the store unavailable."""

    def __init__(self) -> None:
        self._failing: set[str] = set()
        self._show()

    def reporter(self, name: str) -> Callable[[bool], None]:
        """A callback for component `name`; its argument is True while the store is unavailable."""

        def report(degraded: bool) -> None:
            (self._failing.add if degraded else self._failing.discard)(name)
            self._show()

        return report

    def away(self) -> tuple[str, ...]:
        """("redis",) while it is unavailable."""
        return ("redis",) if self._failing else ()

    def _show(self) -> None:
        DEGRADED.labels("redis").set(bool(self._failing))
