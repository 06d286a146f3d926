"""A dispatcher with a memory store and mock workers, for the dispatch tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.domain.ids import AttemptId, RequestId, new_incarnation
from baton.domain.lifecycle import RequestState
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.domain.scores.prompt_scores import PromptScores
from baton.domain.timing.attempt_times import ImportTimes
from baton.domain.trace_context import TraceContext
from baton.rpc.channel_pool import ChannelPool
from baton.services.router.admission.admission_queue import AdmissionLimits
from baton.services.router.admission.slot import SlotSpec
from baton.services.router.dispatch.aborts import Aborts
from baton.services.router.dispatch.dispatcher import DispatchLimits, RouterIdentity, TokenDispatcher
from baton.services.router.dispatch.link_breaker import LinkBreakerLimits
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter
from baton.services.router.dispatch.reserve import ReserveLimits
from baton.services.router.dispatch.sessions.worker_sessions import WorkerSessions
from baton.services.router.dispatch.workers import WorkerLimits, WorkerSet
from baton.services.router.generation import AdmittedRequest, SequenceSpec, TokenChunk
from baton.session.wires.grpc_wire import GrpcWire
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.request_timer import RequestOrigin, RequestTimer
from baton.telemetry.request_trace import Stage
from baton.telemetry.sequence_timer import SequenceTimer
from tests.mock_workers import (
    MODEL,
    MockCluster,
    MockDecode,
    MockPrefill,
    ScriptedAction,
    scores_of,
    token_at,
)
from tests.mocks.sessions import LIMITS as LIMITS_OF_SESSIONS

uses_sessions = True
"""True: all that workers are asked goes in sessions, as by default. Set by the fixture `both_streams`."""

PROMPT = tuple(range(1, 11))
CONTEXT = TraceContext("http-1", "0" * 31 + "1", "0" * 15 + "2", sampled=True)
REQUEST_BYTES = SlotSpec(num_tokens=len(PROMPT)).num_bytes
LIMITS = DispatchLimits(
    admission=AdmissionLimits(max_running_requests=8, max_queued_bytes=8 * REQUEST_BYTES),
    reserve=ReserveLimits(reserve_timeout_s=2.0, worker_wait_s=0.3),
    max_attempts=3,
)
SHORT_BREAKERS = LinkBreakerLimits(first_open_s=0.05, max_open_s=0.2, grace_s=0.0)
WORKER_LIMITS = WorkerLimits(
    worker_ttl_s=0.5, heartbeat_interval_s=0.05, max_step_age_s=30.0, link_breaker=SHORT_BREAKERS
)
ONE_AT_A_TIME = replace(LIMITS, admission=AdmissionLimits(1, max_queued_bytes=2 * REQUEST_BYTES))


class RecordedTimer(SequenceTimer):
    """Lists the stages that were stamped."""

    def __init__(self, timings: RecordedTimings) -> None:
        super().__init__(RequestTimer(RequestOrigin("/v1/completions", context=CONTEXT), time.monotonic()), 0)
        self._timings = timings

    def stamp(self, stage: Stage) -> None:
        super().stamp(stage)
        self._timings.entries.append(stage.value)

    def imported(self, times: ImportTimes | None) -> None:
        super().imported(times)
        self._timings.entries.append("import")

    def lost(self, code: str, phase: str) -> None:
        super().lost(code, phase)
        self._timings.entries.append("retry")
        self._timings.codes.append(code)
        self._timings.retried.set()


@dataclass(slots=True)
class RecordedTimings:
    """The stamps of all requests' timers, in order."""

    entries: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)  # of the failed attempts
    retried: asyncio.Event = field(default_factory=asyncio.Event)

    timers: list[SequenceTimer] = field(default_factory=list)

    def timer(self) -> SequenceTimer:
        self.timers.append(RecordedTimer(self))
        return self.timers[-1]


@dataclass(slots=True)
class World:
    """A dispatcher and its neighbours."""

    dispatcher: TokenDispatcher
    workers: WorkerSet
    cluster: MockCluster
    store: MemoryStore
    writer: StoreWriter
    timings: RecordedTimings

    @property
    def prefill(self) -> MockPrefill:
        return self.cluster.prefills[0]

    @property
    def decode(self) -> MockDecode:
        return self.cluster.decodes[0]

    def admit(self, sequence: SequenceSpec) -> AdmittedRequest:
        return self.dispatcher.admit(sequence, self.timings.timer())

    async def generate(self, sequence: SequenceSpec) -> list[TokenChunk]:
        """All chunks, in order; those of sessions come by calls where they can."""
        seen: list[TokenChunk] = []

        def take(chunk: TokenChunk) -> bool:
            seen.append(chunk)
            return True

        async for chunk in self.dispatcher.run(self.admit(sequence), take):
            seen.append(chunk)
        return seen

    async def state(self, sequence: SequenceSpec) -> RequestState:
        """Returns the stored state, once everything is written."""
        await self.writer.close()
        record = await self.store.get(sequence.id)
        assert record is not None
        return record.state


@asynccontextmanager
async def world(
    prefill: Sequence[Sequence[ScriptedAction]] = ((),),
    decode: Sequence[Sequence[ScriptedAction]] = ((),),
    limits: DispatchLimits = LIMITS,
    linked: bool = True,
    worker_limits: WorkerLimits = WORKER_LIMITS,
) -> AsyncIterator[World]:
    store = MemoryStore(StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
    cluster = MockCluster(
        store,
        [MockPrefill(f"prefill-{n}", script) for n, script in enumerate(prefill)],
        [MockDecode(f"decode-{n}", script) for n, script in enumerate(decode)],
        num_probe_bytes=4096 if linked else 0,
    )
    channels, timings = ChannelPool(), RecordedTimings()
    workers = WorkerSet(store, channels, WorkerFilter(MODEL), worker_limits)
    wire = GrpcWire()
    if uses_sessions:
        workers.worker_sessions = WorkerSessions(wire, "router-test", new_incarnation(), limits=LIMITS_OF_SESSIONS)
    aborts = Aborts(workers)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        stack.push_async_callback(cluster.stop)
        stack.push_async_callback(channels.close)
        stack.push_async_callback(wire.close)
        if workers.worker_sessions is not None:
            stack.push_async_callback(workers.worker_sessions.close)
        stack.push_async_callback(workers.close)
        stack.push_async_callback(aborts.close)
        writer = await stack.enter_async_context(StoreWriter(store))
        dispatcher = TokenDispatcher(workers, aborts, writer, RouterIdentity("router-test", MODEL), limits)
        await cluster.start()
        workers.start()
        async with asyncio.timeout(5):
            await workers.wait_for_change()
        yield World(dispatcher, workers, cluster, store, writer, timings)
        assert dispatcher.num_open == 0, "a admitted was never given back"
        async with asyncio.timeout(5):
            await dispatcher.wait_empty()


def sequence(
    name: str = "r",
    max_tokens: int = 5,
    deadline_s: float = 10.0,
    prompt: tuple[int, ...] = PROMPT,
    prompt_logprobs: int | None = None,
    affinity: str = "",
) -> SequenceSpec:
    sampling, stop = SamplingParams(seed=7), StopParams(max_tokens)
    return SequenceSpec(
        RequestId(name), prompt, sampling, stop, "", deadline_s, prompt_logprobs=prompt_logprobs, affinity=affinity
    )  # fmt: skip


def scores(chunks: Sequence[TokenChunk]) -> list[PromptScores | None]:
    """The scores in chunks; [None] without any."""
    return [chunk.prompt_scores for chunk in chunks if chunk.prompt_scores is not None] or [None]


def expected_scores(sequence: SequenceSpec) -> PromptScores | None:
    """The scores of the mock workers."""
    prompt, id = sequence.prompt_tokens, AttemptId(sequence.id, 1)
    k = sequence.prompt_logprobs
    return scores_of(EngineRequest(id, prompt, len(prompt), sequence.sampling, sequence.stop, prompt_logprobs=k))


def tokens(chunks: Sequence[TokenChunk]) -> list[tuple[int, int]]:
    return [(token.index, token.token) for chunk in chunks for token in chunk.tokens]


def scripted(num_tokens: int) -> list[tuple[int, int]]:
    return [(index, token_at(index)) for index in range(num_tokens)]


async def two_refreshes(w: World) -> None:
    """Waits for two reads of the registry: one may have started before the last announcement."""
    async with asyncio.timeout(5):
        await w.workers.wait_for_change()
        await w.workers.wait_for_change()


async def consume(chunks: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]
