"""A router without workers that were killed, or stopped and continued: real processes and Redis.

A killed worker is detected within one second, a hung one within five.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from baton.domain.worker import WorkerRole
from baton.rpc.channel_pool import ChannelPool
from baton.services.router.dispatch.aborts import Aborts
from baton.services.router.dispatch.dispatcher import RouterIdentity, TokenDispatcher
from baton.services.router.dispatch.placement.query import PlacementQuery
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter
from baton.services.router.dispatch.workers import WorkerLimits, WorkerSet
from baton.services.router.generation import TokenChunk
from baton.store.connect import connect
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.request_trace import Stage
from tests.mock_worker_process import BUSY_S, OPTIONS, MockWorkerProcess, mock_worker_process
from tests.mock_workers import MODEL, Phase
from tests.redis_server import running_redis
from tests.service.dispatch.dispatch_world import LIMITS, RecordedTimings, consume, scripted, sequence, tokens

pytestmark = pytest.mark.timeout(120)

START_S = 60.0
HANG_NOTICED_S = 5.0
KILL_NOTICED_S = 1.0
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
QUERY = PlacementQuery(num_tokens=10, max_tokens=20, keys={})


@dataclass(slots=True)
class Router:
    """A dispatcher in this process. Workers run in processes of their own and are found through Redis."""

    dispatcher: TokenDispatcher
    workers: WorkerSet
    timings: RecordedTimings
    redis_url: str
    processes: ExitStack

    async def start_peer(self, role: WorkerRole) -> None:
        """Starts the first worker and waits for its announcement."""
        self.processes.enter_context(mock_worker_process(role, "peer", self.redis_url))
        await self.until(lambda: len(self.workers.records) == 1, START_S)

    async def start(self, role: WorkerRole, id: str, hold: Phase | None = None) -> MockWorkerProcess:
        """Starts another worker and waits until it is used."""
        process = self.processes.enter_context(mock_worker_process(role, id, self.redis_url, hold))
        await self.until(lambda: self.uses(id), START_S)
        return process

    async def until(self, condition: Callable[[], bool], within_s: float) -> None:
        """Checks the condition after every change of the workers."""
        async with asyncio.timeout(within_s):
            while not condition():
                await self.workers.wait_for_change()

    def uses(self, id: str) -> bool:
        """True when requests are placed on the worker (equal ones take turns)."""
        pairs = [pair for _ in range(2) if (pair := self.workers.choose(QUERY)) is not None]
        return any(id in (pair.prefill.id, pair.decode.id) for pair in pairs)

    def run(self, name: str) -> asyncio.Task[list[TokenChunk]]:
        """Starts a request with a long deadline."""
        admitted = self.dispatcher.admit(sequence(name, deadline_s=60.0), self.timings.timer())
        return asyncio.create_task(consume(self.dispatcher.run(admitted)))


@asynccontextmanager
async def router(worker_ttl_s: float = OPTIONS.worker_ttl_s) -> AsyncIterator[Router]:
    with running_redis() as redis, ExitStack() as processes:
        async with AsyncExitStack() as stack:
            store, channels, timings = await connect(redis.url, OPTIONS), ChannelPool(), RecordedTimings()
            workers = WorkerSet(
                store,
                channels,
                WorkerFilter(MODEL),
                WorkerLimits(worker_ttl_s, OPTIONS.heartbeat_s, max_step_age_s=30.0),
            )
            aborts = Aborts(workers)
            for close in (store.close, channels.close, workers.close, aborts.close):
                stack.push_async_callback(close)
            writer = await stack.enter_async_context(StoreWriter(store))
            dispatcher = TokenDispatcher(workers, aborts, writer, RouterIdentity("router-test", MODEL), LIMITS)
            workers.start()
            yield Router(dispatcher, workers, timings, redis.url, processes)


@pytest.mark.parametrize("role", WorkerRole)
async def test_a_lost_worker_is_detected_in_time(role):
    """A stopped worker loses its request to another one. Continued, it serves again when the other is killed."""
    hold, reached = (Phase.SEAL, Stage.DISPATCH.value) if role is PREFILL else (Phase.DECODE, "import")
    async with router() as r:
        await r.start_peer(DECODE if role is PREFILL else PREFILL)
        victim = await r.start(role, "victim", hold)
        run = r.run("first")
        await r.until(lambda: r.timings.entries.count(reached) == 1, 10.0)
        other = await r.start(role, "other", hold)
        victim.signal(signal.SIGSTOP)
        async with asyncio.timeout(HANG_NOTICED_S):
            await r.timings.retried.wait()
        await r.until(lambda: r.timings.entries.count(reached) == 2, 10.0)
        victim.signal(signal.SIGCONT)
        await r.until(lambda: r.uses("victim"), 20.0)
        r.timings.retried.clear()
        other.signal(signal.SIGKILL)
        async with asyncio.timeout(KILL_NOTICED_S):
            await r.timings.retried.wait()
        assert tokens(await run) == scripted(5)
        assert r.timings.entries.count("retry") == 2


async def test_a_worker_with_a_busy_interpreter_is_not_lost():
    """gRPC answers pings from its own threads. Heartbeats need the interpreter; here the TTL is long."""
    async with router(worker_ttl_s=60.0) as r:
        await r.start_peer(PREFILL)
        busy = await r.start(DECODE, "busy", Phase.DECODE)
        run = r.run("first")
        await r.until(lambda: "import" in r.timings.entries, 10.0)
        busy.signal(signal.SIGUSR1)
        done, _ = await asyncio.wait([run], timeout=BUSY_S)
        assert not done
        assert tokens(await run) == scripted(5)
        assert "retry" not in r.timings.entries
