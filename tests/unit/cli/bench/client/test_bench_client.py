"""The client against the router's HTTP over a scripted dispatcher, on a fake clock."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.domain.errors import Interrupted
from baton.domain.request import FinishReason, OutputToken
from baton.services.cli.bench.client.bench_client import BenchClient, RequestTemplate, TargetError, warm_up
from baton.services.cli.bench.client.connection import MAX_IDLE_S
from baton.services.cli.bench.options import ApiEndpoint
from baton.services.cli.bench.results.records import PlannedRequest
from baton.services.cli.bench.workload.prompts import as_text
from baton.services.router.generation import TokenChunk
from tests.fake_dispatcher import DispatchScript, EmitChunk, RaiseError, WaitForGate, one_token_chunks
from tests.service.http.http_server import MODEL, TIMEOUT_S, RouterServer, router, tokens_of
from tests.unit.cli.bench.test_load_generator import FakeClock

REQUEST = PlannedRequest(0, 0.0, tuple(range(4, 14)), 8)
CALL = RequestTemplate(MODEL, ApiEndpoint.COMPLETIONS, temperature=0.0, ignore_eos=True, continuous_usage=True)
CHAT = RequestTemplate(MODEL, ApiEndpoint.CHAT, temperature=0.0, ignore_eos=False, continuous_usage=False)


class Listener:
    """Counts tokens like the client, and waits for them."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._changed = asyncio.Event()

    def __call__(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._changed.set()

    async def until(self, num_tokens: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_tokens < num_tokens:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def bench(server: RouterServer, clock: FakeClock, timeout_s: float = TIMEOUT_S) -> AsyncIterator[BenchClient]:
    url = str(server.http.base_url)
    async with BenchClient(url, api_key=None, timeout_s=timeout_s, clock=clock) as client:
        yield client


def gated(tokens: list[int]) -> tuple[DispatchScript, list[asyncio.Event]]:
    """A script that waits before every token, and its gates."""
    gates = [asyncio.Event() for _ in tokens]
    says = one_token_chunks(tokens, FinishReason.LENGTH)
    return (
        lambda sequence: [act for gate, say in zip(gates, says, strict=True) for act in (WaitForGate(gate), say)]
    ), gates


@pytest.mark.parametrize("call", [CALL, CHAT], ids=["completions", "chat"])
async def test_token_times_are_recorded(call):
    clock, received = FakeClock(), Listener()
    script, gates = gated(tokens_of("one two three", eos=False)[:3])
    async with router(script) as server, bench(server, clock) as client:
        measured = asyncio.create_task(client.measure(call, REQUEST, received))
        for num_tokens, (gate, gap_s) in enumerate(zip(gates, (1.0, 0.25, 0.5), strict=True), 1):
            await server.dispatcher.until(lambda d: bool(d.started))
            clock.now_s += gap_s
            gate.set()
            await received.until(num_tokens)
        answer = await asyncio.wait_for(measured, TIMEOUT_S)
    assert answer.failure is None
    assert answer.sent_at_s == 100.0
    assert answer.deliveries == ((1.0, 1), (1.25, 1), (1.75, 1))
    assert (answer.ended_s, answer.num_output_tokens, answer.finish_reason) == (1.75, 3, "length")


async def test_the_server_gets_the_planned_tokens():
    async with (
        router(lambda sequence: one_token_chunks(tokens_of("hi"))) as server,
        bench(server, FakeClock()) as client,
    ):
        answer = await client.measure(CALL, REQUEST, lambda _: None)
        chat = await client.measure(CHAT, REQUEST, lambda _: None)
    completion_sequence, chat_sequence = server.dispatcher.admitted
    assert completion_sequence.prompt_tokens == REQUEST.prompt
    assert answer.num_prompt_tokens == len(REQUEST.prompt)
    assert completion_sequence.stop.max_tokens == chat_sequence.stop.max_tokens == 8
    assert completion_sequence.stop.stop_token_ids == frozenset()
    assert chat_sequence.stop.stop_token_ids != frozenset()
    assert chat.num_prompt_tokens == len(chat_sequence.prompt_tokens)
    assert chat.failure is None


async def test_bundled_tokens_are_counted():
    def script(sequence):
        first, *rest = (OutputToken(index, token) for index, token in enumerate(tokens_of("one two three", eos=False)))
        return [
            EmitChunk(TokenChunk((first,), 0, None)),
            EmitChunk(TokenChunk(tuple(rest), 0, FinishReason.LENGTH)),
        ]

    received = Listener()
    async with router(script) as server, bench(server, FakeClock()) as client:
        answer = await client.measure(CALL, REQUEST, received)
    assert (answer.failure, answer.num_output_tokens, received.num_tokens) == (None, 3, 3)


async def test_connections_are_reused():
    async with (
        router(lambda sequence: one_token_chunks(tokens_of("hi"))) as server,
        bench(server, FakeClock()) as client,
    ):
        for _ in range(3):
            assert (await client.measure(CALL, REQUEST, lambda _: None)).failure is None
        assert len(client._pool._idle) == 1
        both = (client.measure(CALL, REQUEST, lambda _: None) for _ in range(2))
        assert [answer.failure for answer in await asyncio.gather(*both)] == [None, None]
        assert len(client._pool._idle) == 2


async def test_a_connection_that_ended_while_idle_is_not_reused():
    async with (
        router(lambda sequence: one_token_chunks(tokens_of("hi"))) as server,
        bench(server, FakeClock()) as client,
    ):
        assert (await client.measure(CALL, REQUEST, lambda _: None)).failure is None
        (idle,) = client._pool._idle
        assert idle._transport is not None
        idle._transport.close()  # as uvloop does when it has read the server's end, a turn before it says so
        assert (await client.measure(CALL, REQUEST, lambda _: None)).failure is None
        assert client._pool._idle != [idle]


async def test_a_connection_that_the_server_may_be_about_to_end_is_not_reused():
    """Servers end idle ones, most after 5 s: a request that is sent at that moment would be lost."""
    clock = FakeClock()
    async with router(lambda sequence: one_token_chunks(tokens_of("hi"))) as server, bench(server, clock) as client:
        assert (await client.measure(CALL, REQUEST, lambda _: None)).failure is None
        (idle,) = client._pool._idle
        clock.now_s += MAX_IDLE_S
        assert (await client.measure(CALL, REQUEST, lambda _: None)).failure is None
        assert client._pool._idle != [idle]


async def test_a_refusal_is_a_failure_with_the_servers_message():
    async with router(lambda sequence: []) as server, bench(server, FakeClock()) as client:
        answer = await client.measure(
            RequestTemplate("other", ApiEndpoint.CHAT, 0.0, False, False), REQUEST, lambda _: None
        )
        with pytest.raises(TargetError, match="HTTP 404"):
            await warm_up(client, RequestTemplate("other", ApiEndpoint.CHAT, 0.0, False, False), [REQUEST])
    assert answer.failure is not None
    assert answer.failure.startswith("HTTP 404: ")
    assert answer.deliveries == ()


async def test_a_broken_stream_is_a_failure_and_keeps_its_tokens():
    def script(sequence):
        return [*one_token_chunks(tokens_of("hello", eos=False)[:2])[:1], RaiseError(Interrupted("a worker was lost"))]

    async with router(script) as server, bench(server, FakeClock()) as client:
        answer = await client.measure(CALL, REQUEST, lambda _: None)
    assert answer.failure is not None
    assert answer.failure.startswith("error event: ")
    assert answer.num_output_tokens == len(answer.deliveries) == 1


async def test_a_request_past_its_timeout_is_aborted():
    gate = asyncio.Event()
    async with (
        router(lambda sequence: [WaitForGate(gate)]) as server,
        bench(server, FakeClock(), timeout_s=0.2) as client,
    ):
        answer = await client.measure(CALL, REQUEST, lambda _: None)
        await server.dispatcher.until(lambda d: bool(d.aborted))
    assert answer.failure == "no end within 0.2 s"


async def test_an_unreachable_server_is_a_failure():
    async with BenchClient("http://127.0.0.1:1", api_key=None, timeout_s=5.0, clock=FakeClock()) as client:
        answer = await client.measure(CALL, REQUEST, lambda _: None)
        with pytest.raises(TargetError, match=r"127\.0\.0\.1:1/v1/models"):
            await client.first_model()
    assert "ConnectionRefusedError" in str(answer.failure)


async def test_the_first_model_is_found():
    async with router(lambda sequence: []) as server, bench(server, FakeClock()) as client:
        assert await client.first_model() == MODEL


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n"])
async def test_an_answer_may_end_with_the_connection(head):
    body = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        BenchClient(f"http://127.0.0.1:{port}", api_key="k", timeout_s=5.0, clock=FakeClock()) as client,
    ):
        answer = await client.measure(CALL, REQUEST, lambda _: None)
    assert (answer.failure, answer.finish_reason) == (None, "stop")


async def test_a_truncated_or_malformed_answer_is_a_failure():
    replies = [b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata:", b"SSH-2.0-OpenSSH\r\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(replies.pop(0))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, BenchClient(url, api_key=None, timeout_s=5.0, clock=FakeClock()) as client:
        cut = await client.measure(CALL, REQUEST, lambda _: None)
        nonsense = await client.measure(CALL, REQUEST, lambda _: None)
    assert "the server closed the connection" in str(cut.failure)
    assert "unreadable HTTP" in str(nonsense.failure)


def test_chats_are_sent_as_text():
    assert as_text(REQUEST.prompt).encode() in CHAT.body(REQUEST)
    assert b"ignore_eos" not in CHAT.body(REQUEST)
    assert b"continuous_usage_stats" not in CHAT.body(REQUEST)


def test_a_url_without_a_host_is_refused():
    with pytest.raises(ValueError, match="names no host"):
        BenchClient("http://", api_key=None, timeout_s=1.0, clock=FakeClock())
