"""Publishes cache events over ZeroMQ as vLLM and SGLang do: a PUB socket, and a ROUTER socket that replays batches.

A message is (topic, number of 8 bytes, batch). A subscriber that misses a number asks the ROUTER socket for the batches
from a number on; they end with number -1. The engine thread hands events over and never waits; a thread of its own
encodes and sends. There is no authentication, and batches hold the tokens of prompts: bind where readers may see them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from baton.kv.events.event import CacheEvent, ClearedEvent
from baton.settings.choices import KvEventsFormat
from baton.telemetry import metrics
from baton.telemetry.logs import get_logger
from baton.worker.kv_events.wire import BatchEncoder, to_wire

log = get_logger()

MAX_REPLAYED_BATCHES = 10_000
MAX_UNREAD_BATCHES = 100_000
"""For a slow subscriber; further ones are dropped for it, and it sees the gap in the numbers."""
MAX_WAITING_BATCHES = 100_000
"""Turns of the engine whose events wait for this thread. Beyond that a batch is lost, and its number missing."""
STOP_S = 2.0
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class PublisherEndpoints:
    """Addresses to bind, such as tcp://127.0.0.1:5557. `replay` None: nothing is replayed."""

    publish: str
    replay: str | None = None
    topic: str = ""


class KvEventPublisher:
    """`publish` is called by one thread, the engine's. `close` ends the thread and frees the ports."""

    def __init__(
        self, endpoints: PublisherEndpoints, page_size: int, format: KvEventsFormat, max_replayed: int | None = None
    ) -> None:
        """Binds. Raises `zmq.ZMQError` if an address cannot be bound."""
        self._topic = endpoints.topic.encode()
        self._page_size = page_size
        self._encoder = BatchEncoder(format)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=max_replayed or MAX_REPLAYED_BATCHES)
        self._waiting: deque[tuple[int, list[CacheEvent]]] = deque()
        self._next_seq = 0
        self._closed = threading.Event()
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, endpoints.publish, MAX_UNREAD_BATCHES)
            self._replay = None
            if endpoints.replay is not None:
                self._replay = self._bind(zmq.ROUTER, endpoints.replay, 2 * (self._sent.maxlen or 0))
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        # No socket of ZeroMQ: one that is full says so for a while after its reader has emptied it.
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="baton-kv-events", daemon=True)
        self._thread.start()
        self.publish([ClearedEvent()])  # what a former process of this worker had is gone

    @property
    def address(self) -> str:
        """The bound address of the PUB socket."""
        return str(self._pub.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def replay_address(self) -> str:
        """The bound address of the ROUTER socket; "" without one."""
        return "" if self._replay is None else str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT))

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Sends the events of a turn as one batch; never blocks. Drops them after `close`: its descriptor is gone."""
        if self._closed.is_set():
            return
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        if len(self._waiting) < MAX_WAITING_BATCHES:
            self._waiting.append((seq, list(events)))
        else:
            metrics.KV_EVENT_BATCHES_TOTAL.labels("lost").inc()
        self._wake()

    def close(self) -> None:
        """Sends what waits, ends the thread and closes the sockets. Bounded in time; call it once."""
        self._closed.set()
        self._wake()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning("kv_events_thread_does_not_end")
            return
        self._context.destroy(linger=0)
        os.close(self._wakes)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # its counter is full: a wake is on its way
            os.eventfd_write(self._wakes, 1)

    def _bind(self, kind: int, address: str, max_unread: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(max_unread)
        socket.bind(address)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            closed = self._closed.is_set()  # before the queue is emptied: nothing comes after it
            if self._wakes in ready:
                os.eventfd_read(self._wakes)
            while self._waiting:
                self._send(*self._waiting.popleft())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay.recv_multipart())
            if closed:
                return

    def _send(self, seq: int, events: list[CacheEvent]) -> None:
        batch = self._encoder.encode(time.time(), to_wire(events, self._page_size))
        self._sent.append((seq, batch))
        self._pub.send_multipart((self._topic, _number(seq), batch))
        metrics.KV_EVENT_BATCHES_TOTAL.labels("published").inc()

    def _answer(self, frames: list[bytes]) -> None:
        """Replays the kept batches from a number on. A request of any other form is ignored."""
        assert self._replay is not None
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            log.warning("kv_events_replay_ignored", frames=[len(frame) for frame in frames])
            return
        reader, start = frames[0], int.from_bytes(frames[2], "big")
        for seq, batch in self._sent:
            if seq >= start:
                self._replay.send_multipart((reader, b"", _number(seq), batch))
        self._replay.send_multipart((reader, b"", END_OF_REPLAY, b""))
        metrics.KV_EVENT_BATCHES_TOTAL.labels("replayed").inc(sum(seq >= start for seq, _ in self._sent))


def _number(seq: int) -> bytes:
    return seq.to_bytes(8, "big")
