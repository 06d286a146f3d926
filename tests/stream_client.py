"""Streamed completions as a client sees them: events with their ids and tokens, and a call that outlives its router.

For tests over real processes. Knows of the cluster only the routers' addresses.
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
    """It takes no call any more, and says so."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream, with the token in it (None for one without choices)."""

    id: str
    choice: int | None
    token: int | None


@contextmanager
def stream(method: str, url: str, **arguments: Any) -> Iterator[Iterator[Event]]:
    """A stream's events as they come; leaving hangs up. Raises `RouterDraining`, `httpx2.TransportError` if it
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
    """A new call; `stream`'s context manager."""
    return stream("POST", f"{url}/v1/completions", json=body)


def resume(url: str, last: Event) -> Any:
    """The same call after `last`, maybe at another router; `stream`'s context manager."""
    return stream("GET", f"{url}/v1/requests/{call_id(last)}/stream", headers={"last-event-id": last.id})


def call_id(event: Event) -> str:
    """Of the call that the event belongs to."""
    return event.id.partition(":")[0]


def tokens(events: Sequence[Event], choice: int = 0) -> list[int | None]:
    """Of one choice, in the order in which they came."""
    return [event.token for event in events if event.choice == choice]


@dataclass(slots=True)
class ResumableCall:
    """One call that is carried to its end over as many connections and routers as that takes.

    It goes elsewhere when a connection breaks or cannot be made, or when a router says that it is leaving. Any other
    refusal, and an error in the stream, is a failure.
    """

    routers: Callable[[], Sequence[str]]
    """Addresses to try in turn: where routers are, or were a moment ago."""
    body: dict[str, Any]
    router_index: int = 0
    """Which router is asked now; another one when that one fails."""
    seen: list[Event] = field(default_factory=list)
    num_resumes: int = 0

    def run(self, timeout_s: float) -> list[int | None]:
        """The tokens."""
        deadline = time.monotonic() + timeout_s
        while not self._read_stream():
            assert time.monotonic() < deadline, f"{len(self.seen)} events, and no end"
            self.router_index += 1
        return tokens(self.seen)

    def _read_stream(self) -> bool:
        """To one router, for as long as it speaks; whether the end has come."""
        urls = self.routers()
        url, is_new = urls[self.router_index % len(urls)], not self.seen
        try:
            with ask(url, self.body) if is_new else resume(url, self.seen[-1]) as events:
                self.num_resumes += not is_new
                for event in events:
                    self.seen.append(event)
        except (RouterDraining, httpx2.TransportError):
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
                yield Event(id, choice["index"], choice["token_ids"][0])
