"""Where a cell is played: the cluster, a client, the oracle, and those who are asking just now. Used by `phases`,
`faults` and `matrix`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.client import Client, End, Question, Transcript
from chaos.cluster import Cluster
from chaos.oracle import Oracle


@dataclass(slots=True)
class Run:
    """A client that is asking."""

    transcript: Transcript
    task: asyncio.Task[Transcript]

    async def hang_up(self) -> None:
        """Closes the client's connection, unless its answer is there."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if self.transcript.end in (None, End.LOST):
            self.transcript.finish(End.HUNG_UP)


@dataclass(slots=True)
class Scene:
    """A moment in which the phase is reached: who asks, and the processes that have the request in hand.

    `bystander` is a router that has nothing to do with it.
    """

    runs: list[Run]
    router: str
    bystander: str
    prefill: str = ""
    decode: str = ""


@dataclass(slots=True)
class Stage:
    """`hold_s`: how long a fault that can end is kept up at most; `book_hold_s` for those of the reception book."""

    cluster: Cluster
    client: Client
    oracle: Oracle
    hold_s: float = 10.0
    book_hold_s: float = 10.0
    _num_salts: int = 0
    _open: list[Run] = field(default_factory=list)

    def fresh(self, question: Question) -> Question:
        """The question in pages that nobody has cached."""
        self._num_salts += 1
        return question.salted(f"cell-{self._num_salts}")

    def ask(self, question: Question, *routers: str) -> Run:
        """Starts a client that asks the first of `routers` and resumes at the others."""
        transcript = Transcript(question)
        urls = [Route(self.cluster, router) for router in routers]
        run = Run(transcript, asyncio.create_task(self.client.ask(question, urls, transcript)))
        self._open.append(run)
        return run

    def transcripts(self) -> list[Transcript]:
        """Of everybody who has asked since the last dismissal."""
        return [run.transcript for run in self._open]

    async def dismiss(self) -> Sequence[Run]:
        """Everybody who asked since the last time; those who are still waiting hang up."""
        runs, self._open = self._open, []
        for run in runs:
            await run.hang_up()
        return runs


@dataclass(frozen=True, slots=True)
class Route:
    """Where a router is now: it may have been restarted elsewhere since."""

    cluster: Cluster
    router: str

    def __str__(self) -> str:
        return self.cluster.processes[self.router].url
