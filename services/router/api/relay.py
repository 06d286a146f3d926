"""Drives the choices of one call: tokens come from the dispatcher, texts go to the client's answer.

1. `admit_all` takes a ticket for every choice, or none.
2. `async with Relay(...)` starts a task a choice. The first choice of a prompt leads: the others start once it has
   given its first token, so that they find the prompt in the prefix cache.
3. `next` hands out the choices' events as they come, mixed; each is one token and the text that became certain with it.
4. Leaving the block closes every generator (which aborts what still runs) and releases the tickets that never ran.

`delivery` runs it for a client and `carry` for nobody: there some choices have ended already, and the others begin with
what earlier attempts emitted. The relay knows text and stop strings, but neither HTTP nor workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType

from baton.domain.errors import BatonError, DeadlineExceeded
from services.router.api.calls import ValidCall
from services.router.api.mixer import Mixer
from services.router.generation import Dispatcher, GenerationChunk, Ticket
from services.router.text.choice_text import ChoiceText, TokenEvent
from services.router.text.model import TextModel

DEADLINE_GRACE_S = 5.0
"""The dispatcher ends a request at its deadline; this much later the relay does."""


def admit_all(dispatcher: Dispatcher, call: ValidCall, choices: Iterable[int] | None = None) -> dict[int, Ticket]:
    """A ticket for each of the choices (all that have jobs by default). Raises the first `Refused`, having released
    the others."""
    tickets: dict[int, Ticket] = {}
    try:
        for choice in range(len(call.jobs)) if choices is None else choices:
            tickets[choice] = dispatcher.admit(call.jobs[choice])
    except BaseException:
        for ticket in tickets.values():
            dispatcher.release(ticket)
        raise
    return tickets


def choice_text(text: TextModel, call: ValidCall, choice: int) -> ChoiceText:
    """The text of one choice, before its first token."""
    detokenizer = text.detokenizer(skip_special_tokens=call.skip_special_tokens, context=call.context(choice))
    return ChoiceText(choice, call.jobs[choice].stop, detokenizer, call.stop_strings)


def latest_end_s(call: ValidCall) -> float:
    """How long after its admission a call may take, at most."""
    return max((job.deadline_s for job in call.jobs), default=0.0) + DEADLINE_GRACE_S


class Relay:
    """The running choices of one call, an `EventSource`. `tickets`: choice -> its ticket."""

    def __init__(self, dispatcher: Dispatcher, text: TextModel, call: ValidCall, tickets: Mapping[int, Ticket]) -> None:
        self._dispatcher = dispatcher
        self._text = text
        self._call = call
        self._waiting = dict(tickets)  # those that were never run
        self._leaders = {choice: self._leader(choice) for choice in tickets}
        self._leads = {leader: asyncio.Event() for leader in self._leaders.values()}
        self._deadline = asyncio.get_running_loop().time() + latest_end_s(call)
        self._mixer = Mixer({choice: self._generate(choice) for choice in tickets}, self._deadline)

    @property
    def finished(self) -> bool:
        """Whether `next` has given every choice's last event."""
        return self._mixer.finished

    async def __aenter__(self) -> Relay:
        await self._mixer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._mixer.__aexit__(kind, error, trace)
        finally:
            for ticket in self._waiting.values():
                self._dispatcher.release(ticket)
            self._waiting.clear()

    async def next(self, silence_s: float) -> TokenEvent | None:
        """The next event of any choice; None after `silence_s` without one.

        Raises what ended a choice before its time: `Interrupted`, `DeadlineExceeded`, `Refused` or `Broken`.
        """
        return await self._mixer.next(silence_s)

    def break_off(self, error: BatonError) -> None:
        """From now on `next` raises `error`."""
        self._mixer.break_off(error)

    async def _generate(self, choice: int) -> AsyncGenerator[TokenEvent, None]:
        """One choice's events. What its text ends, a stop string, is told to the ticket before its run is closed."""
        leader = self._leaders[choice]
        lead = self._leads[leader]
        if leader != choice:
            await self._follow(lead)
        state, ticket = choice_text(self._text, self._call, choice), self._waiting[choice]
        for event in state.events(_emitted_before(ticket)):
            _complete_with(ticket, event)
            yield event
        del self._waiting[choice]
        async with aclosing(self._dispatcher.run(ticket)) as chunks:
            async for chunk in chunks:
                lead.set()
                for event in state.events(chunk):
                    _complete_with(ticket, event)
                    yield event

    def _leader(self, choice: int) -> int:
        """Who leads a choice here: nobody else, if its leader has ended before."""
        leader = self._call.leader(choice)
        return leader if leader in self._waiting else choice

    async def _follow(self, lead: asyncio.Event) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await lead.wait()
        except TimeoutError:
            raise DeadlineExceeded("no first token before the deadline") from None


def _complete_with(ticket: Ticket, event: TokenEvent) -> None:
    if event.finish is not None:
        ticket.complete()


def _emitted_before(ticket: Ticket) -> GenerationChunk:
    """What earlier attempts gave: the text is a function of all tokens from the first one on."""
    return GenerationChunk(ticket.job.emitted, ticket.job.num_cached_tokens)
