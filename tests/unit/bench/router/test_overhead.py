"""Router overhead: direct and routed requests return all tokens, and findings subtract the direct latency."""

import asyncio
import time

import pytest

from baton.rpc.channel_pool import ChannelPool
from baton.services.cli.bench.client.bench_client import BenchClient
from bench.harness.rotations import Block
from bench.router import overhead
from bench.router.mock_cluster import MockCluster, running_cluster
from tests.redis_server import require_redis

WAIT_S = 30.0


def blocks(**values: tuple[float, ...]) -> list[Block]:
    return [Block(0, name.replace("_", " "), 1e9, 1e9, value) for name, value in values.items()]


@pytest.mark.integration
def test_direct_and_routed_requests_return_all_tokens():
    require_redis()

    async def measure(cluster: MockCluster) -> list[float]:
        channels = ChannelPool()
        try:
            assert await overhead.DirectClient(cluster, channels).request(3) > 0.0
        finally:
            await channels.close()
        url = cluster.router_url
        async with BenchClient(url, api_key=None, timeout_s=WAIT_S, clock=time.perf_counter) as http:
            router = overhead.RouterClient(http)
            assert await router.request(overhead.LONG_TOKENS) > 0.0
            return await overhead._cpu_a_token(router, cluster.router_pid, 4)

    with running_cluster() as cluster:
        [cpu_s] = asyncio.run(measure(cluster))
    assert cpu_s > 0.0


def test_added_latency_is_the_difference_of_percentiles():
    found = overhead.findings_of(
        blocks(direct=(1e-3, 2e-3, 3e-3), direct_again=(1e-3, 2e-3, 3e-3), router=(3e-3,) * 3, router_cpu=(15e-6,))
    )
    assert [round(finding.overall.median, 6) for finding in found] == [1000.0, 0.0, 20.0, 0.0, 15.0]
