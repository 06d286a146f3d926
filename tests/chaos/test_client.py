"""Clients reading streams that end well, break off, fail, or are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest

from baton.rpc.sockets.listen import stop_accepting
from chaos.clients.client import COMPLETIONS, ChaosClient, ClientRequest, ReceivedUsage, StreamEnd, Transcript

REQUEST = ClientRequest("q", COMPLETIONS, {"prompt": "x", "max_tokens": 3})
TIMEOUT_S = 20.0


def event(number: int, token: int, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": str(token), "token_ids": [token], "finish_reason": finish}
    return f"id: call-1:{number}\ndata: {json.dumps({'id': 'call-1', 'choices': [choice]})}\n\n".encode()


LINES = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-baton-request-id: call-1\r\nconnection: close\r\n"
HEAD = LINES + b"x-baton-durable-scope: router\r\n\r\n"
UNSTORED_HEAD = LINES + b"\r\n"
DONE = b"data: [DONE]\n\n"
REFUSAL = json.dumps({"error": {"message": "", "type": "", "param": None, "code": "no_workers"}}).encode()
UNKNOWN = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(REFUSAL), REFUSAL)


class Router:
    """Sends one scripted answer a connection and breaks it; holds the connection open after an empty answer."""

    def __init__(self, *answers: bytes) -> None:
        self.requests: list[str] = []
        self.released = asyncio.Event()
        self._answers = list(answers)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Router:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_accepting(self._server)
        self.released.set()
        await asyncio.gather(*self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            answer = self._answers.pop(0)
            writer.write(answer)
            await writer.drain()
            if DONE not in answer and b"HTTP/1.1 404" not in answer and not self._answers:
                await self.released.wait()
        finally:
            writer.close()


@pytest.fixture
async def client() -> AsyncIterator[ChaosClient]:
    async with httpx2.AsyncClient(trust_env=False, verify=False) as http:
        yield ChaosClient(http, "m", TIMEOUT_S)


async def test_a_complete_answer_is_read(client: ChaosClient) -> None:
    async with Router(HEAD + event(1, 5) + event(2, 6) + event(3, 7, "length") + DONE) as router:
        transcript = await client.ask(REQUEST, [router.url])
    assert (transcript.end, transcript.num_tokens(), transcript.num_resumes) == (StreamEnd.DONE, 3, 0)
    assert [e.tokens for e in transcript.events] == [(5,), (6,), (7,)]


async def test_a_broken_stream_is_resumed_elsewhere_after_the_last_event(client: ChaosClient) -> None:
    async with (
        Router(HEAD + event(1, 5) + event(2, 6), b"") as first,
        Router(UNKNOWN, HEAD + event(3, 7, "length") + DONE) as second,
    ):
        transcript = await client.ask(REQUEST, [first.url, second.url, second.url])
    assert (transcript.end, transcript.num_tokens(), transcript.num_resumes) == (StreamEnd.DONE, 3, 2)
    resumption = second.requests[1].lower()
    assert resumption.startswith("get /v1/requests/call-1/stream ")
    assert "last-event-id: call-1:2\r\n" in resumption


async def test_an_answer_that_no_store_has_is_asked_for_again(client: ChaosClient) -> None:
    """Its router was lost: no other one can resume it, so its client would wait for ever."""
    whole = HEAD + event(1, 5) + event(2, 6) + event(3, 7, "length") + DONE
    async with Router(UNSTORED_HEAD + event(1, 5) + event(2, 6), b"") as first, Router(whole) as second:
        transcript = await client.ask(REQUEST, [first.url, second.url])
    assert (transcript.end, transcript.num_tokens(), transcript.num_resumes) == (StreamEnd.DONE, 3, 1)
    assert [e.tokens for e in transcript.events] == [(5,), (6,), (7,)]
    assert [[e.tokens for e in dropped] for dropped in transcript.dropped] == [[(5,), (6,)]]
    assert second.requests[0].startswith("POST ")


async def test_a_router_that_never_answered_has_dropped_nothing(client: ChaosClient) -> None:
    async with Router(b"", b"") as first, Router(HEAD + event(1, 5, "length") + DONE) as second:
        transcript = await client.ask(REQUEST, [first.url, second.url])
    assert (transcript.end, transcript.num_resumes, transcript.dropped) == (StreamEnd.DONE, 1, [])


async def test_a_broken_stream_with_nowhere_to_go_is_lost(client: ChaosClient) -> None:
    async with Router(HEAD + event(1, 5), b"") as router:
        transcript = await client.ask(REQUEST, [router.url])
    assert (transcript.end, transcript.num_tokens()) == (StreamEnd.LOST, 1)


async def test_an_error_event_and_a_refusal_have_codes(client: ChaosClient) -> None:
    async with Router(HEAD + event(1, 5) + b"data: " + REFUSAL + b"\n\n", UNKNOWN) as router:
        failed = await client.ask(REQUEST, [router.url])
        refused = await client.ask(REQUEST, [router.url])
    assert (failed.end, failed.code) == (StreamEnd.FAILED, "no_workers")
    assert (refused.end, refused.code, refused.status) == (StreamEnd.REFUSED, "no_workers", 404)


async def test_the_usage_of_a_resumed_answer_is_its_last_one(client: ChaosClient) -> None:
    """It comes in an event without choices; a router that dies in between sends none."""
    usage = {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    last = f"data: {json.dumps({'id': 'call-1', 'choices': [], 'usage': usage})}\n\n".encode()
    async with Router(HEAD + event(1, 5), b"") as first, Router(HEAD + event(2, 6, "length") + last + DONE) as second:
        transcript = await client.ask(REQUEST, [first.url, second.url])
    assert (transcript.end, transcript.usage) == (StreamEnd.DONE, ReceivedUsage(4, 2, 6, 3))


async def test_a_client_that_hangs_up_stops_reading(client: ChaosClient) -> None:
    async with Router(HEAD + event(1, 5) + event(2, 6)) as router:
        transcript = Transcript(REQUEST)
        async with asyncio.timeout(TIMEOUT_S):
            await client.ask_and_hang_up(REQUEST, router.url, 2, transcript)
    assert (transcript.end, transcript.num_tokens()) == (StreamEnd.HUNG_UP, 2)
