"""A `Dispatcher` that follows a script instead of asking workers: the lower half's stand-in in tests of the upper one.

A script says what a job does, act by act. Afterwards the fake knows which jobs were admitted, released, started,
aborted and finished. No part of a running router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from baton.domain.errors import BatonError, Broken, Refused
from baton.domain.ids import RequestId
from baton.domain.request import FinishReason, OutputToken
from services.router.generation import GenerationChunk, GenerationJob, Ticket


@dataclass(frozen=True, slots=True)
class Say:
    """Yields one chunk."""

    chunk: GenerationChunk


@dataclass(frozen=True, slots=True)
class Hold:
    """Goes on once `gate` is set."""

    gate: asyncio.Event


@dataclass(frozen=True, slots=True)
class Fail:
    """Raises."""

    error: Exception


Act = Say | Hold | Fail
Script = Callable[[GenerationJob], Sequence[Act]]


@dataclass(slots=True, eq=False)
class FakeTicket:
    """A place at the fake's door; `completed`: its text ended before its tokens did."""

    job: GenerationJob
    completed: bool = False

    def complete(self) -> None:
        """See `Ticket`."""
        self.completed = True


@dataclass(slots=True)
class FakeDispatcher:
    """Plays `script` for every job. `refusals`: errors for the next admissions, None where one is admitted.

    `fullness`: what everybody hears who asks whether there is room at all.
    """

    script: Script
    refusals: list[Refused | None] = field(default_factory=list)
    fullness: Refused | None = None
    admitted: list[GenerationJob] = field(default_factory=list)
    released: list[RequestId] = field(default_factory=list)
    started: list[RequestId] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    finished: list[RequestId] = field(default_factory=list)
    held: set[Ticket] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def refuse_if_full(self, deadline_s: float) -> None:
        """Raises `fullness`."""
        if self.fullness is not None:
            raise self.fullness

    def admit(self, job: GenerationJob) -> Ticket:
        """Takes the job, or raises the next of `refusals`."""
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        ticket = FakeTicket(job)
        self.admitted.append(job)
        self.held.add(ticket)
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Gives a ticket back that was never run; idempotent."""
        if ticket.job.id in self.started:
            raise Broken(f"{ticket.job.id} was run and may not be released")
        if ticket in self.held:
            self.held.remove(ticket)
            self.released.append(ticket.job.id)
            self.changed.set()

    async def run(self, ticket: Ticket) -> AsyncGenerator[GenerationChunk, None]:
        """Plays the script. What ends it before a `finish`, but for its own failure or `complete`, is an abort."""
        id = ticket.job.id
        if ticket not in self.held or id in self.started:
            raise Broken(f"{id} may be run once")
        self.started.append(id)
        ended = self.aborted
        try:
            for act in self.script(ticket.job):
                match act:
                    case Say(chunk):
                        ended = self.finished if chunk.finish is not None else self.aborted
                        yield chunk
                    case Hold(gate):
                        self.changed.set()
                        await gate.wait()
                    case Fail(error):
                        ended = self.finished
                        raise error
        finally:
            self.held.remove(ticket)
            (self.finished if isinstance(ticket, FakeTicket) and ticket.completed else ended).append(id)
            self.changed.set()

    async def until(self, condition: Callable[[FakeDispatcher], bool], timeout_s: float = 5.0) -> None:
        """Waits for something to have happened. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()


def one_by_one(
    tokens: Sequence[int], finish: FinishReason = FinishReason.STOP, *, num_cached_tokens: int = 0
) -> list[Act]:
    """Says the tokens in chunks of one; the last brings `finish`."""
    last = len(tokens) - 1
    return [
        Say(GenerationChunk((OutputToken(i, token),), num_cached_tokens, finish if i == last else None))
        for i, token in enumerate(tokens)
    ]


def failing(error: BatonError) -> Script:
    """Every job fails before its first token."""
    return lambda job: [Fail(error)]
