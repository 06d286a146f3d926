"""Page connections: what a source refuses, what a reader makes of a source that lies or ends, and what ends both."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import ClusterTrust, TlsIdentity
from baton.kv.memory import PageMemory
from baton.rpc.auth_interceptor import RejectedCall
from baton.rpc.channel import call_token_issuer
from baton.rpc.gen import handoff_pb2
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.stream import TRANSPORT, link, page_server, page_wire
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.page_connection import CannotConnect, PageConnections, page_address
from baton.transfer.stream.source import PageEndpoint, StreamSource
from tests.unit.transfer.rigs import EventLog, page_ids
from tests.unit.transfer.source_process import filled_memory

INCARNATION, OTHER = Incarnation(7), Incarnation(8)
TRUST, STRANGER = ClusterTrust(b"the secret"), ClusterTrust(b"another secret")
NUM_PAGES, PAGE_BYTES = 8, 4096
WAIT_S = 20.0
PREFILL = WorkerId("p")
UNREACHABLE = "127.0.0.1:9"  # no gRPC server: reads must not get there


@pytest.fixture
def memory() -> PageMemory:
    return filled_memory(NUM_PAGES, PAGE_BYTES, seed=3)


@pytest.fixture
def rejected() -> list[RejectedCall]:
    return []


@pytest.fixture
def source(memory: PageMemory, rejected: list[RejectedCall]) -> Iterator[StreamSource]:
    endpoint = PageEndpoint(on_rejected=rejected.append)
    with closing(StreamSource(INCARNATION, memory, TRUST, endpoint)) as source:
        yield source


def port_of(source: StreamSource) -> int:
    return int(source.metadata())


def request(*pages: int, incarnation: int = INCARNATION) -> bytes:
    return handoff_pb2.ReadPagesRequest(incarnation=incarnation, pages=pages).SerializeToString()


def token(body: bytes, trust: ClusterTrust = TRUST, incarnation: Incarnation = INCARNATION) -> bytes:
    return call_token_issuer(trust, incarnation).issue(page_wire.METHOD, body)


@contextmanager
def connected(source: StreamSource) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port_of(source)), WAIT_S) as connection:
        yield connection


def answer(connection: socket.socket, message: bytes) -> tuple[int, bytes]:
    """Kind and content of the answer to `message`."""
    connection.sendall(message)
    return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    deadline = time.monotonic() + WAIT_S
    kind, length = page_wire.HEAD.unpack(page_wire.receive(connection, page_wire.HEAD.size, deadline))
    return kind, page_wire.receive(connection, length, deadline)


def ended(connection: socket.socket) -> bool:
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_serves_one_request_after_the_other(source: StreamSource, memory: PageMemory) -> None:
    issuer = call_token_issuer(TRUST, INCARNATION)
    with connected(source) as connection:
        for pages in ([3], [0, 7, 7, 1], [2] * 500, []):
            body = request(*pages)
            got = answer(connection, page_wire.MAGIC + issuer.issue(page_wire.METHOD, body) + body)
            assert got == (page_wire.PAGES, b"".join(memory.page(page) for page in pages))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (lambda: b"PRI * HTTP/2.0\r\n".ljust(200, b"x"), "no request for pages"),
        (lambda: page_wire.MAGIC + bytes(104) + request(1), "forged"),
        (lambda: page_wire.MAGIC + token(request(1), STRANGER) + request(1), "forged"),
        (lambda: page_wire.MAGIC + token(request(1), ClusterTrust()) + request(1), "missing"),
        (lambda: page_wire.MAGIC + token(request(1), incarnation=OTHER) + request(1), "other_incarnation"),
        (lambda: page_wire.MAGIC + token(request(1)) + request(2), "not the one"),
        (lambda: page_wire.MAGIC + token(b"\xff" * 4) + b"\xff" * 4, "cannot be read"),
        (lambda: page_wire.MAGIC + token(request(NUM_PAGES)) + request(NUM_PAGES), "outside the pool"),
        (lambda: page_wire.MAGIC + token(request(1, incarnation=OTHER)) + request(1, incarnation=OTHER), "another inc"),
        (lambda: page_wire.MAGIC + token(bytes(1 << 20)), "at most"),
    ],
    ids=["http", "zeros", "stranger", "open", "restarted", "damaged", "garbage", "page", "incarnation", "large"],
)
def test_invalid_requests_are_refused(
    source: StreamSource, rejected: list[RejectedCall], message: Callable[[], bytes], why: str
) -> None:
    """The body of a request that is too large is never read: nobody sends it here."""
    with connected(source) as connection:
        kind, reason = answer(connection, message())
        assert kind == page_wire.REFUSED
        assert why in reason.decode()
        assert ended(connection)
    assert len(rejected) == (why not in ("outside the pool", "another inc"))


def test_a_captured_request_is_refused_on_any_connection(source: StreamSource) -> None:
    message = page_wire.MAGIC + token(request(1)) + request(1)
    with connected(source) as connection, connected(source) as other:
        assert answer(connection, message)[0] == page_wire.PAGES
        assert answer(other, message) == (page_wire.REFUSED, b"the call token is refused: replayed")


def test_a_token_of_the_grpc_call_is_no_token_here(source: StreamSource) -> None:
    issued = call_token_issuer(TRUST, INCARNATION).issue("/baton.v1.Handoff/ReadPages", request(1))
    with connected(source) as connection:
        assert answer(connection, page_wire.MAGIC + issued + request(1))[0] == page_wire.REFUSED


def test_a_silent_caller_is_hung_up_on(source: StreamSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first request, in the middle of a later one, and when it reads nothing of its answer."""
    monkeypatch.setattr(page_server, "FIRST_REQUEST_S", 0.05)
    monkeypatch.setattr(page_server, "REQUEST_S", 0.05)
    monkeypatch.setattr(page_server, "STALL_S", 0.05)
    with connected(source) as silent:
        assert ended(silent)
    with connected(source) as slow:
        assert answer(slow, page_wire.MAGIC + token(request(1)) + request(1))[0] == page_wire.PAGES
        slow.sendall(page_wire.MAGIC)
        assert ended(slow)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port_of(source)))
        many = request(*[1] * 4000)  # 16 MB
        deaf.sendall(page_wire.MAGIC + token(many) + many)
        until(lambda: source.num_connections == 1)
        until(lambda: not source.num_connections)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_too_many_connections_are_hung_up_on(source: StreamSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "MAX_CONNECTIONS", 1)
    with connected(source) as first:
        assert answer(first, page_wire.MAGIC + token(request(1)) + request(1))[0] == page_wire.PAGES
        with connected(source) as second:
            assert ended(second)
    until(lambda: not source.num_connections)
    with connected(source) as third:
        assert answer(third, page_wire.MAGIC + token(request(1)) + request(1))[0] == page_wire.PAGES


def test_a_closed_source_ends_its_connections(source: StreamSource) -> None:
    with connected(source) as idle:
        assert answer(idle, page_wire.MAGIC + token(request(1)) + request(1))[0] == page_wire.PAGES
        source.close()
        source.close()
        assert ended(idle)
        with pytest.raises(OSError, match="refused"), connected(source):
            pass
    assert source.num_connections == 0


def test_a_port_that_is_taken_is_an_error(source: StreamSource, memory: PageMemory) -> None:
    with pytest.raises(LinkBroken, match="cannot listen"):
        StreamSource(INCARNATION, memory, TRUST, PageEndpoint(port=port_of(source)))


def test_pages_of_a_cluster_with_certificates_travel_in_calls(memory: PageMemory) -> None:
    source = StreamSource(INCARNATION, memory, replace(TRUST, tls=TlsIdentity(b"", b"", b"")))
    assert source.metadata() == b""
    source.close()


@pytest.mark.parametrize(
    ("address", "metadata", "expected"),
    [
        ("10.0.0.1:50051", b"", None),
        ("10.0.0.1:50051", b"1234", ("10.0.0.1", 1234)),
        ("[fd00::1]:50051", b"1234", ("fd00::1", 1234)),
        ("10.0.0.1:50051", b"pages.example:99", ("pages.example", 99)),
        ("10.0.0.1:50051", b"[fd00::2]:99", ("fd00::2", 99)),
    ],
)
def test_the_address_follows_from_the_announcement(address, metadata, expected) -> None:
    assert page_address(address, metadata) == expected


@pytest.mark.parametrize("metadata", [b"0", b"65536", b"x", b"host:", b"\xff:1x", b"9" * 5000])
def test_no_other_announcement_is_an_address(metadata: bytes) -> None:
    with pytest.raises(LinkBroken, match="no address"):
        page_address("10.0.0.1:50051", metadata)


# The reading side.


class LyingSource:
    """Answers each connection with the next of `scripts`, after a whole request, and ends it; the last one stays."""

    def __init__(self, *scripts: bytes, holds: bool = False, afterwards: bytes = b"") -> None:
        """`afterwards`: is sent at `close`."""
        self._scripts = list(scripts)
        self._afterwards = afterwards
        self._holds = holds
        self._released = threading.Event()
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for script in self._scripts:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            with connection:
                connection.settimeout(WAIT_S)
                connection.recv(65536)
                connection.sendall(script)
                if self._holds:
                    self._released.wait(WAIT_S)
                    with contextlib.suppress(OSError):
                        connection.sendall(self._afterwards)

    def close(self) -> None:
        self._released.set()
        self._listener.close()
        self._thread.join(WAIT_S)


def info(port: int | bytes, address: str = UNREACHABLE) -> SourceInfo:
    metadata = port if isinstance(port, bytes) else str(port).encode()
    return SourceInfo(PREFILL, INCARNATION, address, TRANSPORT, metadata, 0, NUM_PAGES, PAGE_BYTES)


def pull_two(info: SourceInfo, memory: PageMemory, deadline_s: float = WAIT_S) -> PullEvent:
    events = EventLog()
    with closing(StreamPuller(memory, events, TRUST)) as puller:
        puller.connect(info)
        pull = Pull(1, PREFILL, page_ids([5, 6]), page_ids([0, 1]), None, deadline_s)
        puller.submit(pull)
        return events.terminal(pull)


HEAD = page_wire.HEAD.pack(page_wire.PAGES, 2 * PAGE_BYTES)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (HEAD + bytes(PAGE_BYTES + 1), f"after {PAGE_BYTES + 1} bytes"),
        (page_wire.HEAD.pack(page_wire.PAGES, 3 * PAGE_BYTES), "not 8192"),
        (page_wire.HEAD.pack(9, 2 * PAGE_BYTES), "kind 9"),
        (page_wire.HEAD.pack(page_wire.REFUSED, 1 << 40), "kind 1"),
        (page_wire.HEAD.pack(page_wire.REFUSED, 2) + b"no", "refuses: no"),
    ],
    ids=["half of the pages", "too many", "another kind", "endless reason", "refusal"],
)
def test_a_source_that_lies_or_ends_fails_the_pull(script: bytes, problem: str) -> None:
    with closing(LyingSource(script)) as lying:
        event = pull_two(info(lying.port), PageMemory(NUM_PAGES, PAGE_BYTES))
    assert event.outcome is PullOutcome.FAILED
    assert problem in event.reason


@pytest.mark.parametrize("script", [b"", HEAD[:4]], ids=["nothing", "half a head"])
def test_pages_come_by_calls_where_connections_end_before_an_answer(script: bytes) -> None:
    """As of a source that has too many, or of a proxy with nobody behind it."""
    with closing(LyingSource(script)) as lying:
        event = pull_two(info(lying.port), PageMemory(NUM_PAGES, PAGE_BYTES))
    assert event.outcome is PullOutcome.FAILED
    assert "UNAVAILABLE" in event.reason, "of the call, whose address leads nowhere"


@pytest.mark.parametrize("name", [".nowhere:50061", "a..b:1", "x" * 70 + ":1"])
def test_a_host_that_is_no_name_fails_its_own_pulls_only(name: str, memory: PageMemory, source: StreamSource) -> None:
    events, good, other = EventLog(), WorkerId("good"), PageMemory(NUM_PAGES, PAGE_BYTES)
    with closing(StreamPuller(other, events, TRUST)) as puller:
        puller.connect(info(name.encode()))
        puller.connect(replace(info(port_of(source), "127.0.0.1:9"), worker_id=good))
        pulls = [Pull(n, of, page_ids([5]), page_ids([0]), None, WAIT_S) for n, of in ((1, PREFILL), (2, good))]
        for pull in pulls:
            puller.submit(pull)
        assert [events.terminal(pull).outcome for pull in pulls] == [PullOutcome.FAILED, PullOutcome.DONE]
    assert other.page(0) == memory.page(5)


def test_a_source_without_a_free_thread_serves_again(source: StreamSource, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "baton-pages":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with connected(source) as refused:
        assert ended(refused)
    monkeypatch.setattr(threading.Thread, "start", start)
    with connected(source) as served:
        assert answer(served, page_wire.MAGIC + token(request(1)) + request(1))[0] == page_wire.PAGES
    until(lambda: not source.num_connections)


@pytest.mark.parametrize("host", ["::", "::1", "[::1]", "localhost", "0.0.0.0"])
def test_a_source_listens_where_grpc_does(host: str, memory: PageMemory) -> None:
    with closing(StreamSource(INCARNATION, memory, TRUST, PageEndpoint(host))) as source:
        for reached in ("127.0.0.1", "::1") if host == "::" else ("::1",) if ":" in host else ("127.0.0.1",):
            with socket.create_connection((reached, port_of(source)), WAIT_S) as connection:
                assert answer(connection, page_wire.MAGIC + token(request(1)) + request(1))[0] == page_wire.PAGES


def test_a_source_that_stalls_costs_the_pull_its_time_and_no_more(memory: PageMemory) -> None:
    late = b"\xaa" * PAGE_BYTES
    with closing(LyingSource(HEAD + bytes(PAGE_BYTES), holds=True, afterwards=late)) as lying:
        event = pull_two(info(lying.port), memory, deadline_s=0.1)
        assert event.outcome is PullOutcome.FAILED
        before = bytes(memory.buffer)
        lying.close()  # sends the second page
    assert late not in before
    assert memory.buffer == before, "nothing arrives after the end"


def test_a_closed_puller_waits_for_no_source(memory: PageMemory) -> None:
    events = EventLog()
    with closing(LyingSource(HEAD, holds=True)) as lying:
        puller = StreamPuller(memory, events, TRUST)
        puller.connect(info(lying.port))
        puller.submit(Pull(1, PREFILL, page_ids([5]), page_ids([0]), None, WAIT_S))
        until(lambda: lying.num_connections == 1)
        began = time.monotonic()
        puller.close()
    assert time.monotonic() - began < WAIT_S / 2


def test_a_kept_connection_that_has_ended_is_replaced(memory: PageMemory) -> None:
    """As after a restart of a proxy on the way: the read goes on with another connection, and no one sees it."""
    one = page_wire.HEAD.pack(page_wire.PAGES, 4) + b"abcd"
    with closing(LyingSource(one, one)) as source:
        connections = PageConnections(("127.0.0.1", source.port), call_token_issuer(TRUST, INCARNATION))
        for number in (1, 2):
            with connections.request(b"x", 4, time.monotonic() + WAIT_S) as connection:
                target = bytearray(4)
                connection.read_into([memoryview(target)], time.monotonic() + WAIT_S)
            assert target == b"abcd"
            assert source.num_connections == number
        source.close()
        with pytest.raises(CannotConnect), connections.request(b"x", 4, time.monotonic() + WAIT_S):
            pass
        connections.close()


def test_a_port_that_cannot_be_reached_is_given_up_for_a_while(
    memory: PageMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as closed:
        port = closed.getsockname()[1]
    made = link.StreamLink(info(port), TRUST)
    assert made.page_connections() is not None
    made.use_calls(LinkBroken("no way"))
    assert made.page_connections() is None
    monkeypatch.setattr(link, "CALLS_S", 0.0)
    made.use_calls(LinkBroken("no way"))
    assert made.page_connections() is not None
    made.close()
    event = pull_two(info(port), memory)  # the gRPC address leads nowhere either
    assert event.outcome is PullOutcome.FAILED
    assert "UNAVAILABLE" in event.reason
