"""State transitions are logged at DEBUG, with the ids of their attempt."""

from __future__ import annotations

import logging

import pytest
from structlog.testing import capture_logs

from baton.domain.ids import AttemptId, RequestId
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.transition_log import log_transition
from baton.kv.pages import Hold, PagePool

ID = AttemptId(RequestId("r"), 2)


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    monkeypatch.setattr(logging.getLogger(), "_cache", {})


def export_one() -> None:
    pool = PagePool(1)
    exports = ExportTable(pool, lease_s=1.0)
    exports.open(ID)
    pages = pool.allocate(1, Hold.LIVE)
    assert pages is not None
    exports.publish(ID, pages, now=0.0)
    exports.seal(ID)
    exports.commit(ID)


@pytest.mark.usefixtures("debug")
def test_every_change_of_an_export_is_logged():
    with capture_logs() as lines:
        export_one()
    assert [(line["machine"], line["transition"], line["state"]) for line in lines] == [
        ("export", "seal", "sealed"),
        ("export", "commit", "committed"),
    ]
    assert {(line["request_id"], line["attempt"], line["log_level"]) for line in lines} == {("r", 2, "debug")}


def test_nothing_is_logged_above_debug(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    monkeypatch.setattr(logging.getLogger(), "_cache", {})
    with capture_logs() as lines:
        log_transition("row", ID, "join", "running")
    assert lines == []
