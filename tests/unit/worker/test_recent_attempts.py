"""The ring of recent attempts, and the call that reads it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from baton.domain.ids import AttemptId, Incarnation, RequestId
from baton.domain.timing.attempt_times import DecodeTimes, ImportTimes, PrefillTimes
from baton.rpc import times_codec
from baton.rpc.gen import worker_pb2
from baton.worker.event_log import SharedEventLog
from baton.worker.recent_attempts import RecentAttempts
from baton.worker.server import WorkerServicer

ONE, TWO = AttemptId(RequestId("one"), 1), AttemptId(RequestId("two"), 2)
PREFILL = PrefillTimes(1, 2, 3, ((0, 16),), 16, 0)
IMPORTED = ImportTimes("stream", "stream", 1, 2, 3, 4, 5, 6, 7, "v3", 0)
DECODE = DecodeTimes(3, 2, 1, 0, 0)


def ask(recent: RecentAttempts, request_id: str = "") -> list[worker_pb2.AttemptTimes]:
    servicer = WorkerServicer(Incarnation(1), cast(Any, None), lambda: 0, recent, SharedEventLog(), cast(Any, None))
    request = worker_pb2.RecentAttemptsRequest(request_id=request_id)
    return list(asyncio.run(servicer.RecentAttempts(request, cast(Any, None))).attempts)


def test_the_parts_of_an_attempt_come_together():
    recent = RecentAttempts()
    recent.add(ONE, IMPORTED)
    recent.add(TWO, PREFILL)
    recent.add(ONE, DECODE, "sent_back")
    one, two = ask(recent)
    assert (one.id.request_id, one.id.attempt, one.end_code) == ("one", 1, "sent_back")
    assert times_codec.decode_import_times(one.imported) == IMPORTED
    assert times_codec.decode_decode_times(one.decode) == DECODE
    assert not one.HasField("prefill")
    assert times_codec.decode_prefill_times(two.prefill) == PREFILL


def test_one_request_can_be_asked_for():
    recent = RecentAttempts()
    recent.add(ONE, IMPORTED)
    recent.add(TWO, PREFILL)
    assert [attempt.id.request_id for attempt in ask(recent, "two")] == ["two"]
    assert ask(recent, "three") == []


def test_the_oldest_part_makes_room():
    recent = RecentAttempts(max_parts=2)
    for _ in range(3):
        recent.add(ONE, DECODE)
    recent.add(TWO, DECODE)
    assert len(recent) == 2
    assert list(recent.find()) == [ONE, TWO]
