"""Where a cell is played: the cluster, a client, the oracle, and those who are asking just now. Used by `phases`,
`faults` and `matrix`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.checks.oracle import Oracle
from chaos.clients.client import ChaosClient, ClientRequest, StreamEnd, Transcript
from chaos.testbed.cluster import ChaosCluster


@dataclass(slots=True)
class ClientRun:
    """A client that is asking."""

    transcript: Transcript
    task: asyncio.Task[Transcript]

    async def hang_up(self) -> None:
        """Closes the client's connection, unless its answer is there."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if self.transcript.end in (None, StreamEnd.LOST):
            self.transcript.finish(StreamEnd.HUNG_UP)


@dataclass(slots=True)
class PhaseContext:
    """A moment in which the phase is reached: who asks, and the processes that have the request in hand.

    `other_router` is a router that has nothing to do with it.
    """

    runs: list[ClientRun]
    router: str
    other_router: str
    prefill: str = ""
    decode: str = ""


@dataclass(slots=True)
class ChaosHarness:
    """`hold_s`: how long a fault that can end is kept up at most; `redis_hold_s` for those of the state store."""

    cluster: ChaosCluster
    client: ChaosClient
    oracle: Oracle
    hold_s: float = 10.0
    redis_hold_s: float = 10.0
    _num_salts: int = 0
    _open: list[ClientRun] = field(default_factory=list)

    def with_fresh_salt(self, request: ClientRequest) -> ClientRequest:
        """The request in pages that nobody has cached."""
        self._num_salts += 1
        return request.with_salt(f"cell-{self._num_salts}")

    def ask(self, request: ClientRequest, *routers: str) -> ClientRun:
        """Starts a client that asks the first of `routers` and resumes at the others."""
        transcript = Transcript(request)
        urls = [RouterUrl(self.cluster, router) for router in routers]
        run = ClientRun(transcript, asyncio.create_task(self.client.ask(request, urls, transcript)))
        self._open.append(run)
        return run

    def transcripts(self) -> list[Transcript]:
        """Of everybody who has asked since the last dismissal."""
        return [run.transcript for run in self._open]

    async def hang_up_all(self) -> Sequence[ClientRun]:
        """Everybody who asked since the last time; those who are still waiting hang up."""
        runs, self._open = self._open, []
        for run in runs:
            await run.hang_up()
        return runs


@dataclass(frozen=True, slots=True)
class RouterUrl:
    """Where a router is now: it may have been restarted elsewhere since."""

    cluster: ChaosCluster
    router: str

    def __str__(self) -> str:
        return self.cluster.processes[self.router].url
