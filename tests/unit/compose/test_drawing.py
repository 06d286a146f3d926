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
    shown = {"data": {"result": [{"metric": {}, "value": [0, value]}]}}
    return lambda test, path: boards if path.startswith("/api/search") else shown


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
    with pytest.raises(AssertionError):
        STEPS["grafana"](Stack(Docker(config=MERGED, image="it is here")))


def test_without_an_image_it_is_left_out_and_said():
    test = Stack(Docker(config=MERGED, image=1, pull=1))
    STEPS["grafana"](test)
    assert [event[1] for event in test.events] == ["compose", "image", "pull"]
    assert test.notes == ["left out: its image is not here and cannot be pulled"]
