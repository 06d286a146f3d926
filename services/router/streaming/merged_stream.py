"""Mixes the events of a request's choices into one stream, in the order in which they come. No I/O of its own.

`generation_stream` feeds it what workers compute, `journal_reader` what the journal holds. It runs one task a choice; a
choice ends with the event that has a `finish`, and the first error ends them all. One task enters it, takes events and
leaves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, Self

import structlog

from baton.domain.errors import BatonError, Broken, DeadlineExceeded
from services.router.edge.disconnect import join_tasks
from services.router.mailbox import AsyncMailbox
from services.router.text.choice_text import TokenEvent

MAX_WAITING_EVENTS = 64
"""A client that reads slowly slows its own choices down, not the router's memory up."""

log = structlog.get_logger(__name__)


class TokenEventSource(Protocol):
    """The events of all choices of a request, from each one's first to its last."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def finished(self) -> bool:
        """Whether `next` has given every choice's last event."""
        ...

    async def next(self, timeout_s: float) -> TokenEvent | None:
        """The next event of any choice; None after `timeout_s` without one. Raises what ended a choice too early."""
        ...


class MergedStream:
    """`streams`: choice -> its events. `deadline` is of the running loop's clock."""

    def __init__(self, streams: Mapping[int, AsyncGenerator[TokenEvent, None]], deadline: float) -> None:
        self._streams = dict(streams)
        self._deadline = deadline
        self._events: AsyncMailbox[TokenEvent | BatonError] = AsyncMailbox(MAX_WAITING_EVENTS)
        self._abort_error: BatonError | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: set[int] = set()  # choices whose last event is out; their generators are closing by themselves
        self._num_running = len(streams)

    @property
    def finished(self) -> bool:
        """See `TokenEventSource`."""
        return self._num_running == 0

    async def __aenter__(self) -> MergedStream:
        self._tasks = {choice: asyncio.create_task(self._run(choice)) for choice in self._streams}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for choice in self._tasks.keys() - self._ended:
            self._tasks[choice].cancel()
        self._events.close()
        await join_tasks(self._tasks.values())

    def abort(self, error: BatonError) -> None:
        """From now on `next` raises `error`, whatever is waiting."""
        self._abort_error = self._abort_error or error
        self._events.wake()

    async def next(self, timeout_s: float) -> TokenEvent | None:
        """See `TokenEventSource`. Raises `DeadlineExceeded` as well."""
        now = asyncio.get_running_loop().time()
        if now >= self._deadline:
            raise DeadlineExceeded("the answer was not complete at the deadline")
        event = None
        if self._abort_error is None:
            event = await self._events.get_until(min(now + timeout_s, self._deadline))
        if self._abort_error is not None:
            raise self._abort_error
        if isinstance(event, BatonError):
            raise event
        if event is not None and event.finish is not None:
            self._num_running -= 1
        return event

    async def _run(self, choice: int) -> None:
        """The root of a choice's task: its error comes after the events that it gave before."""
        try:
            await self._forward(choice)
        except BatonError as error:
            await self._events.put(error)
        except Exception as error:
            log.exception("choice_failed")
            await self._events.put(Broken(str(error)))

    async def _forward(self, choice: int) -> None:
        async with aclosing(self._streams[choice]) as events:
            async for event in events:
                await self._events.put(event)
                if event.finish is not None:
                    self._ended.add(choice)
                    return
        raise Broken(f"choice {choice} ended without a reason")
