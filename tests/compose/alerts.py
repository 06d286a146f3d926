"""Alerts of the stack's own Prometheus: which fire, and that none does for longer than any of them waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tests.cluster import plain_client
from tests.compose.waiting import wait_until

OBSERVED_S = 75.0
"""Of the server's clock: longer than the longest wait (`for`, 60 s) of an alert on processes and links."""
POLL_S = 5.0
TIMEOUT_S = 300.0


@dataclass
class Alerts:
    """The HTTP interface of a Prometheus, under its URL."""

    url: str = ""

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        found = self._get("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in found if each["state"] == "firing"}

    def wait_for(self, name: str) -> None:
        """Waits until the alert fires. Raises `TimeoutError`."""
        wait_until(lambda: name in self.firing(), TIMEOUT_S, f"{name} fires")

    def stay_silent(self) -> None:
        """Watches for `OBSERVED_S`. Raises `AssertionError` as soon as an alert fires."""
        began, deadline = self.value("time()"), time.monotonic() + TIMEOUT_S
        while self.value("time()") < began + OBSERVED_S:
            assert (firing := self.firing()) == set(), f"alerts fire: {', '.join(sorted(firing))}"
            assert time.monotonic() < deadline, "the clock of Prometheus stands"
            time.sleep(POLL_S)  # an evaluation

    def value(self, expression: str) -> float:
        """The smallest value of the expression's series now; NaN without one."""
        found = self._get("query", query=expression)
        series = [found["result"]] if found["resultType"] == "scalar" else [each["value"] for each in found["result"]]
        return min((float(value) for _, value in series), default=float("nan"))

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        with plain_client(timeout=10.0) as client:
            answer = client.get(f"{self.url}/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["data"])
