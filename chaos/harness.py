"""The harness of a cell: the cluster, a client, the oracle, and the running clients.

Used by `phases`, `faults` and `matrix`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.checks.oracle import Oracle
from chaos.clients.client import ChaosClient, ClientRequest, StreamEnd, Transcript
from chaos.clients.silent import SilentClient
from chaos.store_faults import StoreSnapshot
from chaos.testbed.cluster import ChaosCluster
from chaos.testbed.process import ChildProcess


@dataclass(slots=True)
class ClientRun:
    """A client with a request under way."""

    transcript: Transcript
    task: asyncio.Task[Transcript]

    async def hang_up(self) -> None:
        """Closes the client's connection unless its answer is complete."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if self.transcript.end in (None, StreamEnd.LOST):
            self.transcript.finish(StreamEnd.HUNG_UP)


@dataclass(slots=True)
class PhaseContext:
    """A reached phase: its clients, and the processes that hold the request.

    `other_router`: a router that does not hold the request. `snapshot`: of the store, for a roll-back.
    """

    runs: list[ClientRun]
    router: str
    other_router: str
    prefill: str = ""
    decode: str = ""
    encode: str = ""
    snapshot: StoreSnapshot | None = None


@dataclass(slots=True)
class ChaosHarness:
    """`hold_s`: longest duration of a fault that can end; `redis_hold_s`: of faults of the state store."""

    cluster: ChaosCluster
    client: ChaosClient
    oracle: Oracle
    hold_s: float = 10.0
    redis_hold_s: float = 10.0
    silent: list[SilentClient] = field(default_factory=list)
    intruders: list[ChildProcess] = field(default_factory=list)
    _num_salts: int = 0
    _open: list[ClientRun] = field(default_factory=list)

    def with_fresh_salt(self, request: ClientRequest) -> ClientRequest:
        """The request with a new salt, so no page of it is cached."""
        self._num_salts += 1
        return request.with_salt(f"cell-{self._num_salts}")

    def ask(self, request: ClientRequest, *routers: str) -> ClientRun:
        """Starts a client of the first of `routers` that resumes at the others."""
        transcript = Transcript(request)
        urls = [RouterUrl(self.cluster, router) for router in routers]
        run = ClientRun(transcript, asyncio.create_task(self.client.ask(request, urls, transcript)))
        self._open.append(run)
        return run

    def follow(self, run: ClientRun, *routers: str) -> ClientRun:
        """Starts a second client of the same call, at the first of `routers`."""
        transcript = Transcript(run.transcript.request)
        urls = [RouterUrl(self.cluster, router) for router in routers]
        task = asyncio.create_task(self.client.follow(run.transcript.call_id, transcript, urls))
        follower = ClientRun(transcript, task)
        self._open.append(follower)
        return follower

    def transcripts(self) -> list[Transcript]:
        """Runs of all clients since the last dismissal."""
        return [run.transcript for run in self._open]

    async def hang_up_all(self) -> Sequence[ClientRun]:
        """Returns the clients since the last call; waiting ones hang up."""
        runs, self._open = self._open, []
        silent, self.silent = self.silent, []
        for client in silent:
            client.close()
        for run in runs:
            await run.hang_up()
        return runs


@dataclass(frozen=True, slots=True)
class RouterUrl:
    """A router's present address; a restart may have moved it."""

    cluster: ChaosCluster
    router: str

    def __str__(self) -> str:
        return self.cluster.processes[self.router].url
