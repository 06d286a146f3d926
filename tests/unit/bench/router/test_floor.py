"""The floor router answers our client from mock workers with one write each, and figures come from the right arms."""

import asyncio
import time

import pytest
from redis import Redis

from baton.services.cli.bench.client.bench_client import BenchClient
from baton.services.cli.processes.local_redis import LocalRedis
from bench.harness.rotations import Block
from bench.router.floor.compare import findings_of
from bench.router.floor.least_router import RedisWriter, last_events, redis_command, running_floor, sse_chunk
from bench.router.mock_cluster import mock_workers
from bench.router.overhead import DEADLINE_S, RouterClient


async def answers(url: str, num_requests: int) -> None:
    http = BenchClient(url, api_key=None, timeout_s=DEADLINE_S, clock=time.perf_counter)
    async with http:
        router = RouterClient(http)
        for num_tokens in (2, 5):
            assert await router.request(num_tokens) > 0.0
        await router.burst(num_requests, 2, 4)


def test_the_floor_answers_with_all_tokens_and_one_write_a_request():
    with LocalRedis() as redis, mock_workers(redis.url, None), running_floor(redis.url) as (url, _):
        asyncio.run(answers(url, 8))
        with Redis.from_url(redis.url) as client:
            assert len(client.keys("floor:*")) == 2 + 8


def test_commands_and_chunks_have_their_lengths():
    assert redis_command(b"GET", b"key") == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"
    assert sse_chunk(b"x") == b"9\r\ndata: x\n\n\r\n"
    assert b'"completion_tokens":2' in last_events(64, 2)
    assert last_events(64, 2).endswith(b"0\r\n\r\n")


def test_errors_of_redis_are_counted():
    writer = RedisWriter()
    writer.data_received(b"$40\r\n" + b"a" * 40 + b"\r\n:1\r\n")
    assert writer.num_errors == 0
    writer.data_received(b"-NOSCRIPT No matching script\r\n-ERR wrong\r\n")
    assert writer.num_errors == 2


def test_figures_are_those_of_each_process():
    blocks = [
        Block(0, "direct", 1.0, 1.0, (0.001, 0.001)),
        Block(0, "router alone", 1.0, 1.0, (0.003, 0.003)),
        Block(0, "floor alone", 1.0, 1.0, (0.0015, 0.0015)),
        Block(0, "router at 8", 1.0, 1.0, (400.0, 0.002, 0.0005, 0.0012, 0.0003)),
        Block(0, "floor at 8", 1.0, 1.0, (900.0, 0.0005, 0.0005, 0.0008, 0.0002)),
    ]
    found = {each.name: each.overall.median for each in findings_of(blocks)}
    assert found["added p50, router"] == pytest.approx(2000.0)
    assert found["added p50, floor"] == pytest.approx(500.0)
    assert found["CPU a request at 8, router, floor"] == pytest.approx(500.0)
    assert found["CPU a request at 8, workers, router"] == pytest.approx(1200.0)
    assert found["CPU a request at 8: router / floor"] == pytest.approx(4.0)
    assert found["requests/s at 8 that all CPU time allows on two cores, router"] == pytest.approx(500.0)
    assert found["requests/s at 8 that a core for the router allows, floor"] == pytest.approx(2000.0)
