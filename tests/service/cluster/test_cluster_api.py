"""`/v1/cluster`: taken from workers and requests themselves, live, bounded, and closed to other tenants."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from baton.domain.worker import Activity, MediaCounts, PageCounts, WorkerLoad
from baton.services.router.cluster.feed import MAX_VIEWERS
from baton.services.router.cluster.snapshot import ClusterSnapshot
from baton.telemetry.request_trace import RequestTrace, Stage
from tests.mock_workers import Fail, Hold, Phase, ScriptedAction
from tests.service.cluster.live_router import BLUE, OPERATOR, RED, TIMEOUT_S, LiveRouter, bearer, live_router

pytestmark = pytest.mark.timeout(60)


async def test_the_snapshot_shows_what_workers_announce():
    async with live_router() as router:
        decode = router.mock.decodes[0]
        pages = PageCounts(free=10, cached=4, pinned=0, live=40, reserved=8, draining=1, retired=1)
        await router.mock.change_load(
            decode, running_rows=3, waiting_requests=2, pages=pages, activity=Activity(50, 100, 25)
        )
        async with router.watch() as view:
            await view.until(lambda v: v.worker("decode-0").get("rows") == 3)
        row = view.worker("decode-0")
        assert row["pages"] == {name: getattr(pages, name) for name in PageCounts.__slots__}
        assert sum(row["pages"].values()) == row["total_pages"] == 64
        assert (row["status"], row["queue"], row["max_rows"], row["hit_ratio"]) == ("ready", 2, 8, 0.25)
        assert {(each["from"], each["to"], each["state"]) for each in view.state["links"]} == {
            ("prefill-0", "decode-0", "up"),
            ("prefill-0", "decode-1", "up"),
        }
        assert row["prefill_tokens"] == 0
        assert view.worker("prefill-0")["prefill_tokens"] > 0
        msgspec.convert(await router.snapshot(), ClusterSnapshot)


async def test_an_encode_worker_shows_what_it_holds_and_others_do_not():
    async with live_router() as router:
        media = MediaCounts(num_held=9, num_encoded=7, num_bytes=3_200_000, max_bytes=256 << 20)
        load = WorkerLoad(waiting_requests=2, waiting_tokens=512, media=media)
        async with router.encode_worker(load), router.watch() as view:
            row = await view.until(lambda v: v.worker("encode-0"))
            assert (row["role"], row["status"], row["queue"], row["queue_tokens"]) == ("encode", "ready", 2, 512)
            assert row["media"] == {name: getattr(media, name) for name in MediaCounts.__slots__}
            assert view.worker("decode-0")["media"] is None
            msgspec.convert(await router.snapshot(), ClusterSnapshot)


async def test_a_request_is_seen_in_each_state_and_its_stages_add_up():
    async with live_router(num_decode=1) as router:
        decode = router.mock.decodes[0]
        decode.script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
        async with router.watch() as view, asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(router.complete())
            row = await view.until(lambda v: [r for r in v.state["requests"] if r[2] == "decoding" and r[7] == 2])
            assert (row[0][3], row[0][4], row[0][5], row[0][9]) == ("prefill-0", "decode-0", 17, 1)
            assert view.state["counts"]["decoding"] == 1
            running = (await router.client.get(f"/v1/cluster/requests/{row[0][0]}")).json()
            assert running["outcome"] == "running"
            decode.release()
            await view.until(lambda v: not v.state["requests"])
            ended = await view.until(lambda v: v.ended())
        assert answer.result().status_code == 200
        assert (ended[0]["outcome"], ended[0]["output_tokens"]) == ("finished", 4)
        reply = await router.client.get(f"/v1/cluster/requests/{ended[0]['id']}")
        trace = msgspec.json.decode(reply.content, type=RequestTrace)
        assert sum(stage.duration_us for stage in trace.stages) == trace.e2e_us
        before_token = list(Stage)[: list(Stage).index(Stage.EMIT) + 1]
        assert sum(each.duration_us for each in trace.stages if each.stage in before_token) == trace.ttft_us
        listed = (await router.client.get("/v1/cluster/requests?limit=5&outcome=finished")).json()["data"]
        assert [each["id"] for each in listed] == [trace.id]


async def test_the_slowest_requests_are_listed_first():
    async with live_router(num_decode=1) as router:
        decode = router.mock.decodes[0]
        decode.script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
        async with router.watch() as view, asyncio.TaskGroup() as tasks:
            held = tasks.create_task(router.complete())
            await view.until(lambda v: [r for r in v.state["requests"] if r[2] == "decoding" and r[7] == 2])
            quick = await router.complete()
            decode.release()
            await router.complete()
            await view.until(lambda v: len(v.ended()) == 3)
        ids = [each.json()["id"] for each in (held.result(), quick)]

        async def listed(query: str) -> list[str]:
            rows = (await router.client.get(f"/v1/cluster/requests?{query}")).json()["data"]
            assert len({row["id"] for row in rows}) == len(rows)
            if "slowest" in query:
                assert [row["e2e_ms"] for row in rows] == sorted((row["e2e_ms"] for row in rows), reverse=True)
            return [row["id"] for row in rows]

        slowest = await listed("order=slowest")
        assert len(slowest) == 3
        assert slowest.index(ids[0]) < slowest.index(ids[1]), "the held one began before and ended after"
        assert (await listed("order=slowest&limit=1")) == slowest[:1]
        assert (await listed("order=newest&limit=1")) not in ([ids[0]], [ids[1]])


async def test_a_killed_worker_is_shown_with_the_replay_of_its_requests():
    async with live_router() as router:
        for decode in router.mock.decodes:
            decode.script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
        async with router.watch() as view, asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(router.complete(max_tokens=6))
            row = (await view.until(lambda v: [r for r in v.state["requests"] if r[7] == 2]))[0]
            victim = next(worker for worker in router.mock.decodes if worker.id == row[4])
            other = next(worker for worker in router.mock.decodes if worker is not victim)
            other.release()
            await router.kill(victim)
            await view.until(lambda v: v.worker(victim.id).get("status") == "lost")
            await view.until(lambda v: v.events("replayed") and v.events("lost"))
        assert answer.result().status_code == 200, "no client sees it"
        assert len(view.events("lost")) == 1
        assert victim.id in view.events("attempt_failed")[0]["text"]
        assert f"> {other.id}" in view.events("replayed")[0]["text"]
        assert view.events("replayed")[0]["request"] == row[0]
        listed = (await router.client.get("/v1/cluster/requests?notable=1")).json()["data"]
        assert [(each["attempts"], each["decode"]) for each in listed] == [(2, other.id)]


async def test_a_failure_and_a_refusal_are_told():
    async with live_router(num_decode=1, max_attempts=1) as router:
        router.mock.decodes[0].script = [ScriptedAction(Phase.DECODE, Fail("engine_failed"))]
        async with router.watch() as view:
            assert (await router.complete()).status_code >= 500
            assert (await router.complete(max_tokens=0)).status_code == 400
            assert (await view.until(lambda v: v.events("failed")))[0]["level"] == "bad"
            assert "1 request refused" in (await view.until(lambda v: v.events("refused")))[0]["text"]
            assert view.state["window"]["failed"] == 1


async def test_a_tenant_sees_its_own_requests_and_an_operator_all(keys_file: Path):
    async with live_router(keys_file=keys_file, num_decode=1) as router:
        assert (await router.client.get("/v1/cluster")).status_code == 401
        assert (await router.client.get("/v1/cluster/events")).status_code == 401
        for key in (RED, BLUE):
            assert (await router.complete(key)).status_code == 200
        own, all_ = await router.snapshot(RED), await router.snapshot(OPERATOR)
        assert (own["scope"], own["workers"], own["links"], len(own["recent"])) == ("own", [], [], 1)
        assert (all_["scope"], len(all_["workers"]), len(all_["recent"])) == ("all", 2, 2)
        foreign = next(each["id"] for each in all_["recent"] if each["id"] != own["recent"][0]["id"])
        path = f"/v1/cluster/requests/{foreign}"
        assert (await router.client.get(path, headers=bearer(RED))).status_code == 404
        assert (await router.client.get(path, headers=bearer(BLUE))).status_code == 200
        assert (await router.client.get(path, headers=bearer(OPERATOR))).status_code == 200
        listed = await router.client.get("/v1/cluster/requests", headers=bearer(RED))
        assert [each["id"] for each in listed.json()["data"]] == [own["recent"][0]["id"]]


async def test_no_text_of_a_request_is_shown():
    async with live_router(num_decode=1) as router:
        secret = "tulips under the kitchen table"
        async with router.watch() as view:
            assert (await router.complete(prompt=secret, max_tokens=2)).status_code == 200
            await view.until(lambda v: v.ended())
        assert "tulips" not in str(view.messages)
        assert "tulips" not in (await router.client.get("/v1/cluster")).text


async def test_viewers_are_bounded_and_leave_their_places():
    async with live_router(num_decode=1) as router:
        async with AsyncExitStack() as stack:
            for _ in range(MAX_VIEWERS):
                await stack.enter_async_context(router.watch())
            refused = await router.client.get("/v1/cluster/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_viewers")
        async with asyncio.timeout(TIMEOUT_S):
            while not await may_watch(router):  # the server notices a viewer that left a moment later
                pass


async def may_watch(router: LiveRouter) -> bool:
    async with router.client.stream("GET", "/v1/cluster/events") as response:
        return response.status_code == 200


@pytest.mark.parametrize(
    "query", ["limit=-1", "limit=201", "limit=x", "slower_than_ms=1e3", "outcome=lost", "order=oldest"]
)
async def test_a_bad_query_names_the_parameter(query: str):
    async with live_router(num_decode=1) as router:
        reply = await router.client.get(f"/v1/cluster/requests?{query}")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == query.partition("=")[0]
