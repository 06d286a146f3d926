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
from chaos.clients.client import COMPLETIONS, ChaosClient, ClientRequest, StreamEnd, Transcript
from chaos.clients.requests import JSON, LONGISH, SEEDED_PAIR, SEVERAL_PAGES, SHORT, STEADY, STOPPED, TALK

log = logging.getLogger(__name__)

REQUESTS = (SHORT, SHORT, TALK, TALK, STEADY, SEEDED_PAIR, SEVERAL_PAGES, STOPPED, LONGISH, JSON, JSON)
NUM_SALTS = 24
"""Versions of every prompt: enough to make caches evict and to fill every memory of prompts."""
HANG_UP_SHARE, BAD_SHARE = 0.12, 0.05
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

    def problem(self, text: str) -> None:
        """Counts a problem; keeps the text of the first hundred."""
        log.warning("%s", text)
        self.num_problems += 1
        if len(self.problems) < 100:
            self.problems.append(text)


class MixedLoad:
    """`num_clients` clients that send one request after another to alternating routers, until paused or stopped."""

    def __init__(
        self, client: ChaosClient, oracle: Oracle, routers: Callable[[], Sequence[object]], num_clients: int
    ) -> None:
        """`routers`: their addresses as text, which follow a router that restarts at another one."""
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
        self._tasks = [asyncio.create_task(self._run_client(rng)) for rng in rngs]

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

    async def _run_client(self, rng: random.Random) -> None:
        while True:
            await self._running.wait()
            self._num_busy += 1
            try:
                await self._send_one(rng)
            finally:
                self._num_busy -= 1
                if not self._num_busy:
                    self._quiet.set()

    async def _send_one(self, rng: random.Random) -> None:
        routers = list(self._routers())
        rng.shuffle(routers)
        kind = rng.random()
        if kind < BAD_SHARE:
            await self._send_bad_body(rng, routers[0])
            return
        request = rng.choice(REQUESTS).with_salt(f"soak-{rng.randrange(NUM_SALTS)}")
        if kind < BAD_SHARE + HANG_UP_SHARE:
            await self._hang_up(request, routers[0], rng.choice([1, 1, 2, 10]))
        else:
            self._record(await self._client.ask(request, routers))

    async def _hang_up(self, request: ClientRequest, url: object, num_tokens: int) -> None:
        transcript = Transcript(request)
        await self._client.ask_and_hang_up(request, url, num_tokens, transcript)
        if transcript.end is not StreamEnd.LOST:  # its router died before it could hang up
            self._record(transcript)

    async def _send_bad_body(self, rng: random.Random, url: object) -> None:
        headers = {"content-type": "application/json"}
        try:
            answer = await self._client.http.post(
                f"{url}{COMPLETIONS}", content=rng.choice(BAD_BODIES), headers=headers
            )
        except httpx2.TransportError:
            self.report.ends["bad, nobody there"] += 1
            await asyncio.sleep(RETRY_S)  # spares a router that is just starting
            return
        self.report.ends[f"bad, HTTP {answer.status_code}"] += 1
        if answer.status_code not in (400, 404):
            self.report.problem(f"a bad body was answered with {answer.status_code}")

    def _record(self, transcript: Transcript) -> None:
        self._transcripts.append(transcript)
        report = self.report
        report.ends[
            transcript.end.value + (f" {transcript.code}" if transcript.code else "") if transcript.end else "?"
        ] += 1
        report.num_tokens += transcript.num_tokens()
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
