"""Clients that read nothing, over a real server: their places are given back, and they are hung up in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from baton.domain.errors import WorkerLost
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.services.router.edge import disconnect, http_protocol
from baton.services.router.generation import SequenceSpec, TokenChunk
from baton.services.router.streaming import sse_stream, token_stream, unread_buffer
from baton.telemetry.metrics import REGISTRY
from tests.fake_dispatcher import EmitChunk, RaiseError, ScriptStep
from tests.service.http.http_server import RouterServer, router, says

pytestmark = pytest.mark.timeout(60)

NUM_CLIENTS, NUM_CHOICES = 20, 4
NUM_TOKENS = 300
TOP = tuple((id, -2.5) for id in range(20))
TOO_SLOW = ("cancelled", "client_too_slow")


def long_answer(sequence: SequenceSpec) -> list[ScriptStep]:
    """More bytes than the kernel and the transport hold: each event has twenty alternatives."""
    last = NUM_TOKENS - 1
    return [
        EmitChunk(
            TokenChunk((OutputToken(i, 5, TokenLogprobs(-1.0, TOP)),), 0, FinishReason.LENGTH if i == last else None)
        )
        for i in range(NUM_TOKENS)
    ]


@contextlib.contextmanager
def clients(
    world: RouterServer, number: int, buffer_bytes: int = 4096, **body: object
) -> Iterator[list[socket.socket]]:
    """Connections that have sent a request for a long answer, and read nothing."""
    request = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    data = json.dumps({**request, **body}).encode()
    sockets = []
    try:
        for _ in range(number):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            client.connect((world.http.base_url.host, world.http.base_url.port))
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(data), data)
            )
            sockets.append(client)
        yield sockets
    finally:
        for client in sockets:
            client.close()


async def test_clients_that_read_nothing_hold_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 1.0)
    hung_up = REGISTRY.get_sample_value("baton_hung_up_clients_total") or 0.0
    async with router(long_answer) as world:
        with clients(world, NUM_CLIENTS, n=NUM_CHOICES, stream=True):
            await world.dispatcher.until(lambda d: len(d.finished) == NUM_CLIENTS * NUM_CHOICES, timeout_s=20.0)
            assert not world.dispatcher.outstanding
            assert (REGISTRY.get_sample_value("baton_unread_bytes") or 0.0) > 0
            assert await world.recorder.until_ended(NUM_CLIENTS) == [TOO_SLOW] * NUM_CLIENTS
    assert REGISTRY.get_sample_value("baton_hung_up_clients_total") == hung_up + NUM_CLIENTS
    assert REGISTRY.get_sample_value("baton_unread_bytes") == 0.0
    assert {entry["event"] for entry in world.logs if entry["log_level"] == "error"} == set()


async def test_the_longest_blocked_client_is_hung_up_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_buffer, "MAX_UNREAD_LOGPROB_BYTES", 40_000)
    async with router(long_answer) as world:
        with clients(world, 1, n=NUM_CHOICES, stream=True):
            assert await world.recorder.until_ended(1) == [TOO_SLOW]
            await world.dispatcher.until(lambda d: not d.outstanding)


async def test_a_whole_answer_that_is_not_read_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is complete for the application; its bytes must not stay in the transport for ever."""
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 0.5)
    async with router(long_answer) as world:
        with clients(world, 1, n=NUM_CHOICES) as [client]:
            await world.recorder.until_ended(1)
            await until_reset(client)


async def test_an_error_event_that_is_not_read_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_stream, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(token_stream, "DEADLINE_GRACE_S", 0.0)
    monkeypatch.setattr(token_stream, "DISCONNECT_GRACE_S", 0.0)
    monkeypatch.setattr("baton.services.router.respond.DISCONNECT_GRACE_S", 0.0)
    async with router(
        lambda sequence: [*long_answer(sequence)[:-1], RaiseError(WorkerLost("gone"))], request_deadline_s=1.0
    ) as world:
        with clients(world, 1, n=NUM_CHOICES, stream=True) as [client]:
            await world.recorder.until_ended(1)
            await until_reset(client)


async def test_a_client_that_reads_slowly_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_TIMEOUT_S", 0.5)
    async with router(long_answer) as world:
        with clients(world, 1, 65_536, n=NUM_CHOICES, stream=True) as [client]:
            client.setblocking(False)
            loop, began, received = asyncio.get_running_loop(), time.monotonic(), b""
            while not received.endswith(b"0\r\n\r\n"):
                slow = time.monotonic() - began < 3 * http_protocol.WRITE_TIMEOUT_S
                part = await loop.sock_recv(client, 16_384 if slow else 1 << 20)
                assert part, "the server hung up"
                received += part
                await asyncio.sleep(0.05 if slow else 0)
        assert received.count(b"data: ") == NUM_CHOICES * NUM_TOKENS + 1
        assert await world.recorder.until_ended(1) == [("finished", "length")]


async def until_reset(client: socket.socket) -> None:
    """Reads until the server's reset, or its early end."""
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1.0)  # unread: the server has to act first
    async with asyncio.timeout(disconnect.CLOSE_TIMEOUT_S):
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(client, 1 << 20):
                pass


async def test_a_reader_leaves_no_bytes_behind() -> None:
    async with router(says("hello there")) as world:
        assert (await world.chat(stream=True)).status_code == 200
    assert REGISTRY.get_sample_value("baton_unread_bytes") == 0.0
