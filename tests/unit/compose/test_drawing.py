"""The step `grafana`: it fails without every board and a value, and is left out only where there is no image."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.compose import drawing
from tests.compose.steps import STEPS
from tests.unit.compose.test_engine import Docker
from tests.unit.compose.test_overlays import Stack
from tests.unit.docker.stack import DOCKER

MERGED = json.dumps({"services": {"grafana": {"image": "grafana/grafana:1"}}})
BOARDS = [{"uid": path.stem} for path in (DOCKER / "grafana" / "boards").glob("*.json")]


def answers(boards: list[dict[str, str]], value: str) -> Any:
    """Grafana's, to the two questions of the step."""
    return late_answers([boards], [shown(value)])


def late_answers(boards: list[list[dict[str, str]]], values: list[list[Any]]) -> Any:
    """Grafana's answers to either question, one after the other; the last one is repeated."""

    def ask(test: Any, path: str) -> Any:
        asked = boards if path.startswith("/api/search") else values
        answer: Any = asked.pop(0) if len(asked) > 1 else asked[0]
        return answer if asked is boards else {"data": {"result": answer}}

    return ask


def shown(value: str) -> list[Any]:
    return [{"metric": {}, "value": [0, value]}]


def test_every_board_and_a_value_are_wanted(monkeypatch):
    monkeypatch.setattr(drawing, "ask", answers(BOARDS, "7"))
    test = Stack(Docker(config=MERGED, image="it is here"))
    STEPS["grafana"](test)
    started = [" ".join(event) for event in test.events if "up" in event]
    assert len(started) == 1
    assert "--profile tracing --profile grafana" in started[0]
    assert ["contained"] in test.events
    assert test.notes == [f"{len(BOARDS)} boards, 7 requests"]


@pytest.mark.parametrize(("boards", "value"), [(BOARDS[1:], "7"), ([*BOARDS, {"uid": "other"}], "7"), (BOARDS, "0")])
def test_a_missing_board_or_value_fails(boards: list[dict[str, str]], value: str, monkeypatch):
    monkeypatch.setattr(drawing, "ask", answers(boards, value))
    monkeypatch.setattr(drawing, "ARRIVAL_TIMEOUT_S", 0.0)
    with pytest.raises((AssertionError, TimeoutError)):
        STEPS["grafana"](Stack(Docker(config=MERGED, image="it is here")))


def test_boards_and_values_that_arrive_after_grafana_is_healthy_count(monkeypatch):
    monkeypatch.setattr(drawing, "ask", late_answers([[], BOARDS[1:], BOARDS], [[], shown("0"), shown("7")]))
    monkeypatch.setattr("tests.compose.waiting.time.sleep", lambda seconds: None)
    test = Stack(Docker(config=MERGED, image="it is here"))
    STEPS["grafana"](test)
    assert test.notes == [f"{len(BOARDS)} boards, 7 requests"]


def test_without_an_image_it_is_left_out_and_said():
    test = Stack(Docker(config=MERGED, image=1, pull=1))
    STEPS["grafana"](test)
    assert [event[1] for event in test.events] == ["compose", "image", "pull"]
    assert test.notes == ["left out: its image is not here and cannot be pulled"]
