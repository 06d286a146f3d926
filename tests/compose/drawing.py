"""The step `grafana`: with the files of docker/grafana it has every board, and asks the stack's own Prometheus."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.cluster import plain_client
from tests.compose.engine import DOCKER
from tests.compose.waiting import wait_until

if TYPE_CHECKING:
    from tests.compose.steps import ComposeTest

TIMEOUT_S = 30.0
ARRIVAL_TIMEOUT_S = 120.0
"""Grafana is healthy before it has read its boards, and Prometheus before its first scrape."""
EXPRESSION = "sum(baton_requests_total)"


def grafana(test: ComposeTest) -> None:
    """Grafana is healthy, contained, has the boards of docker/grafana, and reads a value from Prometheus.

    Left out, and said so, where its image is not here and cannot be pulled.
    """
    if not test.project.has_image("grafana"):
        test.notes.append("left out: its image is not here and cannot be pulled")
        return
    test.project.profiles = (*test.project.profiles, "grafana")
    test.project.up()
    test.contained()
    wanted = {json.loads(path.read_text(encoding="utf-8"))["uid"] for path in (DOCKER / "grafana" / "boards").glob("*")}
    wait_until(lambda: boards(test) >= wanted, ARRIVAL_TIMEOUT_S, f"boards {sorted(wanted)}")
    found = boards(test)
    assert found == wanted, f"boards {sorted(found)} instead of {sorted(wanted)}"
    wait_until(lambda: value(test) > 0, ARRIVAL_TIMEOUT_S, f"{EXPRESSION} is not 0 after the calls of the steps before")
    test.notes.append(f"{len(found)} boards, {value(test):.0f} requests")


def boards(test: ComposeTest) -> set[str]:
    """Ids of the boards that Grafana has now."""
    return {board["uid"] for board in ask(test, "/api/search?type=dash-db")}


def value(test: ComposeTest) -> float:
    """The value of `EXPRESSION` from Prometheus, by way of Grafana; 0 before there is one."""
    answer = ask(test, f"/api/datasources/proxy/uid/prometheus/api/v1/query?query={EXPRESSION}")
    return max((float(series["value"][1]) for series in answer["data"]["result"]), default=0.0)


def ask(test: ComposeTest, path: str) -> Any:
    """The answer to a visitor without an account."""
    with plain_client(timeout=TIMEOUT_S) as client:
        answer = client.get(f"{test.grafana_url}{path}")
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:200]}"
    return answer.json()
