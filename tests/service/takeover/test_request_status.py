"""`GET /v1/requests/{id}`: the trace of a running request, of an ended one, and from another router."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

from baton.store.store import CallStatus
from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.service.takeover.router_cluster import CHAT, PROMPTS, opened, router_cluster

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def status_at(http: httpx2.AsyncClient, id: str) -> dict[str, Any]:
    return (await http.get(f"/v1/requests/{id}")).json()


async def test_a_running_request_shows_its_stages_so_far(tmp_path):
    decode = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
    async with router_cluster(tmp_path, num_routers=1, decode=decode) as w:
        async with opened(w.routers[0], max_tokens=4) as stream:
            await stream.take(2)
            await w.until_known(stream.call_id)
            running = await status_at(w.routers[0].http, stream.call_id)
            assert (running["complete"], running["trace"]["outcome"]) == (False, "running")
            assert running["trace"]["sequences"][0]["attempts"][0]["decode"] == "decode-0"
            w.decode.release()
            await stream.rest()
        record = await w.until(stream.call_id, CallStatus.ENDED)
        assert record.trace
        ended = await status_at(w.routers[0].http, stream.call_id)
        assert (ended["complete"], ended["trace"]["outcome"], ended["trace"]["output_tokens"]) == (True, "finished", 4)
        assert sum(stage["duration_us"] for stage in ended["trace"]["stages"]) == ended["trace"]["e2e_us"]


async def test_another_router_shows_the_stored_trace_and_its_ids(tmp_path):
    async with router_cluster(tmp_path) as w:
        here, there = w.routers
        headers = {"x-request-id": "client-7", "traceparent": TRACEPARENT}
        body = {"model": "mock", **PROMPTS[CHAT], "max_tokens": 3}
        id = (await here.http.post(CHAT, json=body, headers=headers)).json()["id"]
        await w.until(id, CallStatus.ENDED)
        trace = (await status_at(there.http, id))["trace"]
        assert trace == (await status_at(here.http, id))["trace"]
        ids = (trace["router"], trace["http_request_id"], trace["trace_id"])
        assert ids == ("router-0", "client-7", TRACEPARENT[3:35])
        assert (trace["endpoint"], trace["status"], trace["sequences"][0]["finish_reason"]) == (CHAT, 200, "length")


async def test_the_trace_shows_a_disconnected_client(tmp_path):
    decode = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
    async with router_cluster(tmp_path, num_routers=1, decode=decode) as w:
        async with opened(w.routers[0], max_tokens=4) as stream:
            await stream.take(1)
        await w.until(stream.call_id, CallStatus.ABANDONED)
        async with asyncio.timeout(5.0):
            while (found := await status_at(w.routers[0].http, stream.call_id))["trace"]["outcome"] == "running":
                pass
        assert (found["trace"]["outcome"], found["trace"]["client_gone"]) == ("cancelled", True)
