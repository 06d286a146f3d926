"""The least that a router in Python can do for a short completion, in a process of its own. For `compare` only.

    python -m bench.router.floor.least_router REDIS_URL

An asyncio protocol with httptools parses HTTP, msgspec the JSON; the opens go to the first prefill and decode worker in
the sessions of the real router, over gRPC; one script writes the request into Redis, whose reply nobody waits for, and
each token is an event. There is no check of the request, no placement, admission, journal, text, limit, trace, metric,
deadline or second try: whatever a router adds is above this. Prints its port, and serves until its standard input
closes. Only streamed requests with token ids are answered.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from contextlib import AbstractContextManager
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.codec import encode_id, encode_request
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.gen import session_pb2 as pb
from baton.services.router.dispatch.sessions.worker_sessions import WorkerSessions, open_sessions
from baton.store.connect import connect
from bench.harness.child_server import child_server

DEADLINE_S = 30.0
SCRIPT = "redis.call('HSET', KEYS[1], 'request', ARGV[1]) return redis.call('PEXPIRE', KEYS[1], 60000)"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class FloorRequest(msgspec.Struct):
    """The fields of a completion that are read."""

    prompt: list[int]
    max_tokens: int


def sse_chunk(data: bytes) -> bytes:
    """An event as an HTTP chunk."""
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


TOKEN_EVENT = sse_chunk(b'{"object":"text_completion","choices":[{"index":0,"text":"w","finish_reason":null}]}')


def last_events(num_prompt_tokens: int, num_tokens: int) -> bytes:
    """The last token's event, with usage, and the end of the body."""
    usage = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (num_prompt_tokens, num_tokens)
    event = b'{"object":"text_completion","choices":[{"index":0,"text":"w","finish_reason":"length"}],"usage":%b}'
    return sse_chunk(event % usage) + sse_chunk(b"[DONE]") + b"0\r\n\r\n"


def redis_command(*words: bytes) -> bytes:
    """A command in Redis's protocol."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class RedisWriter(asyncio.Protocol):
    """Sends one script a request. Errors are counted."""

    def __init__(self) -> None:
        self.num_errors = 0
        self._transport: asyncio.Transport | None = None
        self._digest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if data[:1] == b"$":  # the digest of the script
            self._digest = data.split(b"\r\n")[1]
        self.num_errors += data.count(b"-ERR") + data.count(b"-NOSCRIPT")

    def load(self) -> None:
        """Sends the script. Call it once, some time before the first write."""
        assert self._transport is not None
        self._transport.write(redis_command(b"SCRIPT", b"LOAD", SCRIPT.encode()))

    def write(self, key: bytes, value: bytes) -> None:
        assert self._transport is not None
        self._transport.write(redis_command(b"EVALSHA", self._digest, b"1", key, value))


class FloorRouter:
    """What all connections share."""

    def __init__(
        self, sessions: WorkerSessions, prefill: WorkerRecord, decode: WorkerRecord, redis: RedisWriter
    ) -> None:
        self.sessions, self.prefill, self.decode, self.redis = sessions, prefill, decode, redis
        self._numbers = itertools.count()
        template = EngineRequest(AttemptId(RequestId("floor"), 0), (1,), 1, SamplingParams(), StopParams(1))
        self._template = encode_request(template)
        del self._template.tokens[:]
        self._run = os.getpid()

    async def complete(self, body: bytes, transport: asyncio.Transport) -> None:
        """Serves one completion."""
        asked = msgspec.json.decode(body, type=FloorRequest)
        request, num_prompt = self._encoded(asked), len(asked.prompt)
        promise = decode_pb2.ReserveRequest(id=request.id, num_tokens=num_prompt, deadline_s=DEADLINE_S)
        prompt = prefill_pb2.PrefillRequest(request=request, deadline_s=DEADLINE_S)
        reserving = self.sessions.reserve(self.decode, promise, ())
        prefilling = self.sessions.prefill(self.prefill, prompt, ())
        self.redis.write(b"floor:" + request.id.request_id.encode(), body)
        reply = cast("decode_pb2.ReserveReply", await reserving.read())
        generate = decode_pb2.GenerateRequest(
            request=request,
            reservation_id=reply.reserved.reservation_id,
            prefill_id=self.prefill.id,
            prefill_incarnation=self.prefill.incarnation,
            deadline_s=DEADLINE_S,
        )
        generating = self.sessions.open(self.decode, generate, ())
        while (event := await prefilling.read()) is not None:
            if cast("prefill_pb2.PrefillEvent", event).HasField("sealed"):
                transport.write(HEAD + TOKEN_EVENT)
        while (row := await generating.read()) is not None:
            if isinstance(row, pb.TokenRow):
                if row.finish_reason:
                    transport.write(last_events(num_prompt, asked.max_tokens))
                else:
                    transport.write(TOKEN_EVENT)

    def _encoded(self, asked: FloorRequest) -> common_pb2.EngineRequest:
        request = common_pb2.EngineRequest()
        request.CopyFrom(self._template)
        request.id.CopyFrom(encode_id(AttemptId(RequestId(f"floor-{self._run}-{next(self._numbers)}"), 0)))
        request.tokens.extend(asked.prompt)
        request.num_prompt_tokens = len(asked.prompt)
        request.stop.max_tokens = asked.max_tokens
        return request


class FloorProtocol(asyncio.Protocol):
    """One connection of a client; one request at a time."""

    def __init__(self, floor: FloorRouter, tasks: set[asyncio.Task[None]]) -> None:
        self._floor = floor
        self._tasks = tasks
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        body, self._body = b"".join(self._body), []
        task = asyncio.get_running_loop().create_task(self._floor.complete(body, self._transport))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve(redis_url: str) -> None:
    """Serves until standard input closes."""
    store = await connect(redis_url)
    workers = {worker.role: worker for worker in await store.workers()}
    await store.close()
    loop, place, tasks = asyncio.get_running_loop(), urlsplit(redis_url), set[asyncio.Task[None]]()
    if place.scheme == "unix":
        _, redis = await loop.create_unix_connection(RedisWriter, place.path)
    else:
        _, redis = await loop.create_connection(RedisWriter, place.hostname or "127.0.0.1", place.port or 6379)
    redis.load()
    async with open_sessions(True, "floor", OPEN_CLUSTER) as sessions:
        assert sessions is not None
        sessions.follow(workers.values())
        floor = FloorRouter(sessions, workers[WorkerRole.PREFILL], workers[WorkerRole.DECODE], redis)
        server = await loop.create_server(lambda: FloorProtocol(floor, tasks), "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)
        server.close()


def running_floor(redis_url: str) -> AbstractContextManager[tuple[str, int]]:
    """Runs it; gives its URL and process id. Raises `RuntimeError` if it does not start."""
    return child_server("bench.router.floor.least_router", redis_url)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
