"""The publisher with real subscribers: order, gaps that are replayed, bounds, and requests that make no sense."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq

from baton.domain.ids import PageKey
from baton.kv.events.event import CacheEvent, PageContent, RemovedEvent, StoredEvent
from baton.settings.choices import KvEventsFormat
from baton.worker.kv_events.publisher import KvEventPublisher, PublisherEndpoints

WAIT_MS = 20_000
SHORT_MS = 50
ANYWHERE = "tcp://127.0.0.1:*"


def page(number: int) -> StoredEvent:
    return StoredEvent(PageKey(number.to_bytes(16, "big")), None, PageContent((number, number)))


@dataclass
class Subscriber:
    """Reads as a consumer of vLLM's events does."""

    publisher: KvEventPublisher
    context: Any
    topic: str = ""
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, self.topic)
        self.sub.connect(self.publisher.address)

    def read(self, timeout_ms: int = WAIT_MS) -> tuple[int, list[Any]] | None:
        if not self.sub.poll(timeout_ms):
            return None
        topic, number, payload = self.sub.recv_multipart()
        assert topic.decode() == self.topic
        seq = int.from_bytes(number, "big")
        self.seen.append(seq)
        return seq, msgspec.msgpack.decode(payload)[1]

    def wait_until_subscribed(self) -> int:
        """Publishes until a batch arrives; returns its number."""
        while True:
            self.publisher.publish([RemovedEvent(PageKey(bytes(16)))])
            if (found := self.read(SHORT_MS)) is not None:
                break
        while (more := self.read(SHORT_MS)) is not None:
            found = more
        return found[0]

    def replay(self, start: int | bytes) -> dict[int, list[Any]]:
        """Asks for all batches from `start` on. A REQ socket reads one reply only, so a DEALER asks."""
        with self.context.socket(zmq.DEALER) as asker:
            asker.connect(self.publisher.replay_address)
            asker.send_multipart([b"", start if isinstance(start, bytes) else start.to_bytes(8, "big")])
            found: dict[int, list[Any]] = {}
            while asker.poll(WAIT_MS):
                _, number, payload = asker.recv_multipart()
                if int.from_bytes(number, "big", signed=True) == -1:
                    assert payload == b""
                    return found
                found[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload)[1]
            raise AssertionError("the replay did not end")


@contextmanager
def publishing(max_replayed: int | None = None, topic: str = "") -> Iterator[tuple[KvEventPublisher, Any]]:
    endpoints = PublisherEndpoints(ANYWHERE, ANYWHERE, topic)
    publisher = KvEventPublisher(endpoints, 2, KvEventsFormat.ARRAYS, max_replayed)
    context = zmq.Context()
    try:
        yield publisher, context
    finally:
        publisher.close()
        context.destroy(linger=0)


def pages_of(events: list[Any]) -> list[int]:
    return [number for kind, *rest in events if kind == "BlockStored" for number in rest[0]]


def test_a_subscriber_reads_batches_in_order():
    with publishing(topic="kv-events") as (publisher, context):
        subscriber = Subscriber(publisher, context, "kv-events")
        last = subscriber.wait_until_subscribed()
        for number in range(1, 51):
            publisher.publish([page(number)])
        read = [subscriber.read() for _ in range(50)]
        assert [found and found[0] for found in read] == list(range(last + 1, last + 51))
        assert [pages_of(found[1]) for found in read if found] == [[number] for number in range(1, 51)]


def test_the_last_batch_of_a_burst_waits_for_no_other():
    """A wake that is lost would leave it in the publisher until the next turn of the engine."""
    with publishing() as (publisher, context):
        subscriber = Subscriber(publisher, context)
        last = subscriber.wait_until_subscribed()
        for burst in range(1, 401):
            publisher.publish([page(1)])
            publisher.publish([page(2)])
            read = [subscriber.read(2_000) for _ in range(2)]
            assert [found and found[0] for found in read] == [last + 2 * burst - 1, last + 2 * burst]


def test_a_closed_publisher_writes_to_no_descriptor():
    """An engine that hangs may publish after the close, when its descriptor's number is another file's."""
    with tempfile.TemporaryFile() as other:
        with publishing() as (publisher, _):
            number = publisher._wakes
        os.dup2(other.fileno(), number)
        try:
            publisher.publish([page(1)])
            assert os.fstat(number).st_size == 0
        finally:
            os.close(number)


def test_a_gap_is_replayed():
    """A subscriber that comes late, or was away, asks for the numbers that it misses: it then has every event once."""
    with publishing() as (publisher, context):
        for number in range(1, 6):
            publisher.publish([page(number)])
        subscriber = Subscriber(publisher, context)
        first = subscriber.wait_until_subscribed()
        missed = subscriber.replay(0)
        assert sorted(missed)[: first + 1] == list(range(first + 1))
        assert missed[0] == [["AllBlocksCleared"]], "the first batch ends what a former process had"
        assert [pages_of(missed[seq]) for seq in range(1, 6)] == [[number] for number in range(1, 6)]
        assert sorted(subscriber.replay(first)) == list(range(first, max(missed) + 1)), "from a number on"
        assert subscriber.replay(10**6) == {}


def test_as_many_batches_as_promised_are_kept():
    with publishing(max_replayed=10) as (publisher, context):
        for number in range(1, 41):
            publisher.publish([page(number)])
        subscriber = Subscriber(publisher, context)
        last = subscriber.wait_until_subscribed()
        assert sorted(subscriber.replay(0)) == list(range(last - 9, last + 1))


def test_a_replay_is_whole_beyond_the_usual_bound_of_a_socket():
    """ZeroMQ drops silently what exceeds a socket's bound, 1,000 messages by default."""
    with publishing() as (publisher, context):
        for number in range(1, 5001):
            publisher.publish([page(number)])
        subscriber = Subscriber(publisher, context)
        subscriber.wait_until_subscribed()
        assert len(subscriber.replay(1)) >= 5000


@pytest.mark.parametrize("start", [b"", b"1234567", b"123456789"])
def test_a_request_that_makes_no_sense_is_ignored(start: bytes):
    with publishing() as (publisher, context):
        with context.socket(zmq.DEALER) as asker:
            asker.connect(publisher.replay_address)
            asker.send_multipart([b"", start])
            asker.send_multipart([b"x"])
            asker.send_multipart([b"", b"", b"", b""])
            assert not asker.poll(SHORT_MS)
        subscriber = Subscriber(publisher, context)
        subscriber.wait_until_subscribed()
        assert 0 in subscriber.replay(0), "others are served"


def test_publishing_never_waits_for_a_subscriber_that_does_not_read():
    with publishing(max_replayed=10) as (publisher, context):
        subscriber = Subscriber(publisher, context)
        subscriber.wait_until_subscribed()
        numbers = itertools.count()
        for _ in range(20_000):
            events: list[CacheEvent] = [page(next(numbers))]
            publisher.publish(events)
        assert subscriber.replay(0), "the publisher still answers"


def test_close_sends_what_waits_and_frees_the_ports():
    with publishing() as (publisher, context):
        subscriber = Subscriber(publisher, context)
        subscriber.wait_until_subscribed()
        address = publisher.address
    second = KvEventPublisher(PublisherEndpoints(address), 2, KvEventsFormat.MAPS)
    assert second.address == address
    assert second.replay_address == ""
    second.close()


def test_an_address_in_use_is_an_error_and_leaves_nothing_bound():
    with publishing() as (publisher, _), pytest.raises(zmq.ZMQError):
        KvEventPublisher(PublisherEndpoints(ANYWHERE, publisher.replay_address), 2, KvEventsFormat.ARRAYS)
