"""Metrics of sessions: how they end, what is on its way, and the round trip."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.rpc.gen import session_pb2 as pb
from baton.session.meter import SessionMeter
from baton.session.outbox import OutboxLimits
from baton.session.session import ROUTER_KINDS, WORKER_KINDS, MessageSession, SessionLimits
from baton.session.tags import ConnectionKeys
from baton.telemetry.metrics import REGISTRY

KEYS = ConnectionKeys(sent=b"s" * 32, received=b"r" * 32)


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def open_session(limits: SessionLimits | None = None) -> MessageSession:
    session = MessageSession(5, ROUTER_KINDS, limits or SessionLimits(), 0.0)
    session.connected(KEYS, 0, 0.0)
    return session


@pytest.mark.parametrize(
    ("end", "event"),
    [
        pytest.param(lambda session: session.lose("scripted"), "lost", id="lost"),
        pytest.param(lambda session: [session.leave("scripted", 0.0), session.broken(0.1)], "closed", id="left"),
    ],
)
def test_a_planned_end_is_not_a_loss(end: Callable[[MessageSession], object], event: str):
    session = open_session()
    meter = SessionMeter(session)
    before = {name: value("baton_session_events_total", event=name) for name in ("lost", "closed")}
    meter.open()
    end(session)
    meter.end()
    meter.end()
    counted = {name: value("baton_session_events_total", event=name) - number for name, number in before.items()}
    assert counted == {"lost": 0.0, "closed": 0.0} | {event: 1.0}


def test_the_window_has_what_was_sent_and_what_waits():
    session = open_session(SessionLimits(outbox=OutboxLimits(window_bytes=1, frame_bytes=1)))
    meter = SessionMeter(session)
    gauges = "baton_session_unacked_bytes", "baton_session_waiting_bytes"
    before = [value(name) for name in gauges]
    meter.open()
    for stream in (1, 2):
        session.post_row(pb.TokenRow(stream=stream, tokens=[7]))
    assert session.take(0.0) is not None
    assert session.take(0.0) is None, "the window is full"
    meter.observe()
    now = [value(name) - number for name, number in zip(gauges, before, strict=True)]
    assert now == [session.outbox.retained_bytes, session.outbox.waiting_bytes]
    assert min(now) > 0
    session.lose("scripted")
    meter.end()
    assert [value(name) for name in gauges] == before


def test_a_round_trip_is_counted_once():
    dialler, listener = MessageSession(5, WORKER_KINDS, SessionLimits(), 0.0), open_session()
    dialler.connected(KEYS.reversed(), 0, 0.0)
    meter = SessionMeter(listener)
    count, total = value("baton_session_rtt_seconds_count"), value("baton_session_rtt_seconds_sum")
    meter.open()
    ping = listener.take(0.6)
    assert ping is not None
    dialler.receive(ping, 0.7)
    pong = dialler.take(0.7)
    assert pong is not None
    listener.receive(pong, 0.8)
    for _ in range(2):
        meter.observe()
    assert value("baton_session_rtt_seconds_count") == count + 1
    assert value("baton_session_rtt_seconds_sum") - total == pytest.approx(0.2)
    listener.lose("scripted")
    meter.end()
