"""Workers that withdrew and workers that were lost, by what the registry showed of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.departures import Departures
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole, WorkerStatus

TTL_S, HEARTBEAT_S = 2.0, 0.5
WORKER = WorkerRecord(WorkerId("d0"), WorkerRole.DECODE, Incarnation(7), "h:1", "m", "f", 16, 512, 100)


def announced(departures: Departures, until: float, status: WorkerStatus = WorkerStatus.READY) -> None:
    """Heartbeats from 0 to `until`, read at once."""
    for number in range(round(until / HEARTBEAT_S) + 1):
        departures.observe([replace(WORKER, announcement=number + 1, status=status)], number * HEARTBEAT_S)


def left_at(gone: float, status: WorkerStatus = WorkerStatus.READY) -> Departures:
    """Its last heartbeat comes at 10; the record stays until `gone`, read all the time."""
    departures = Departures(TTL_S)
    announced(departures, 10.0, status)
    last = replace(WORKER, announcement=21, status=status)
    for step in range(round((gone - 10.0) / 0.1)):
        departures.observe([last], 10.0 + 0.1 * step)
    departures.observe([], gone)
    return departures


@pytest.mark.parametrize("gone", [10.0, 10.1, 10.5])
def test_a_record_that_goes_soon_after_its_heartbeat_was_withdrawn(gone):
    assert left_at(gone).has_withdrawn(WORKER.incarnation)


@pytest.mark.parametrize("gone", [11.5, 12.0, 12.5])
def test_a_record_that_expires_is_a_lost_worker(gone):
    assert not left_at(gone).has_withdrawn(WORKER.incarnation)


def test_a_worker_that_was_draining_is_never_lost():
    assert left_at(12.0, WorkerStatus.DRAINING).has_withdrawn(WORKER.incarnation)


@pytest.mark.parametrize("status", [WorkerStatus.READY, WorkerStatus.DRAINING])
@pytest.mark.parametrize("between", [False, True])
def test_a_worker_that_another_follows_at_once_is_lost(status, between):
    """`between`: a reading has neither. It was killed: who leaves of its own accord is seen draining first."""
    departures = Departures(TTL_S)
    announced(departures, 10.0, status)
    if between:
        departures.observe([], 10.1)
    departures.observe([replace(WORKER, incarnation=Incarnation(8))], 10.2)
    assert departures.has_withdrawn(WORKER.incarnation) is (status is WorkerStatus.DRAINING)


def test_a_worker_that_comes_back_is_judged_anew():
    departures = left_at(10.1)
    departures.observe([replace(WORKER, announcement=30)], 11.0)
    assert not departures.has_withdrawn(WORKER.incarnation)
    departures.observe([replace(WORKER, announcement=30)], 12.9)
    departures.observe([], 13.0)
    assert not departures.has_withdrawn(WORKER.incarnation)


def test_nothing_is_kept_of_a_forgotten_worker():
    departures = left_at(10.1)
    departures.forget(WORKER.incarnation)
    departures.observe([], 20.0)
    assert not departures.has_withdrawn(WORKER.incarnation)
