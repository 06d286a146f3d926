"""Streamed completions of a client: events with ids and tokens, and calls that outlive their router.

Used on real processes. Knows only the routers' addresses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.cluster import plain_client

TIMEOUT_S = 60.0


class RouterDraining(Exception):
    """The router refuses new calls because it drains."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a stream and its token (None without choices). `arguments`: of calls, that it adds."""

    id: str
    choice: int | None
    token: int | None
    arguments: str = ""


@contextmanager
def stream(method: str, url: str, **arguments: Any) -> Iterator[Iterator[Event]]:
    """Yields a stream's events; leaving the context hangs up. Raises `RouterDraining`, or `httpx2.TransportError` if it
    breaks."""
    headers = {"accept": "text/event-stream", **arguments.pop("headers", {})}
    with (
        plain_client(timeout=TIMEOUT_S) as client,
        client.stream(method, url, headers=headers, **arguments) as response,
    ):
        if response.status_code != 200:
            error = json.loads(response.read())["error"]
            assert (response.status_code, error["code"]) == (503, "draining"), error
            raise RouterDraining
        yield _events(response)


def ask(url: str, body: dict[str, Any]) -> Any:
    """Starts a call; returns `stream`'s context manager."""
    path = "chat/completions" if "messages" in body else "completions"
    return stream("POST", f"{url}/v1/{path}", json=body)


def resume(url: str, last: Event) -> Any:
    """Resumes a call after `last`, perhaps at another router; returns `stream`'s context manager."""
    return stream("GET", f"{url}/v1/requests/{call_id(last)}/stream", headers={"last-event-id": last.id})


def call_id(event: Event) -> str:
    """Id of the event's call."""
    return event.id.partition(":")[0]


def tokens(events: Sequence[Event], choice: int = 0) -> list[int | None]:
    """Tokens of one choice in order of arrival."""
    return [event.token for event in events if event.choice == choice]


@dataclass(slots=True)
class ResumableCall:
    """One call that resumes over as many connections and routers as it needs.

    It changes the router when a connection breaks or fails, or when a router drains. Other refusals and errors in the
    stream are failures.
    """

    routers: Callable[[], Sequence[str]]
    """Returns the addresses to try in turn: present or recent ones of routers."""
    body: dict[str, Any]
    router_index: int = 0
    """Index of the present router; the next one follows a failure."""
    seen: list[Event] = field(default_factory=list)
    num_resumes: int = 0
    num_refused: int = 0
    """How often a router refused it because it drains."""

    def run(self, timeout_s: float) -> list[int | None]:
        """Returns the tokens."""
        deadline = time.monotonic() + timeout_s
        while not self._read_stream():
            assert time.monotonic() < deadline, f"{len(self.seen)} events, and no end"
            self.router_index += 1
        return tokens(self.seen)

    def _read_stream(self) -> bool:
        """Reads one stream; returns whether the call has ended."""
        urls = self.routers()
        url, is_new = urls[self.router_index % len(urls)], not self.seen
        try:
            with ask(url, self.body) if is_new else resume(url, self.seen[-1]) as events:
                self.num_resumes += not is_new
                for event in events:
                    self.seen.append(event)
        except RouterDraining:
            self.num_refused += 1
        except httpx2.TransportError:
            pass
        return bool(self.seen) and self.seen[-1].choice is None


def _events(response: httpx2.Response) -> Iterator[Event]:
    id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            id = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            yield Event(id, None, None)
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"] or [{"index": None, "token_ids": [None]}]:
                calls = choice.get("delta", {}).get("tool_calls", ())
                arguments = "".join(call["function"].get("arguments", "") for call in calls)
                yield Event(id, choice["index"], choice["token_ids"][0], arguments)
