"""Clients that read a stream to its end, hang up, or resume on another router.

A `ClientRequest` is the request, a `Transcript` all received events. `oracle` and `history` check them.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from chaos.clients.tenants import LoadTenant

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CALL_ID_HEADER = "x-baton-request-id"
DURABLE_HEADER = "x-baton-durable"
SCOPE_HEADER = "x-baton-durable-scope"
RETRY_INTERVAL_S = 0.1
CONNECT_TIMEOUT_S = 5.0


class StreamEnd(enum.Enum):
    """Ends of a client's wait."""

    DONE = "done"  # [DONE]
    REFUSED = "refused"  # a status that is not 200
    FAILED = "failed"  # an error event in the stream
    LOST = "lost"  # the connection broke
    HUNG_UP = "hung up"  # by this client
    TIMED_OUT = "timed out"  # the client's own timeout


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A call without model and `stream`. `salt` separates it from the cached pages of its undisturbed run.

    `tenant`: who asks; None: the cluster has no keys, or its client has one.
    """

    name: str
    endpoint: str
    parameters: Mapping[str, Any]
    salt: str = ""
    tenant: LoadTenant | None = None

    def with_salt(self, salt: str) -> ClientRequest:
        """The same request with another salt."""
        return replace(self, salt=salt)

    def with_tenant(self, tenant: LoadTenant | None) -> ClientRequest:
        """The same request with the key of a tenant."""
        return replace(self, tenant=tenant)

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body."""
        with_salt = {"cache_salt": self.salt} if self.salt else {}
        asked = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        return {"model": model, **asked, **self.parameters, **with_salt}


@dataclass(frozen=True, slots=True)
class Event:
    """One chunk of one choice; `at_s` on the monotonic clock."""

    id: str
    choice: int
    tokens: tuple[int, ...]
    text: str
    finish: str
    at_s: float


@dataclass(frozen=True, slots=True)
class ReceivedUsage:
    """What the answer says that it cost, in tokens."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class Transcript:
    """Events of one client. `code`: of the error that ended it, if any. `stored`: any router can resume the answer.

    `durable`: the store keeps the call over a restart of its own.
    """

    request: ClientRequest
    began_s: float = field(default_factory=time.monotonic)
    call_id: str = ""
    last_event_id: str = ""
    stored: bool = False
    durable: bool = False
    events: list[Event] = field(default_factory=list)
    usage: ReceivedUsage | None = None
    end: StreamEnd | None = None
    status: int = 0
    code: str = ""
    num_resumes: int = 0
    dropped: list[tuple[Event, ...]] = field(default_factory=list)
    """What was received of calls that no store had: their router died, and the request was sent again."""
    ended_s: float = 0.0
    updated: asyncio.Event = field(default_factory=asyncio.Event)

    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(event.tokens) for event in self.events)

    async def wait_tokens(self, num_tokens: int) -> None:
        """Waits for `num_tokens` tokens or the end."""
        while self.num_tokens() < num_tokens and self.end is None:
            await self.updated.wait()
            self.updated.clear()

    def add_event(self, event: Event | None = None) -> None:
        """Adds an event and wakes waiters."""
        if event is not None:
            self.events.append(event)
        self.updated.set()

    def finish(self, end: StreamEnd, code: str = "") -> None:
        """Records the end; a resumed call may continue."""
        self.end, self.code, self.ended_s = end, code, time.monotonic()
        self.updated.set()

    def drop_answer(self) -> None:
        """Moves what was received of a call that had begun to `dropped`: the request is sent again."""
        if self.call_id:
            self.dropped.append(tuple(self.events))
        self.events.clear()
        self.usage = None
        self.call_id = self.last_event_id = ""

    @property
    def longest_gap_s(self) -> float:
        """The longest silence between request and end."""
        moments = [self.began_s, *(event.at_s for event in self.events), self.ended_s or time.monotonic()]
        return max(later - earlier for earlier, later in itertools.pairwise(moments))


class ChaosClient:
    """A client of one model. `urls`: routers; the first is used first, the next when it is lost."""

    def __init__(self, http: httpx2.AsyncClient, model: str, patience_s: float = 90.0) -> None:
        self.http = http
        self._model = model
        self._patience_s = patience_s

    async def ask(
        self, request: ClientRequest, urls: Sequence[object], transcript: Transcript | None = None
    ) -> Transcript:
        """Reads one answer to its end; a lost connection is resumed on the next of `urls`, if there is one."""
        transcript = transcript or Transcript(request)
        try:
            async with asyncio.timeout(self._patience_s):
                await self._post(transcript, str(urls[0]))
                for turn in range(1, 1000):
                    if transcript.end is not StreamEnd.LOST or len(urls) < 2:
                        break
                    await self._resume(transcript, str(urls[turn % len(urls)]))
        except TimeoutError:
            transcript.finish(StreamEnd.TIMED_OUT, transcript.code)  # of the last refusal, if any
        return transcript

    async def follow(self, call_id: str, transcript: Transcript, urls: Sequence[object]) -> Transcript:
        """Reads a call of another client from its first token; a lost connection is resumed as in `ask`."""
        transcript.call_id, transcript.stored = call_id, True
        try:
            async with asyncio.timeout(self._patience_s):
                for turn in range(1000):
                    await self._resume(transcript, str(urls[turn % len(urls)]))
                    if transcript.end is not StreamEnd.LOST:
                        break
        except TimeoutError:
            transcript.finish(StreamEnd.TIMED_OUT, transcript.code)  # of the last refusal, if any
        return transcript

    async def ask_and_hang_up(
        self, request: ClientRequest, url: object, num_tokens: int, transcript: Transcript
    ) -> None:
        """Closes the connection after `num_tokens` tokens; with 0 when the task is cancelled."""
        ask_task = asyncio.create_task(self.ask(request, [url], transcript))
        try:
            await transcript.wait_tokens(num_tokens) if num_tokens else await ask_task
        finally:
            ask_task.cancel()
            await asyncio.gather(ask_task, return_exceptions=True)
            if transcript.end is None:
                transcript.finish(StreamEnd.HUNG_UP)

    async def read_as(self, tenant: LoadTenant, call_id: str, url: object) -> int | None:
        """The status of the answer to a tenant that reads a call by its id; None if nobody is there."""
        try:
            answer = await self.http.get(f"{url}/v1/requests/{call_id}", headers=tenant.headers)
        except httpx2.TransportError:
            return None
        return answer.status_code

    async def _post(self, transcript: Transcript, url: str) -> None:
        request = transcript.request
        await self._read(transcript, "POST", url + request.endpoint, {}, request.body(self._model))

    async def _resume(self, transcript: Transcript, url: str) -> None:
        """Tries to resume once. A call that was announced as not stored is sent again: only its router had it."""
        transcript.num_resumes += 1
        await asyncio.sleep(RETRY_INTERVAL_S)  # spares a router that is just starting
        if not transcript.stored:
            transcript.drop_answer()
            await self._post(transcript, url)
            return
        headers = {"last-event-id": transcript.last_event_id} if transcript.last_event_id else {}
        await self._read(transcript, "GET", f"{url}/v1/requests/{transcript.call_id}/stream", headers, None)
        if transcript.end is StreamEnd.REFUSED and transcript.status in (404, 503):
            transcript.finish(StreamEnd.LOST, transcript.code)

    async def _read(
        self, transcript: Transcript, method: str, url: str, headers: Mapping[str, str], body: dict[str, Any] | None
    ) -> None:
        tenant = transcript.request.tenant
        accept = {"accept": "text/event-stream", **headers, **({} if tenant is None else tenant.headers)}
        timeout = httpx2.Timeout(self._patience_s, connect=CONNECT_TIMEOUT_S)
        try:
            async with self.http.stream(method, url, json=body, headers=accept, timeout=timeout) as response:
                transcript.status = response.status_code
                transcript.call_id = response.headers.get(CALL_ID_HEADER, transcript.call_id)
                if response.status_code != httpx2.codes.OK:
                    transcript.finish(StreamEnd.REFUSED, _code(await response.aread()))
                    return
                transcript.stored = SCOPE_HEADER in response.headers
                transcript.durable = response.headers.get(DURABLE_HEADER) == "true"
                transcript.end = None
                await self._events(transcript, response.aiter_lines())
        except httpx2.TransportError:
            transcript.finish(StreamEnd.LOST)

    async def _events(self, transcript: Transcript, lines: AsyncIterator[str]) -> None:
        event_id = ""
        async for line in lines:
            if line.startswith("id: "):
                event_id = line[4:]
            elif line == "data: [DONE]":
                transcript.last_event_id = event_id or transcript.last_event_id
                transcript.finish(StreamEnd.DONE)
                return
            elif line.startswith("data: "):
                message = json.loads(line[6:])
                if "error" in message:
                    transcript.finish(StreamEnd.FAILED, str(message["error"]["code"]))
                    return
                _add_events(transcript, message, event_id)
        transcript.finish(StreamEnd.LOST)


def _add_events(transcript: Transcript, message: dict[str, Any], event_id: str) -> None:
    transcript.call_id = transcript.call_id or str(message["id"])
    transcript.last_event_id = event_id or transcript.last_event_id
    if message.get("usage"):
        transcript.usage = _usage(message["usage"])
    for choice in message["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        tokens = tuple(choice.get("token_ids") or ())
        finish = choice["finish_reason"] or ""
        transcript.add_event(Event(event_id, choice["index"], tokens, text, finish, time.monotonic()))


def _usage(found: Mapping[str, Any]) -> ReceivedUsage:
    cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ReceivedUsage(found["prompt_tokens"], found["completion_tokens"], found["total_tokens"], cached)


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "no_json"
