"""Reads answers from routers as server-sent events, and goes on after a broken connection.

Called by `baton.services.cli.chat.command`. A broken stream is resumed by its last event id, at the next router if
there is one: any router of a cluster can continue a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from baton.services.cli.chat.answer import AnswerFailed, refusal

CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 60.0
"""Longest pause within a stream; routers send a ping far sooner."""
MAX_RESUMES = 6
FIRST_WAIT_S = 0.2
DONE = "[DONE]"
ID_HEADER = "x-baton-request-id"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event. `resumed`: the connection was replaced before it."""

    data: str
    id: str | None = None
    resumed: bool = False


class _StreamBroken(Exception):
    """The connection ended before the answer did."""


class ChatClient:
    """HTTP to one or several routers of one cluster. Use it inside one event loop."""

    def __init__(self, routers: Sequence[str], api_key: str | None) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S)
        self._routers = [url.rstrip("/") for url in routers]
        self._client = httpx2.AsyncClient(timeout=timeout, trust_env=False, headers=headers)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def models(self) -> list[str]:
        """Names of the models, the first one is the default. Raises `AnswerFailed`."""
        reasons: list[str] = []
        for router in self._routers:
            try:
                answer = await self._client.get(f"{router}/v1/models")
            except httpx2.TransportError as error:
                reasons.append(f"{router} does not answer ({type(error).__name__})")
                continue
            if answer.status_code != httpx2.codes.OK:
                raise refusal(answer.status_code, answer.content)
            return [str(model["id"]) for model in answer.json()["data"]]
        raise AnswerFailed(f"{'; '.join(reasons)}. Start one with `baton up`, or give --router.")

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[StreamEvent, None]:
        """The events of one answer, each once, without `[DONE]`. Raises `AnswerFailed`.

        Cancelling it closes the connection, which aborts the answer in the cluster.
        """
        last = _StreamCursor()
        wait_s, num_failed = FIRST_WAIT_S, 0
        resumed = False
        while True:
            before = last.event_id
            try:
                async for event in self._attempt(path, body, last):
                    if event.data == DONE:
                        return
                    yield StreamEvent(event.data, event.id, resumed)
                    resumed = False
                raise _StreamBroken("the stream ended early")
            except (httpx2.TransportError, _StreamBroken) as error:
                if last.request_id is None and not isinstance(error, httpx2.ConnectError):
                    # It may be running, under an id that we were not told: asking again could run it twice.
                    raise AnswerFailed(f"the connection broke before the answer began ({error})") from None
                num_failed, wait_s = (0, FIRST_WAIT_S) if last.event_id != before else (num_failed + 1, 2 * wait_s)
                if num_failed >= MAX_RESUMES:
                    raise AnswerFailed(f"{self._routers[0]} does not answer ({type(error).__name__})") from None
                resumed = last.request_id is not None
                self._routers.append(self._routers.pop(0))
            await asyncio.sleep(wait_s)

    async def _attempt(self, path: str, body: Mapping[str, Any], last: _StreamCursor) -> AsyncIterator[StreamEvent]:
        """One connection. Updates `last`."""
        accept = {"accept": "text/event-stream"}
        if last.request_id is None:
            call = self._client.stream("POST", f"{self._routers[0]}{path}", json=body, headers=accept)
        else:
            url = f"{self._routers[0]}/v1/requests/{last.request_id}/stream"
            cursor = {} if last.event_id is None else {"last-event-id": last.event_id}
            call = self._client.stream("GET", url, headers=accept | cursor)
        async with call as response:
            if response.status_code != httpx2.codes.OK:
                content = await response.aread()
                if last.request_id is not None and response.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
                    raise _StreamBroken(f"HTTP {response.status_code}")  # this router cannot continue it now
                raise refusal(response.status_code, content)
            last.request_id = response.headers.get(ID_HEADER, last.request_id)
            id: str | None = None
            async for line in response.aiter_lines():
                if line.startswith("id:"):
                    id = line[3:].strip()
                elif line.startswith("data:"):
                    last.event_id = id or last.event_id
                    yield StreamEvent(line[5:].strip(), id)
                    id = None


@dataclass(slots=True)
class _StreamCursor:
    """How far an answer was read."""

    request_id: str | None = None
    event_id: str | None = None
