"""What is read of a Prometheus: the alerts that fire, and a silence that lasts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.compose.alerts import OBSERVED_S, Alerts
from tests.unit.docker.stack import DOCKER, read_yaml


class Answers(Alerts):
    """Gives prepared answers; its clock goes on by `tick_s` a question."""

    tick_s = OBSERVED_S

    def __init__(self, *alerts: tuple[str, str]) -> None:
        super().__init__("http://nowhere")
        self.now_s = 100.0
        self.alerts = alerts

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        if path == "alerts":
            return {"alerts": [{"labels": {"alertname": name}, "state": state} for name, state in self.alerts]}
        if parameters["query"] == "time()":
            self.now_s += self.tick_s
            return {"resultType": "scalar", "result": [self.now_s, str(self.now_s)]}
        values = {"min(up)": [(1.0, "1")], "both": [(1.0, "3"), (1.0, "2")], "none": []}[parameters["query"]]
        return {"resultType": "vector", "result": [{"value": list(value)} for value in values]}


def test_only_alerts_that_fire_count():
    alerts = Answers(("BatonLinkDown", "pending"), ("BatonWorkerLost", "firing"))
    assert alerts.firing() == {"BatonWorkerLost"}


def test_a_pending_alert_is_silence_and_one_that_fires_is_not():
    Answers(("BatonLinkDown", "pending")).stay_silent()
    alerts = Answers(("BatonLinkDown", "firing"))
    alerts.tick_s = 1.0
    with pytest.raises(AssertionError, match="BatonLinkDown"):
        alerts.stay_silent()


@pytest.mark.parametrize(("expression", "expected"), [("min(up)", 1.0), ("both", 2.0)])
def test_the_smallest_series_is_the_value(expression: str, expected: float):
    assert Answers().value(expression) == expected


def test_without_a_series_there_is_no_number():
    assert math.isnan(Answers().value("none"))


def test_the_silence_outlasts_alerts_on_processes_and_links():
    """A drained worker that is still a target, or a link of it that counts as down, would show within the silence."""
    groups = read_yaml(DOCKER / "prometheus" / "alerts.yml")["groups"]
    (reachable,) = (group["rules"] for group in groups if group["name"] == "reachable")
    names = (
        "BatonProcessDown",
        "BatonTargetGone",
        "BatonLinkDown",
        "BatonSlowPath",
        "BatonNoReadyPair",
        "BatonDegraded",
    )
    waits = {rule["alert"]: rule.get("for", "0s") for rule in reachable}
    in_seconds = {name: int(waits[name][:-1]) * {"s": 1, "m": 60}[waits[name][-1]] for name in names}
    assert max(in_seconds.values()) < OBSERVED_S - 10
