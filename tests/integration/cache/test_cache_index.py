"""An index of real workers, read as a router reads it: equal to their caches after evictions and a restart."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.domain.ids import Incarnation, PageKey
from baton.kv.keys import page_keys
from baton.rpc.channel_pool import ChannelPool
from baton.services.router.dispatch.cache_index.reader import CacheEventReaders
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter
from baton.services.router.dispatch.workers import WorkerLimits, WorkerSet
from baton.store.connect import connect
from tests.cluster import Cluster, eventually

pytestmark = pytest.mark.integration

PAGE_SIZE, NUM_PAGES, WAIT_S = 16, 24, 60.0


def prompt_of(number: int) -> list[int]:
    return [5 + (7 * i + 31 * number) % 400 for i in range(6 * PAGE_SIZE)]


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(eventually, condition, WAIT_S, what)


async def test_the_index_follows_real_workers_through_a_restart(tmp_path: Path):
    flags = {"num-pages": NUM_PAGES, "page-size": PAGE_SIZE}
    with Cluster(tmp_path, transport="stream", flags=flags) as cluster:
        store, channels = await connect(cluster.redis.url), ChannelPool()
        workers = WorkerSet(store, channels, WorkerFilter(cluster.model_name), WorkerLimits(2.0, 0.5, 30.0))
        index = workers.cache_index
        readers = CacheEventReaders(workers.served, channels, index)
        workers.add_listener(readers.refresh)
        workers.start()

        def incarnation(name: str) -> Incarnation | None:
            return next((one.incarnation for one in workers.records if one.id == name), None)

        async def equals(name: str) -> None:
            def agree() -> bool:
                found = incarnation(name)
                return found is not None and num_confirmed(found) == cluster.pages(name)["cached"] > 0

            await until(agree, f"the index has what {name} has")

        loop = asyncio.get_running_loop()

        def confirmed(worker: Incarnation) -> frozenset[PageKey]:
            async def ask() -> frozenset[PageKey]:
                return index.confirmed(worker)

            return asyncio.run_coroutine_threadsafe(ask(), loop).result(WAIT_S)

        def num_confirmed(worker: Incarnation) -> int:
            return len(confirmed(worker))

        try:
            for number in range(8):  # 8 prompts of 6 pages: most are evicted again
                await asyncio.to_thread(cluster.complete, prompt_of(number), max_tokens=2)
            for name in ("prefill-0", "decode-0"):
                await equals(name)
            prefill = incarnation("prefill-0")
            assert prefill is not None
            newest, oldest = ({*page_keys(prompt_of(number), PAGE_SIZE, "")} for number in (7, 0))
            await until(lambda: newest <= confirmed(prefill), "the newest pages are confirmed")
            await until(lambda: not oldest & confirmed(prefill), "evicted pages are not")
            await equals("prefill-0")

            killed = cluster.processes["prefill-0"]
            killed.signal(signal.SIGKILL)
            killed.popen.wait(WAIT_S)
            cluster.start("prefill", "prefill-0")
            await until(lambda: incarnation("prefill-0") not in (None, prefill), "a new process is announced")
            await until(lambda: num_confirmed(prefill) == 0, "the killed process is forgotten")
            await asyncio.to_thread(cluster.wait_answer, prompt_of(1), max_tokens=2)
            await equals("prefill-0")
            assert cluster.metric("router-0", "baton_index_error_count") >= 9, "each seal measures the router's index"
            assert cluster.metric("router-0", "baton_index_gap_total") == 0
        finally:
            await readers.close()
            await workers.close()
            await channels.close()
            await store.close()
