"""A dispatcher, its book and its mock workers: what the dispatch tests run in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.domain.ids import RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.request import SamplingParams, StopParams
from baton.rpc.client import Channels
from baton.state.memory import MemoryBook
from baton.state.options import BookOptions
from baton.state.writer import BookWriter
from baton.telemetry.timeline import Moment
from services.router.dispatch.aborts import Aborts
from services.router.dispatch.admission import DoorLimits
from services.router.dispatch.booking import BookingLimits
from services.router.dispatch.dispatcher import DispatchLimits, Identity, TokenDispatcher
from services.router.dispatch.fleet import Fleet, FleetLimits
from services.router.dispatch.quarantine import RestLimits
from services.router.generation import GenerationChunk, GenerationJob
from tests.mock_workers import (
    MODEL,
    At,
    MockCluster,
    MockDecode,
    MockPrefill,
    token_at,
)

PROMPT = tuple(range(1, 11))
LIMITS = DispatchLimits(
    door=DoorLimits(max_running_requests=8, max_queued_requests=8, max_queued_tokens=1000),
    booking=BookingLimits(promise_timeout_s=2.0, patience_s=0.3),
    max_attempts=3,
)
SHORT_RESTS = RestLimits(first_s=0.05, longest_s=0.2, excused_s=0.0)
FLEET_LIMITS = FleetLimits(worker_ttl_s=0.5, heartbeat_interval_s=0.05, max_step_age_s=30.0, link_rest=SHORT_RESTS)
ONE_AT_A_TIME = replace(LIMITS, door=DoorLimits(1, 2, 25))


@dataclass(slots=True)
class Diary:
    """A witness that remembers."""

    entries: list[str] = field(default_factory=list)

    def on_moment(self, id: RequestId, moment: Moment) -> None:
        self.entries.append(moment.value)

    def on_retry(self, id: RequestId) -> None:
        self.entries.append("retry")


@dataclass(slots=True)
class World:
    """A dispatcher and all it talks to."""

    dispatcher: TokenDispatcher
    fleet: Fleet
    cluster: MockCluster
    book: MemoryBook
    writer: BookWriter
    diary: Diary

    @property
    def prefill(self) -> MockPrefill:
        return self.cluster.prefills[0]

    @property
    def decode(self) -> MockDecode:
        return self.cluster.decodes[0]

    async def generate(self, job: GenerationJob) -> list[GenerationChunk]:
        return [chunk async for chunk in self.dispatcher.run(self.dispatcher.admit(job))]

    async def state(self, job: GenerationJob) -> RequestState:
        """Where the reception book has the request, once everything is written."""
        await self.writer.close()
        record = await self.book.get(job.id)
        assert record is not None
        return record.state


@asynccontextmanager
async def world(
    prefill: Sequence[Sequence[At]] = ((),),
    decode: Sequence[Sequence[At]] = ((),),
    limits: DispatchLimits = LIMITS,
    linked: bool = True,
    fleet_limits: FleetLimits = FLEET_LIMITS,
) -> AsyncIterator[World]:
    book = MemoryBook(BookOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
    cluster = MockCluster(
        book,
        [MockPrefill(f"prefill-{n}", script) for n, script in enumerate(prefill)],
        [MockDecode(f"decode-{n}", script) for n, script in enumerate(decode)],
        num_probe_bytes=4096 if linked else 0,
    )
    channels, diary = Channels(), Diary()
    fleet = Fleet(book, channels, MODEL, fleet_limits)
    aborts = Aborts(fleet)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(book.close)
        stack.push_async_callback(cluster.stop)
        stack.push_async_callback(channels.close)
        stack.push_async_callback(fleet.close)
        stack.push_async_callback(aborts.close)
        writer = await stack.enter_async_context(BookWriter(book))
        dispatcher = TokenDispatcher(fleet, aborts, writer, diary, Identity("router-test", MODEL), limits)
        await cluster.start()
        fleet.start()
        async with asyncio.timeout(5):
            await fleet.changed()
        yield World(dispatcher, fleet, cluster, book, writer, diary)
        assert dispatcher.num_open == 0, "a ticket was never given back"
        async with asyncio.timeout(5):
            await dispatcher.wait_empty()


def job(
    name: str = "r", max_tokens: int = 5, deadline_s: float = 10.0, prompt: tuple[int, ...] = PROMPT
) -> GenerationJob:
    return GenerationJob(RequestId(name), prompt, SamplingParams(seed=7), StopParams(max_tokens), "", deadline_s)


def tokens(chunks: Sequence[GenerationChunk]) -> list[tuple[int, int]]:
    return [(token.index, token.token) for chunk in chunks for token in chunk.tokens]


def scripted(num_tokens: int) -> list[tuple[int, int]]:
    return [(index, token_at(index)) for index in range(num_tokens)]


async def two_looks(w: World) -> None:
    """Waits until the fleet has certainly read what is announced now: one look may be under way already."""
    async with asyncio.timeout(5):
        await w.fleet.changed()
        await w.fleet.changed()


async def consume(chunks: AsyncIterator[GenerationChunk]) -> list[GenerationChunk]:
    return [chunk async for chunk in chunks]
