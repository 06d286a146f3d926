"""Two routers on one Redis: each shows the requests of both, and names a router that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.mock_workers import Fail, Hold, Phase, ScriptedAction
from tests.redis_server import running_redis
from tests.service.cluster.live_router import BLUE, OPERATOR, RED, TIMEOUT_S, bearer, live_router

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_redis() as server:
        yield server.url


async def test_a_viewer_of_one_router_sees_the_requests_of_both(redis_url: str):
    async with (
        live_router(router_id="a", redis_url=redis_url) as a,
        live_router(router_id="b", redis_url=redis_url, num_decode=1, max_attempts=1) as b,
        a.watch() as view,
    ):
        decode = b.mock.decodes[0]
        decode.script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(b.complete())
            rows = await view.until(lambda v: [row for row in v.state["requests"] if row[1] == "b"])
            assert [row["id"] for row in view.state["routers"]] == ["a", "b"]
            assert [row[0] for row in (await b.snapshot())["requests"]] == [rows[0][0]]
            decode.release()
        ended = await view.until(lambda v: [row for row in v.ended() if row["router"] == "b"])
        assert (ended[0]["id"], ended[0]["outcome"]) == (answer.result().headers["x-baton-request-id"], "finished")
        decode.script = [ScriptedAction(Phase.DECODE, Fail("engine_failed"))]
        assert (await b.complete()).status_code >= 500
        event = (await view.until(lambda v: v.events("failed")))[0]
        assert (event["router"], view.events("joined")) == ("b", []), "each router tells of workers itself"
        await view.until(lambda v: v.state["window"]["failed"] == 1)
        listed = (await a.client.get("/v1/cluster/requests")).json()["data"]
        assert [(row["id"], row["router"]) for row in listed] == [(event["request"], "b"), (ended[0]["id"], "b")]


async def test_the_trace_of_another_routers_request_is_in_the_store(redis_url: str, keys_file: Path):
    """Open, it is known to run elsewhere; ended, its stages are told; both to nobody but its tenant and operators."""
    async with (
        live_router(router_id="a", redis_url=redis_url, keys_file=keys_file, num_decode=1) as a,
        live_router(router_id="b", redis_url=redis_url, keys_file=keys_file, beside=a) as b,
        a.watch(OPERATOR) as view,
    ):
        decode = a.mock.decodes[0]
        decode.script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(b.complete(RED))
            rows = await view.until(lambda v: [row for row in v.state["requests"] if row[1] == "b"])
            path = f"/v1/cluster/requests/{rows[0][0]}"
            for key, status in ((RED, 202), (OPERATOR, 202), (BLUE, 404)):
                assert (await a.client.get(path, headers=bearer(key))).status_code == status
            pending = (await a.client.get(path, headers=bearer(RED))).json()
            assert pending == {"id": path.rpartition("/")[2], "router": "b", "trace": None}
            decode.release()
        assert answer.result().status_code == 200
        async with asyncio.timeout(TIMEOUT_S):
            while (reply := await a.client.get(path, headers=bearer(RED))).status_code == 202:
                await view.next()  # the store is written behind
        own = (await b.client.get(path, headers=bearer(RED))).json()
        assert (reply.json(), own["router"], own["outcome"]) == (own, "b", "finished")
        assert (await a.client.get(path, headers=bearer(OPERATOR))).json() == own
        assert (await a.client.get(path, headers=bearer(BLUE))).status_code == 404


async def test_a_router_that_leaves_disappears_and_one_that_hangs_is_named(redis_url: str):
    async with live_router(router_id="a", redis_url=redis_url) as a, a.watch() as view:
        async with live_router(router_id="b", redis_url=redis_url):
            await view.until(lambda v: [row["status"] for row in v.state["routers"]] == ["ready", "ready"])
        await view.until(lambda v: len(v.state["routers"]) == 1)
        outside = Redis.from_url(redis_url)
        [listed] = [key async for key in outside.scan_iter("*routers:*")]
        seconds, _ = await outside.time()
        await outside.hset(listed, "hung/1", f"{1000 * seconds - 9000} 0")
        await outside.aclose()
        silent = await view.until(lambda v: v.state["routers"][1:])
        assert (silent[0]["id"], silent[0]["status"], silent[0]["open"]) == ("hung", "silent", None)
        assert (await a.complete()).status_code == 200, "no request waits for another router"
