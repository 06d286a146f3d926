"""Drives the choices of one call: tokens come from the dispatcher, texts go to the client's answer.

1. `admit_all` takes a ticket for every choice, or none.
2. `async with Relay(...)` starts a task a choice. The first choice of a prompt leads: the others start once it has
   given its first token, so that they find the prompt in the prefix cache.
3. `next` hands out the choices' events as they come, mixed; each is one token and the text that became certain with it.
4. Leaving the block closes every generator (which aborts what still runs) and releases the tickets that never ran.

`delivery` is the only caller. The relay knows text and stop strings, but neither HTTP nor workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from types import TracebackType

import structlog

from baton.domain.errors import BatonError, Broken, DeadlineExceeded
from services.router.api.calls import ValidCall
from services.router.api.connection import end
from services.router.generation import Dispatcher, Ticket
from services.router.text.choice_text import ChoiceText, TokenEvent
from services.router.text.model import TextModel

MAX_WAITING_EVENTS = 64
"""A client that reads slowly slows its own choices down, not the router's memory up."""

DEADLINE_GRACE_S = 5.0
"""The dispatcher ends a request at its deadline; this much later the relay does."""

log = structlog.get_logger(__name__)


def admit_all(dispatcher: Dispatcher, call: ValidCall) -> tuple[Ticket, ...]:
    """A ticket for each choice, in order. Raises the first `Refused`, having released the others."""
    tickets: list[Ticket] = []
    try:
        for job in call.jobs:
            tickets.append(dispatcher.admit(job))
    except BaseException:
        for ticket in tickets:
            dispatcher.release(ticket)
        raise
    return tuple(tickets)


class Relay:
    """The running choices of one call. One task enters it, takes events and leaves it."""

    def __init__(self, dispatcher: Dispatcher, text: TextModel, call: ValidCall, tickets: Sequence[Ticket]) -> None:
        self._dispatcher = dispatcher
        self._text = text
        self._call = call
        self._waiting = dict(enumerate(tickets))  # tickets that were never run
        self._leads = {call.leader(choice): asyncio.Event() for choice in self._waiting}
        self._events: asyncio.Queue[TokenEvent | BatonError] = asyncio.Queue(MAX_WAITING_EVENTS)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: set[int] = set()  # choices whose last event is out; their generators are closing by themselves
        self._num_running = len(tickets)
        self._deadline_s = max((job.deadline_s for job in call.jobs), default=0.0) + DEADLINE_GRACE_S

    @property
    def finished(self) -> bool:
        """Whether `next` has given every choice's last event."""
        return self._num_running == 0

    async def __aenter__(self) -> Relay:
        self._deadline_s += asyncio.get_running_loop().time()
        self._tasks = {choice: asyncio.create_task(self._run(choice)) for choice in self._waiting}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for choice in self._tasks.keys() - self._ended:
                self._tasks[choice].cancel()
            await end(self._tasks.values())
        finally:
            for ticket in self._waiting.values():
                self._dispatcher.release(ticket)
            self._waiting.clear()

    async def next(self, silence_s: float) -> TokenEvent | None:
        """The next event of any choice; None after `silence_s` without one.

        Raises what ended a choice before its time: `Interrupted`, `DeadlineExceeded`, `Refused` or `Broken`.
        """
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceeded("the answer was not complete at the deadline")
        try:
            async with asyncio.timeout(min(silence_s, left_s)):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, BatonError):
            raise event
        self._num_running -= event.finish is not None
        return event

    async def _run(self, choice: int) -> None:
        """The root of one choice's task: ends in a last event or in an error, one of which `next` gives."""
        try:
            await self._generate(choice)
        except BatonError as error:
            await self._events.put(error)
        except Exception as error:
            log.exception("relay_failed", request_id=self._call.jobs[choice].id)
            await self._events.put(Broken(str(error)))

    async def _generate(self, choice: int) -> None:
        lead = self._leads[self._call.leader(choice)]
        if self._call.leader(choice) != choice:
            await self._follow(lead)
        state = self._choice_text(choice)
        async with aclosing(self._dispatcher.run(self._waiting.pop(choice))) as chunks:
            async for chunk in chunks:
                lead.set()
                for event in state.events(chunk):
                    await self._events.put(event)
                    if event.finish is not None:
                        self._ended.add(choice)
                        return
        raise Broken(f"request {self._call.jobs[choice].id} ended without a reason")

    async def _follow(self, lead: asyncio.Event) -> None:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                await lead.wait()
        except TimeoutError:
            raise DeadlineExceeded("no first token before the deadline") from None

    def _choice_text(self, choice: int) -> ChoiceText:
        call = self._call
        skip = call.skip_special_tokens
        detokenizer = self._text.detokenizer(skip_special_tokens=skip, context=call.context(choice))
        return ChoiceText(choice, call.jobs[choice].stop, detokenizer, call.stop_strings)
