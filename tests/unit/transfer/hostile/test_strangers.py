"""Page connections with hostile callers, sources that send more than they were asked for, and resolvers that hang."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import ClusterTrust
from baton.kv.memory import PageMemory
from baton.rpc.auth_interceptor import RejectedCall
from baton.rpc.channel import call_token_issuer
from baton.rpc.gen import handoff_pb2
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.stream import TRANSPORT, page_connection, page_server, page_wire
from baton.transfer.stream.host_lookup import HostLookup
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.page_connection import CannotConnect, PageConnections
from baton.transfer.stream.source import PageEndpoint, StreamSource
from tests.unit.transfer.rigs import EventLog, page_ids
from tests.unit.transfer.source_process import filled_memory

INCARNATION, TRUST = Incarnation(7), ClusterTrust(b"the secret")
NUM_PAGES, PAGE_BYTES = 8, 4096
WAIT_S = 20.0
PREFILL = WorkerId("p")
UNREACHABLE = "127.0.0.1:9"  # no gRPC server: reads must not get there


@pytest.fixture
def memory() -> PageMemory:
    return filled_memory(NUM_PAGES, PAGE_BYTES, seed=3)


@pytest.fixture
def source(memory: PageMemory) -> Iterator[StreamSource]:
    with closing(StreamSource(INCARNATION, memory, TRUST)) as source:
        yield source


def connect(source: StreamSource) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(source.metadata())), WAIT_S)


def request_for(*pages: int) -> bytes:
    """A whole request, with a token of its own."""
    body = handoff_pb2.ReadPagesRequest(incarnation=INCARNATION, pages=pages).SerializeToString()
    return page_wire.MAGIC + call_token_issuer(TRUST, INCARNATION).issue(page_wire.METHOD, body) + body


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def pull(metadata: bytes, memory: PageMemory, deadline_s: float = WAIT_S) -> PullEvent:
    """Pulls pages 5 and 6 to pages 0 and 1, by a page connection or not at all."""
    events = EventLog()
    with closing(StreamPuller(memory, events, TRUST)) as puller:
        puller.connect(SourceInfo(PREFILL, INCARNATION, UNREACHABLE, TRANSPORT, metadata, 0, NUM_PAGES, PAGE_BYTES))
        one = Pull(1, PREFILL, page_ids([5, 6]), page_ids([0, 1]), None, deadline_s)
        puller.submit(one)
        return events.terminal(one)


def test_callers_that_prove_nothing_take_no_place_of_readers(
    source: StreamSource, memory: PageMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are places, and each one stays: threads and connections are bounded, and pages come."""
    monkeypatch.setattr(page_server, "FIRST_REQUEST_S", 600.0)
    monkeypatch.setattr(page_server, "MAX_STRANGERS", 4)
    monkeypatch.setattr(page_server, "MAX_CONNECTIONS", 12)
    with ExitStack() as held:
        for _ in range(40):
            held.enter_context(connect(source))
        until(lambda: 0 < source.num_connections <= 4)
        other = PageMemory(NUM_PAGES, PAGE_BYTES)
        assert pull(source.metadata(), other).outcome is PullOutcome.DONE
        assert [other.page(0), other.page(1)] == [memory.page(5), memory.page(6)]
        assert sum(thread.name == "baton-pages" for thread in threading.enumerate()) <= 12 + 1


def test_a_flood_ends_no_reader_that_has_proved_itself(
    source: StreamSource, memory: PageMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "MAX_STRANGERS", 2)
    with connect(source) as reader, ExitStack() as held:
        for _ in range(3):
            reader.sendall(request_for(1))
            head = page_wire.receive(reader, page_wire.HEAD.size, time.monotonic() + WAIT_S)
            assert page_wire.HEAD.unpack(head) == (page_wire.PAGES, PAGE_BYTES)
            assert page_wire.receive(reader, PAGE_BYTES, time.monotonic() + WAIT_S) == bytes(memory.page(1))
            for _ in range(6):
                held.enter_context(connect(source))
            until(lambda: source.num_connections <= 3)


def test_a_request_that_comes_byte_by_byte_is_hung_up_on(memory: PageMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is whole: a whole one of these bytes would be counted as malformed."""
    monkeypatch.setattr(page_server, "FIRST_REQUEST_S", 0.2)
    rejected: list[RejectedCall] = []
    endpoint = PageEndpoint(on_rejected=rejected.append)
    with closing(StreamSource(INCARNATION, memory, TRUST, endpoint)) as source, connect(source) as slow:

        def is_ended() -> bool:
            try:
                slow.sendall(page_wire.MAGIC[:1])
            except OSError:
                return True
            return False

        until(is_ended)
    assert rejected == []


class TalkativeSource:
    """Answers every request of a connection with `answer` and `extra`; counts connections."""

    def __init__(self, answer: bytes, extra: bytes) -> None:
        self._answer = answer + extra
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.num_connections = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            connection.settimeout(WAIT_S)
            while connection.recv(65536):
                connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.close()


def test_bytes_that_nobody_asked_for_are_no_part_of_a_later_answer() -> None:
    """The bytes after an answer look like another one: with the wrong page in it."""
    answer = page_wire.HEAD.pack(page_wire.PAGES, 4)
    with closing(TalkativeSource(answer + b"good", answer + b"evil")) as source:
        connections = PageConnections(source.address, call_token_issuer(TRUST, INCARNATION))
        with closing(connections):
            for number in (1, 2):
                deadline, target = time.monotonic() + WAIT_S, bytearray(4)
                with connections.request(b"x", 4, deadline) as connection:
                    connection.read_into([memoryview(target)], deadline)
                    until(lambda used=connection: not used.usable)  # type: ignore[misc]
                assert target == b"good"
                assert source.num_connections == number


def test_a_reader_probes_its_idle_connections(memory: PageMemory, source: StreamSource) -> None:
    """A half-open one is found by the system, not by a read that waits for its deadline."""
    connections = PageConnections(("127.0.0.1", int(source.metadata())), call_token_issuer(TRUST, INCARNATION))
    body = handoff_pb2.ReadPagesRequest(incarnation=INCARNATION).SerializeToString()
    with closing(connections), connections.request(body, 0, time.monotonic() + WAIT_S) as connection:
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


class HangingResolver:
    """A `getaddrinfo` that answers no name until it is released. Numbers need no resolver."""

    def __init__(self, real: Any, patch: pytest.MonkeyPatch) -> None:
        self._real = real
        self.released = threading.Event()
        self.num_lookups = 0
        patch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, port: int, **options: Any) -> Sequence[Any]:
        if options.get("flags", 0) & socket.AI_NUMERICHOST or host != "slow.example":
            return self._real(host, port, **options)
        self.num_lookups += 1
        self.released.wait(WAIT_S)
        return self._real("127.0.0.1", port, **options)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingResolver]:
    resolver = HangingResolver(socket.getaddrinfo, monkeypatch)
    yield resolver
    resolver.released.set()


def test_a_resolver_that_hangs_holds_no_reader(
    source: StreamSource, resolver: HangingResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither past the deadline of its pull, nor for longer than a connection may take. The lookup goes on alone."""
    monkeypatch.setattr(page_connection, "CONNECT_S", 0.1)
    metadata = b"slow.example:" + source.metadata()
    event = pull(metadata, PageMemory(NUM_PAGES, PAGE_BYTES))
    assert not resolver.released.is_set()
    assert event.outcome is PullOutcome.FAILED
    assert "UNAVAILABLE" in event.reason, "of the call that it falls back to"
    connections = PageConnections(("slow.example", int(source.metadata())), call_token_issuer(TRUST, INCARNATION))
    with closing(connections):
        for _ in range(3):
            with (
                pytest.raises(CannotConnect, match=r"slow\.example"),
                connections.request(b"", 0, time.monotonic() + WAIT_S),
            ):
                pass
        with pytest.raises(TimeoutError), connections.request(b"", 0, time.monotonic() + 0.05):
            pass
        assert resolver.num_lookups == 2, "one of each link, however many wait"
        resolver.released.set()
        body = handoff_pb2.ReadPagesRequest(incarnation=INCARNATION).SerializeToString()
        monkeypatch.setattr(page_connection, "CONNECT_S", WAIT_S)
        with connections.request(body, 0, time.monotonic() + WAIT_S):
            pass


def test_a_host_is_looked_up_anew_and_a_number_never(resolver: HangingResolver) -> None:
    resolver.released.set()
    lookup = HostLookup("slow.example", 5)
    assert [lookup.addresses(WAIT_S) for _ in range(2)] == [[(socket.AF_INET, ("127.0.0.1", 5))]] * 2
    assert resolver.num_lookups == 2
    assert HostLookup("::1", 5).addresses(0.0) == [(socket.AF_INET6, ("::1", 5, 0, 0))]


def test_a_process_without_threads_cannot_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="no thread"):
        HostLookup("localhost", 5).addresses(WAIT_S)
