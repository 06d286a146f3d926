"""The frame of a turn: how long it waits, when pages are checked, and what it counts."""

from __future__ import annotations

import pytest

from baton.domain.worker import WorkerLoad, WorkerRole
from baton.engine import step_metrics
from baton.engine.mailbox import Mailbox
from baton.engine.turn import IDLE_CHECK_S, SLICE_PAUSE_S, EngineTurn
from baton.kv.pages import PagePool
from baton.kv.prefix_cache import PrefixCache

NUM_PAGES = 8


class RecordingMailbox(Mailbox[str]):
    """Remembers for how long it was waited on."""

    def __init__(self) -> None:
        super().__init__(4)
        self.waits: list[float | None] = []

    def take_all(self, timeout_s: float | None) -> list[str]:
        self.waits.append(timeout_s)
        return super().take_all(0.0)


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> RecordingMailbox:
    monkeypatch.setattr(step_metrics, "monotonic_s", lambda: 100.0)
    return RecordingMailbox()


def make(mailbox: RecordingMailbox, on_idle=lambda: None) -> EngineTurn[str]:
    return EngineTurn(WorkerRole.DECODE, PrefixCache(PagePool(NUM_PAGES)), mailbox, on_idle, max_check_pages=4)


def test_an_idle_engine_checks_slice_by_slice_and_then_sleeps(mailbox: RecordingMailbox):
    turn = make(mailbox)
    for _ in range(3):
        turn.take_commands(None)
        turn.end(WorkerLoad(), 0, stepped=False, idle=True)
    turn.take_commands(None)
    assert mailbox.waits == [IDLE_CHECK_S, SLICE_PAUSE_S, None, None]


def test_work_asks_for_another_round(mailbox: RecordingMailbox):
    turn = make(mailbox)
    for idle in (True, True, False):
        turn.end(WorkerLoad(), 0, stepped=False, idle=idle)
    turn.take_commands(None)
    assert mailbox.waits == [IDLE_CHECK_S]


def test_after_a_step_nothing_is_waited_for(mailbox: RecordingMailbox):
    turn = make(mailbox)
    turn.end(WorkerLoad(), 1, stepped=True, idle=False)
    turn.take_commands(105.0)
    turn.end(WorkerLoad(), 1, stepped=False, idle=False)
    turn.take_commands(100.25)
    assert mailbox.waits == [0.0, 0.25]


def test_idleness_is_reported_when_no_request_is_left(mailbox: RecordingMailbox):
    reports: list[bool] = []
    turn = make(mailbox, on_idle=lambda: reports.append(True))
    turn.end(WorkerLoad(), 1, stepped=True, idle=False)
    assert reports == []
    turn.end(WorkerLoad(), 0, stepped=False, idle=False)
    assert reports == [True]
