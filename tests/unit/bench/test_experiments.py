"""The experiments run: their processes start, answer and end, and every arm does the work it is compared by."""

import asyncio
import time

import httpx2
import pytest

from baton.rpc.client import Channels
from baton.state import embedded
from bench import client_overhead, router_overhead, transfer
from bench.mock_cluster import Cluster, running_cluster
from bench.probes import PROBE_BYTES
from bench.rotations import Block
from services.cli.bench.client import BenchClient

WAIT_S = 30.0


def blocks(**values: tuple[float, ...]) -> list[Block]:
    return [Block(0, name.replace("_", " "), 1e9, 1e9, value) for name, value in values.items()]


def test_a_pool_is_pulled_whole():
    with transfer.running_pair("stream", 1024 * 1024, {}) as pool:
        began_s = time.perf_counter()
        [speed] = pool.pull()
        assert PROBE_BYTES / (time.perf_counter() - began_s) <= speed


def test_both_clients_read_every_event():
    async def read(url: str) -> None:
        async with BenchClient(url, api_key=None, timeout_s=WAIT_S, clock=time.perf_counter) as client:
            await client_overhead._ours(client)
        async with httpx2.AsyncClient(trust_env=False, timeout=WAIT_S) as plain:
            await client_overhead._plain(plain, url)

    with client_overhead.fixed_server() as url:
        asyncio.run(read(url))


@pytest.mark.integration
@pytest.mark.skipif(embedded.find_server() is None, reason="no redis-server")
def test_both_roads_to_the_mock_workers_bring_all_tokens():
    async def travel(cluster: Cluster) -> list[float]:
        channels = Channels()
        try:
            assert await router_overhead.DirectClient(cluster, channels).request(3) > 0.0
        finally:
            await channels.close()
        url = cluster.router_url
        async with BenchClient(url, api_key=None, timeout_s=WAIT_S, clock=time.perf_counter) as http:
            router = router_overhead.RouterClient(http)
            assert await router.request(router_overhead.LONG_TOKENS) > 0.0
            return await router_overhead._cpu_a_token(router, cluster.router_pid, 4)

    with running_cluster() as cluster:
        [cpu_s] = asyncio.run(travel(cluster))
    assert cpu_s > 0.0


def test_the_routers_share_is_the_difference_of_percentiles():
    found = router_overhead.findings_of(
        blocks(direct=(1e-3, 2e-3, 3e-3), direct_again=(1e-3, 2e-3, 3e-3), router=(3e-3,) * 3, router_cpu=(15e-6,))
    )
    assert [round(finding.over_all.median, 6) for finding in found] == [1000.0, 0.0, 20.0, 0.0, 15.0]


def test_a_transfers_speed_is_over_its_yardstick():
    found = transfer.findings_of(blocks(nixl=(0.9e9,), stream=(0.5e9,)))
    assert [finding.over_all.median for finding in found] == [0.9, 1.0, 0.9, 0.5, 1.0, 0.5]
