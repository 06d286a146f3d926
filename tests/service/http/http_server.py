"""A real HTTP server on a free port: the router's API over a scripted dispatcher."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2
import structlog
import uvicorn
from openai import AsyncOpenAI

from baton.services.router.edge.http_protocol import BoundedHttpProtocol
from baton.services.router.frontend import ApiLimits
from baton.services.router.routes import make_app
from baton.services.router.text.text_model import TextModel
from baton.store.memory_store import MemoryStore
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.request_trace import RequestTrace
from tests.fake_dispatcher import DispatchScript, FakeDispatcher, one_token_chunks
from tests.unit.router.memory_frontend import memory_frontend
from tests.unit.router.text.text_models import bundled

MODEL = "tiny"
TIMEOUT_S = 20.0


class _Server(uvicorn.Server):
    """Sets `listening` once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class TraceRecorder:
    """Traces of ended requests."""

    def __init__(self) -> None:
        self.traces: list[RequestTrace] = []
        self._ended = asyncio.Event()

    def __call__(self, trace: RequestTrace, data: bytes) -> None:
        assert trace.id not in [other.id for other in self.traces]
        self.traces.append(trace)
        self._ended.set()

    async def until_ended(self, count: int) -> list[tuple[str, str]]:
        """The outcomes of the first `count` requests. The server notices a disconnect later than the client."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.traces) < count:
                self._ended.clear()
                await self._ended.wait()
        return self.outcomes

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        """Outcome and code of each request."""
        return [(trace.outcome.value, trace.code) for trace in self.traces]


@dataclass
class RouterServer:
    """A running server and its parts."""

    dispatcher: FakeDispatcher
    recorder: TraceRecorder
    http: httpx2.AsyncClient
    openai: AsyncOpenAI
    """It checks every answer against the types of the SDK."""
    readiness: list[tuple[bool, str]]
    logs: list

    @property
    def lenient(self) -> AsyncOpenAI:
        """The SDK as it is by default. For streamed completions: its own type has no null as a `finish_reason`."""
        return self.openai.with_options()

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
        whole = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **body}
        return await self.http.post("/v1/chat/completions", json=whole, headers=headers)

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
        whole = {"model": MODEL, "prompt": "hello", **body}
        return await self.http.post("/v1/completions", json=whole, headers=headers)


def tokens_of(text: str, *, eos: bool = True, model: TextModel | None = None) -> list[int]:
    """The tokens of a text, and the end of sequence."""
    return [*(model or bundled()).encode(text, add_special_tokens=False), *([2] if eos else [])]


def says(text: str, model: TextModel | None = None, **kwargs: Any) -> DispatchScript:
    """A script that gives `text` for every sequence."""
    return lambda sequence: one_token_chunks(tokens_of(text, model=model), **kwargs)


def events_of(body: str) -> list[Any]:
    """Data of an SSE body, without comments and ids."""
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(events: list, choice: int = 0) -> str:
    """The text of one choice."""
    choices = [c for event in events if event != "[DONE]" for c in event["choices"] if c["index"] == choice]
    return "".join(c["delta"]["content"] if "delta" in c else c["text"] for c in choices)


def error_of(response: httpx2.Response) -> dict:
    """The error of a response; checks its shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] is None or isinstance(body["error"]["code"], str)
    assert response.headers["x-request-id"]
    return body["error"]


@cache
def _tls() -> ssl.SSLContext:
    """Shared: making a context takes longer than most tests."""
    return ssl.create_default_context()


@asynccontextmanager
async def router(script: DispatchScript, text: TextModel | None = None, **limits) -> AsyncIterator[RouterServer]:
    """The router's API, listening. Afterwards no admitted request may be left. `text`: default the bundled model's."""
    async with StoreWriter(MemoryStore()) as writer, _router(script, limits, writer, text) as server:
        yield server


@asynccontextmanager
async def _router(
    script: DispatchScript, limits: dict[str, Any], writer: StoreWriter, text: TextModel | None
) -> AsyncIterator[RouterServer]:
    dispatcher, recorder, readiness = FakeDispatcher(script), TraceRecorder(), [(True, "1 pair")]
    bounds = ApiLimits(**{"model_name": MODEL, "max_model_len": 256, "request_deadline_s": TIMEOUT_S, **limits})
    frontend = memory_frontend(dispatcher, bounds, recorder, writer=writer, text=text)
    app = make_app(frontend, lambda: readiness[-1])
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)  # the kernel takes up to 4 MiB otherwise
    server = _Server(uvicorn.Config(app, http=BoundedHttpProtocol, lifespan="off", ws="none", log_config=None))
    serving = asyncio.create_task(server.serve([listener]))
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await server.listening.wait()
        async with (
            httpx2.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, verify=_tls()) as http,
            AsyncOpenAI(
                base_url=f"{base_url}/v1",
                api_key="none",
                max_retries=0,
                http_client=http,
                _strict_response_validation=True,
            ) as openai,
        ):
            with structlog.testing.capture_logs() as logs:
                yield RouterServer(dispatcher, recorder, http, openai, readiness, logs)
            await dispatcher.until(lambda d: not d.outstanding)
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, TIMEOUT_S)
        listener.close()
