"""Mixed load without end: chats, completions, pairs, long prompts, clients that hang up, bodies that are refused.

`soak` runs it. The oracle checks every answer at once; right answers are not kept.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx2

from chaos.checks.oracle import Oracle
from chaos.checks.tenant_shares import TenantShares
from chaos.clients.client import COMPLETIONS, ChaosClient, ClientRequest, StreamEnd, Transcript
from chaos.clients.requests import JSON, LONGISH, SEEDED_PAIR, SEVERAL_PAGES, SHORT, STEADY, STOPPED, TALK
from chaos.clients.tenants import LoadTenant

log = logging.getLogger(__name__)

REQUESTS = (SHORT, SHORT, TALK, TALK, STEADY, SEEDED_PAIR, SEVERAL_PAGES, STOPPED, LONGISH, JSON, JSON)
NUM_SALTS = 24
"""Versions of every prompt: enough to make caches evict and to fill every memory of prompts."""
HANG_UP_SHARE, BAD_SHARE = 0.12, 0.05
FOREIGN_READ_SHARE = 0.1
"""Share of the answers that another tenant tries to read."""
REFUSALS = frozenset({"no_workers", "overloaded", "draining", "store_unavailable"})
"""Refusal codes, which are valid answers while the required workers are away."""
BAD_BODIES = (b"{", b"[]", b'{"model": "bundled", "prompt": ""}', b'{"model": "nobody", "prompt": "x"}')
RETRY_S = 0.2


@dataclass(slots=True)
class MixedLoadReport:
    """Counts by kind of end, and a bounded list of problems."""

    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0
    num_lost: int = 0
    """Answers lost with both of their copies; none of them was announced as durable."""
    num_tokens: int = 0
    num_resumes: int = 0
    num_dropped: int = 0
    """Calls sent again as they were announced as not stored and their router died."""
    longest_gap_s: float = 0.0
    shares: TenantShares = field(default_factory=TenantShares)

    def problem(self, text: str) -> None:
        """Counts a problem; keeps the text of the first hundred."""
        log.warning("%s", text)
        self.num_problems += 1
        if len(self.problems) < 100:
            self.problems.append(text)


class MixedLoad:
    """`num_clients` clients that send one request after another to alternating routers, until paused or stopped."""

    def __init__(
        self,
        client: ChaosClient,
        oracle: Oracle,
        routers: Callable[[], Sequence[object]],
        num_clients: int,
        tenants: Sequence[LoadTenant] = (),
    ) -> None:
        """`routers`: their addresses as text, which follow a router that restarts at another one.

        `tenants`: whose keys the clients have, in turn; none: the cluster has no keys.
        """
        self._tenants = tenants
        self.report = MixedLoadReport()
        self._client = client
        self._oracle = oracle
        self._routers = routers
        self._num_clients = num_clients
        self._running = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._num_busy = 0
        self._quiet = asyncio.Event()
        self._transcripts: list[Transcript] = []
        self._losses_s: list[float] = []

    @property
    def num_in_flight(self) -> int:
        """Number of requests that are being answered."""
        return self._num_busy

    def allow_loss(self) -> None:
        """Notes that a router and the store have lost their data at the same time, just now.

        A call that ran then, and was not announced as durable, may be lost: no process has a copy.
        """
        self._losses_s.append(time.monotonic())

    def take_transcripts(self) -> list[Transcript]:
        """Returns all transcripts since the last call."""
        transcripts, self._transcripts = self._transcripts, []
        return transcripts

    def start(self, seed: int) -> None:
        """From now on."""
        self._running.set()
        rngs = [random.Random(f"client {seed} {number}") for number in range(self._num_clients)]
        tenants = self._tenants or (None,)
        self._tasks = [
            asyncio.create_task(self._run_client(rng, tenants[number % len(tenants)]))
            for number, rng in enumerate(rngs)
        ]

    async def pause(self, timeout_s: float) -> None:
        """Stops new requests and returns when all answers are complete. Raises `TimeoutError`."""
        self._running.clear()
        async with asyncio.timeout(timeout_s):
            while self._num_busy:
                self._quiet.clear()
                await self._quiet.wait()

    def resume(self) -> None:
        """Continues after a pause."""
        self._running.set()

    async def end(self) -> None:
        """Ends all clients; raises the error of a failed one."""
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    async def _run_client(self, rng: random.Random, tenant: LoadTenant | None) -> None:
        burst = 1 if tenant is None else tenant.burst
        while True:
            await self._running.wait()
            self._num_busy += burst
            try:
                async with asyncio.TaskGroup() as sending:
                    for _ in range(burst):
                        sending.create_task(self._send_one(rng, tenant))
            finally:
                self._num_busy -= burst
                if not self._num_busy:
                    self._quiet.set()

    async def _send_one(self, rng: random.Random, tenant: LoadTenant | None) -> None:
        routers = list(self._routers())
        rng.shuffle(routers)
        kind = rng.random()
        if kind < BAD_SHARE:
            await self._send_bad_body(rng, routers[0], tenant)
            return
        request = rng.choice(REQUESTS).with_salt(f"soak-{rng.randrange(NUM_SALTS)}").with_tenant(tenant)
        if kind < BAD_SHARE + HANG_UP_SHARE:
            await self._hang_up(request, routers[0], rng.choice([1, 1, 2, 10]))
            return
        transcript = await self._client.ask(request, routers)
        self._record(transcript)
        if tenant is not None and transcript.call_id and rng.random() < FOREIGN_READ_SHARE:
            await self._read_as_another(tenant, transcript.call_id, rng.choice(routers))
        if tenant is not None and transcript.end is StreamEnd.REFUSED:
            await asyncio.sleep(RETRY_S)  # a refused flood would only load this process

    async def _read_as_another(self, tenant: LoadTenant, call_id: str, url: object) -> None:
        """Another tenant reads the call, and must not find it."""
        other = self._tenants[(self._tenants.index(tenant) + 1) % len(self._tenants)]
        status = await self._client.read_as(other, call_id, url)
        if status not in (None, httpx2.codes.NOT_FOUND, httpx2.codes.SERVICE_UNAVAILABLE):
            self.report.problem(f"{call_id}: of {tenant.name}, answers {other.name} with HTTP {status}, not 404")
        elif status == httpx2.codes.NOT_FOUND:  # counts if the call was there
            is_there = await self._client.read_as(tenant, call_id, url) == httpx2.codes.OK
            self.report.shares.of(tenant.name).num_foreign_reads += is_there

    async def _hang_up(self, request: ClientRequest, url: object, num_tokens: int) -> None:
        transcript = Transcript(request)
        await self._client.ask_and_hang_up(request, url, num_tokens, transcript)
        if transcript.end is not StreamEnd.LOST:  # its router died before it could hang up
            self._record(transcript)

    async def _send_bad_body(self, rng: random.Random, url: object, tenant: LoadTenant | None) -> None:
        headers = {"content-type": "application/json", **({} if tenant is None else tenant.headers)}
        try:
            answer = await self._client.http.post(
                f"{url}{COMPLETIONS}", content=rng.choice(BAD_BODIES), headers=headers
            )
        except httpx2.TransportError:
            self.report.ends["bad, nobody there"] += 1
            await asyncio.sleep(RETRY_S)  # spares a router that is just starting
            return
        self.report.ends[f"bad, HTTP {answer.status_code}"] += 1
        if answer.status_code not in (400, 404, 429):  # a newcomer may be refused before its prompt is looked at
            self.report.problem(f"a bad body was answered with {answer.status_code}")

    def _record(self, transcript: Transcript) -> None:
        self._transcripts.append(transcript)
        report = self.report
        report.ends[
            transcript.end.value + (f" {transcript.code}" if transcript.code else "") if transcript.end else "?"
        ] += 1
        report.num_tokens += transcript.num_tokens()
        if transcript.request.tenant is not None:
            report.shares.record(transcript.request.tenant.name, transcript.code, transcript.num_tokens())
        report.num_resumes += transcript.num_resumes
        report.num_dropped += len(transcript.dropped)
        report.longest_gap_s = max(report.longest_gap_s, transcript.longest_gap_s)
        if transcript.end in (StreamEnd.LOST, StreamEnd.TIMED_OUT) and self._may_be_lost(transcript):
            report.num_lost += 1
            return
        for problem in self._oracle.check(transcript, REFUSALS if not transcript.events else frozenset()):
            report.problem(f"{transcript.call_id}: {problem}")

    def _may_be_lost(self, transcript: Transcript) -> bool:
        return not transcript.durable and any(
            transcript.began_s <= lost_s <= transcript.ended_s for lost_s in self._losses_s
        )
