"""Sends requests to an OpenAI server and measures the answers. Called by `commands` and `load_generator`.

The body is built before the clock is read: `sent` is the time at which the bytes go to the socket, or at which a
connection is opened for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from baton.domain.errors import BatonError
from baton.services.cli.bench.client.answer_meter import AnswerMeter
from baton.services.cli.bench.client.connection import ConnectionPool, ServerOrigin
from baton.services.cli.bench.options import ApiEndpoint, ServeOptions
from baton.services.cli.bench.results.records import MeasuredAnswer, PlannedRequest
from baton.services.cli.bench.workload.prompts import as_text

_PATHS = {ApiEndpoint.COMPLETIONS: "/v1/completions", ApiEndpoint.CHAT: "/v1/chat/completions"}


class TargetError(BatonError):
    """The measured server does not answer like an OpenAI server."""

    code = "bad_target"


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """Fields that all requests of a run share."""

    model: str
    endpoint: ApiEndpoint
    temperature: float
    ignore_eos: bool
    continuous_usage: bool

    @classmethod
    def of(cls, options: ServeOptions, model: str) -> Self:
        """From the flags and the model's name."""
        return cls(model, options.endpoint, options.temperature, options.ignore_eos, options.continuous_usage)

    def body(self, request: PlannedRequest) -> bytes:
        """The JSON of one request."""
        usage = {"include_usage": True} | ({"continuous_usage_stats": True} if self.continuous_usage else {})
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": usage,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint is ApiEndpoint.CHAT:
            body["messages"] = [{"role": "user", "content": as_text(request.prompt)}]
        else:
            body["prompt"] = request.prompt
        return msgspec.json.encode(body)


class BenchClient:
    """A pool of connections to one server; an async context manager that closes all of them."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float, clock: Callable[[], float]) -> None:
        """Raises `ValueError` for a URL without a host."""
        self._origin = ServerOrigin.parse(base_url)
        self._pool = ConnectionPool(self._origin, clock)
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def measure(
        self, template: RequestTemplate, request: PlannedRequest, on_tokens: Callable[[int], None]
    ) -> MeasuredAnswer:
        """Sends one request and times its answer. Failures are part of the answer, never raised."""
        message = self._message("POST", _PATHS[template.endpoint], template.body(request))
        meter = AnswerMeter(on_tokens)
        failure: str | None = None
        sent_at_s = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.exchange(message, meter)
        except TimeoutError:
            failure = f"no end within {self._timeout_s:g} s"
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
        return meter.answer(sent_at_s, self._clock(), failure)

    async def first_model(self) -> str:
        """The first model that the server lists. Raises `TargetError`."""
        page = _BodyReader()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._pool.exchange(self._message("GET", "/v1/models", b""), page)
            return msgspec.json.decode(bytes(page.body), type=_Models).data[0].id
        except (OSError, msgspec.DecodeError, IndexError) as error:
            where = f"{self._origin.authority}{self._origin.path}/v1/models"
            raise TargetError(f"{where} (HTTP {page.status}): {error}. Start the server, or give --model.") from error

    def _message(self, method: str, path: str, body: bytes) -> bytes:
        lines = [
            f"{method} {self._origin.path}{path} HTTP/1.1",
            f"Host: {self._origin.authority}",
            "Accept: */*",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


async def warm_up(client: BenchClient, template: RequestTemplate, requests: list[PlannedRequest]) -> None:
    """Sends requests one after the other. Raises `TargetError` for the first failure."""
    for request in requests:
        answer = await client.measure(template, request, lambda _: None)
        if answer.failure is not None:
            raise TargetError(f"the first request failed: {answer.failure}")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _BodyReader:
    """Receives a whole body."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, data: bytes, at_s: float) -> None:
        self.body += data
