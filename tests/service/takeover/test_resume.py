"""Resuming a stream: wherever it was dropped, and on any router, the client ends up with the events of an undisturbed
call.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton.domain.ids import AttemptId, RequestId, first_attempt
from baton.services.router.edge.api_keys import make_entry, new_key
from baton.services.router.streaming.cursor import Cursor
from baton.store.store import CallStatus
from baton.telemetry.metrics import REGISTRY
from tests.mock_workers import Fail, Hold, Phase, ScriptedAction, token_at
from tests.service.takeover.router_cluster import (
    CHAT,
    COMPLETIONS,
    TIMEOUT_S,
    Event,
    Router,
    RouterCluster,
    by_choice,
    contents,
    opened,
    resumed,
    router_cluster,
    same,
    undisturbed,
)

pytestmark = pytest.mark.timeout(60)

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def cursors(events: list[Event]) -> list[Cursor]:
    return [Cursor.parse(event.id) for event in events]


async def dropped_and_resumed(
    w: RouterCluster, where: int, num_seen: int, endpoint: str = COMPLETIONS, *, abandoned: bool = False, **body: Any
) -> list[Event]:
    """All events of a client that disconnects from router 0 after `num_seen` events and resumes at `where`.

    Releases the script of the decode worker after the disconnect. `abandoned`: only once its router has noticed it.
    """
    async with opened(w.routers[0], endpoint, **body) as stream:
        seen = await stream.take(num_seen)
        id = stream.call_id
    if abandoned:
        await w.until(id, CallStatus.ABANDONED)
    w.decode.release()
    async with resumed(w.routers[where], id, seen[-1].id) as stream:
        return seen + await stream.rest()


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("num_seen", [1, 4, 8, 9])
async def test_a_dropped_stream_continues_on_any_router(tmp_path, endpoint, num_seen):
    body: dict[str, Any] = {"max_tokens": 8, **USAGE}
    async with router_cluster(tmp_path) as w:
        expected = await undisturbed(w.routers[0], endpoint, **body)
        assert len(expected) == 10
        assert [(id.counts, id.num_tail) for id in cursors(expected[-3:])] == [((8,), 0), ((8,), 1), ((8,), 2)]
        for where in (0, 1):
            got = await dropped_and_resumed(w, where, num_seen, endpoint, **body)
            assert same(got, expected)
            assert len({event.id.partition(":")[0] for event in got}) == 1


@pytest.mark.parametrize("by_post", [False, True])
@pytest.mark.parametrize("where", [0, 1])
async def test_the_call_of_a_returning_client_is_taken_over(tmp_path, store, where, by_post):
    async with router_cluster(tmp_path, store=store, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)]) as w:
        async with opened(w.routers[0], max_tokens=8, **USAGE) as stream:
            seen = await stream.take(4)
            id = stream.call_id
            assert stream.response.headers["x-baton-durable"] == "true"
            await w.decode.reached(Phase.DECODE, times=4)
        assert await w.decode.aborted(AttemptId(RequestId(id), 1), within_s=10.0) == "cancelled"
        abandoned = await w.until(id, CallStatus.ABANDONED)
        assert abandoned.epoch == 1
        endpoint = COMPLETIONS if by_post else ""
        async with resumed(w.routers[where], id, seen[-1].id, endpoint=endpoint) as stream:
            rest = await stream.rest()
        first, second = w.decode.requests
        assert (second.id.attempt, second.num_emitted) == (first_attempt(2), 4)
        assert second.tokens == (*first.tokens, *(token_at(index) for index in range(4)))
        assert same(seen + rest, await undisturbed(w.routers[0], max_tokens=8, **USAGE))
        assert (await w.until(id, CallStatus.ENDED)).owner.startswith(f"router-{where}/")


async def test_a_stream_resumed_at_once_does_not_wait_for_the_store(tmp_path):
    """The disconnect may not be stored yet when the client returns."""
    async with router_cluster(tmp_path, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)]) as w:
        expected = [f"w{1000 + n}" for n in range(8)]
        got = await dropped_and_resumed(w, 0, 4, max_tokens=8)
        assert "".join(json.loads(event.data)["choices"][0]["text"] for event in got[:-1]).split() == expected


@pytest.mark.parametrize("num_seen", [1, 5, 11])
async def test_each_of_three_choices_continues_where_it_was(tmp_path, num_seen):
    body: dict[str, Any] = {"max_tokens": 6, "n": 3, "seed": 5, **USAGE}
    async with router_cluster(tmp_path, decode=[ScriptedAction(Phase.DECODE, Hold(), index=5, times=3)]) as w:
        got = await dropped_and_resumed(w, 1, num_seen, **body)
        expected = await undisturbed(w.routers[0], **body)
        for choice in range(3):
            assert contents(by_choice(got, choice)) == contents(by_choice(expected, choice))
        assert contents(got[-2:]) == contents(expected[-2:])
        assert [(id.counts, id.num_tail) for id in cursors(got[-3:])] == [((6, 6, 6), tail) for tail in range(3)]
        assert len({event.id for event in got}) == len(got)


@pytest.mark.parametrize("num_seen", [1, 3])
async def test_a_stop_string_ends_a_taken_over_call_at_the_same_token(tmp_path, num_seen):
    body: dict[str, Any] = {"max_tokens": 9, "stop": ["w1005"], **USAGE}
    async with router_cluster(tmp_path, decode=[ScriptedAction(Phase.DECODE, Hold(), index=3)]) as w:
        got = await dropped_and_resumed(w, 1, num_seen, abandoned=True, **body)
        expected = await undisturbed(w.routers[0], **body)
        assert same(got, expected)
        assert "w1004" in expected[-4].data
        id = RequestId(got[0].id.partition(":")[0])
        await w.until(id, CallStatus.ENDED)
        async with resumed(w.routers[0], id) as stream:
            assert same(await stream.rest(), expected)
        status = (await w.routers[0].http.get(f"/v1/requests/{id}")).json()
        assert status["choices"] == [
            {
                **{"index": 0, "attempt": first_attempt(2), "state": "finished"},
                **{"num_tokens": 6, "finish_reason": "stop", "error": None},
            }
        ]


async def test_an_end_by_a_stop_string_is_no_abort(tmp_path):
    async with router_cluster(tmp_path, num_routers=1) as w:
        before = [REGISTRY.get_sample_value("baton_aborts_total", {"phase": phase}) for phase in ("sealed", "decoding")]
        events = await undisturbed(w.routers[0], max_tokens=100, stop=["w1003"])
        id = RequestId(events[0].id.partition(":")[0])
        await w.until(id, CallStatus.ENDED)
        record = await w.store.get(id)
        assert record is not None
        assert (record.state.value, record.failure_code) == ("finished", "")
        after = [REGISTRY.get_sample_value("baton_aborts_total", {"phase": phase}) for phase in ("sealed", "decoding")]
        assert after == before
        await w.decode.aborted(AttemptId(id, 1))  # but the router aborts at once


async def test_two_resumed_clients_share_one_takeover(tmp_path, store):
    async with router_cluster(tmp_path, store=store, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)]) as w:
        async with opened(w.routers[0], max_tokens=8) as stream:
            seen = await stream.take(4)
            id = stream.call_id

        async def resume(router: Router) -> list[Event]:
            async with resumed(router, id, seen[-1].id) as stream:
                return await stream.rest()

        both = await asyncio.gather(*(resume(router) for router in w.routers))
        assert both[0] == both[1]
        assert same(seen + both[0], await undisturbed(w.routers[0], max_tokens=8))
        assert sorted(request.id.attempt for request in w.decode.requests if request.id.request_id == id) == [
            1,
            first_attempt(2),
        ]


async def test_a_resumed_client_may_hang_up_and_resume_again(tmp_path):
    holds = [ScriptedAction(Phase.DECODE, Hold(), index=3), ScriptedAction(Phase.DECODE, Hold(), index=5)]
    async with router_cluster(tmp_path, decode=holds) as w:
        async with opened(w.routers[0], max_tokens=8) as stream:
            seen = await stream.take(3)
            id = stream.call_id
        async with resumed(w.routers[1], id, seen[-1].id) as stream:
            seen += await stream.take(2)
        abandoned = await w.until(id, CallStatus.ABANDONED)
        assert abandoned.epoch == 2
        second = AttemptId(RequestId(id), first_attempt(2), abandoned.owner_tag)
        assert await w.decode.aborted(second, within_s=10.0) == "cancelled"
        async with resumed(w.routers[0], id, seen[-1].id) as stream:
            seen += await stream.rest()
        assert same(seen, await undisturbed(w.routers[0], max_tokens=8))
        assert [r.id.attempt for r in w.decode.requests if r.id.request_id == id] == [
            first_attempt(epoch) for epoch in (1, 2, 3)
        ]


async def test_a_second_client_may_read_a_running_call(tmp_path):
    """The first client is still connected: the second one reads the journal, and the owner keeps the call."""
    async with router_cluster(tmp_path, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)]) as w:
        async with opened(w.routers[0], max_tokens=8) as owner:
            seen = await owner.take(4)
            async with resumed(w.routers[1], owner.call_id) as guest:
                assert await guest.take(4) == seen
                w.decode.release()
                assert await guest.rest() == await owner.rest()
        assert (await w.call(owner.call_id)).epoch == 1


async def test_a_store_outage_only_delays_a_journal_reader(tmp_path):
    held = [ScriptedAction(Phase.DECODE, Hold(), index=4)]
    async with router_cluster(tmp_path, decode=held) as w, opened(w.routers[0], max_tokens=8) as owner:
        seen = await owner.take(4)
        async with resumed(w.routers[1], owner.call_id) as guest:
            assert await guest.take(4) == seen
            w.routers[1].store.away = True
            w.decode.release()
            rest = await owner.rest()
            w.routers[1].store.away = False
            assert await guest.rest() == rest


async def test_a_claim_whose_reply_was_lost_is_confirmed(tmp_path):
    """The store has granted it: the lease finds that, and the call starts under the claim's own epoch."""
    async with router_cluster(tmp_path, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)]) as w:
        async with opened(w.routers[0], max_tokens=8) as stream:
            seen = await stream.take(4)
        await w.until(stream.call_id, CallStatus.ABANDONED)
        w.routers[1].store.num_claims_lost = 1
        async with resumed(w.routers[1], stream.call_id, seen[-1].id) as again:
            seen += await again.rest()
        assert same(seen, await undisturbed(w.routers[0], max_tokens=8))
        assert w.routers[1].store.num_claims_lost == 0
        ended = await w.until(stream.call_id, CallStatus.ENDED)
        assert (ended.epoch, ended.owner.partition("/")[0]) == (2, "router-1")


async def test_an_ended_call_can_be_read_again(tmp_path):
    async with router_cluster(tmp_path) as w:
        events = await undisturbed(w.routers[0], max_tokens=5, **USAGE)
        id = events[0].id.partition(":")[0]
        async with resumed(w.routers[1], id) as stream:
            assert await stream.rest() == events
        async with resumed(w.routers[1], id, events[-2].id) as stream:
            assert await stream.rest() == events[-1:]
        done = await w.routers[1].http.get(f"/v1/requests/{id}/stream", params={"last_event_id": events[-1].id})
        assert (done.status_code, done.content) == (204, b"")
        assert len(w.decode.requests) == 1


async def test_an_echo_alone_can_be_read_again(tmp_path):
    body: dict[str, Any] = {"prompt": "w5 w6", "echo": True, "max_tokens": 0}
    async with router_cluster(tmp_path) as w:
        events = await undisturbed(w.routers[0], **body)
        id = events[0].id.partition(":")[0]
        async with resumed(w.routers[1], id, events[0].id) as stream:
            assert await stream.rest() == events[1:]


async def test_a_failure_is_shown_to_a_later_reader(tmp_path):
    script = [
        ScriptedAction(Phase.DECODE, Hold(), index=2),
        ScriptedAction(Phase.DECODE, Fail("context_length_exceeded"), index=3),
        ScriptedAction(Phase.DECODE, Fail("context_length_exceeded"), index=4),  # the next attempt confirms it
    ]
    async with router_cluster(tmp_path, decode=script) as w:
        async with opened(w.routers[0], max_tokens=8) as stream:
            events = await stream.take(2)
            w.decode.release()
            events += await stream.rest()
        assert json.loads(events[-1].data)["error"]["code"] == "context_length_exceeded"
        assert [event.id for event in events[-2:]] == [events[-2].id] * 2  # an error event has no position of its own
        id = events[0].id.partition(":")[0]
        await w.until(id, CallStatus.ENDED)
        async with resumed(w.routers[1], id, events[0].id) as stream:
            again = await stream.rest()
        assert again[:-1] == events[1:-1]
        assert json.loads(again[-1].data)["error"]["code"] == "context_length_exceeded"


async def test_an_impossible_resume_is_refused_with_a_reason(tmp_path):
    async with router_cluster(tmp_path, num_routers=1) as w:
        http = w.routers[0].http
        events = await undisturbed(w.routers[0], max_tokens=3)
        id = events[0].id.partition(":")[0]
        stream = f"/v1/requests/{id}/stream"
        body = {"model": "mock", "messages": [{"role": "user", "content": "w1"}], "stream": True}
        refusals = [
            (await http.get("/v1/requests/cmpl-none"), 404, "request_not_found"),
            (await http.get("/v1/requests/cmpl-none/stream"), 404, "request_not_found"),
            (
                await http.post(COMPLETIONS, json=body, headers={"last-event-id": "cmpl-none:1"}),
                404,
                "request_not_found",
            ),
            (await http.get(stream, headers={"last-event-id": "7"}), 400, "invalid_request"),
            (await http.get(stream, headers={"last-event-id": f"{id}:1.1"}), 400, "invalid_request"),
            (await http.get(stream, headers={"last-event-id": "cmpl-other:1"}), 400, "invalid_request"),
            (await http.post(COMPLETIONS, json=body, headers={"last-event-id": f"{id}:x"}), 400, "invalid_request"),
            (await http.post(CHAT, json=body, headers={"last-event-id": f"{id}:1"}), 400, "invalid_request"),
        ]
        assert [(r.status_code, r.json()["error"]["code"]) for r, _, _ in refusals] == [(s, c) for _, s, c in refusals]
        w.routers[0].store.away = True
        away = await http.get(stream)
        assert (away.status_code, away.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(away.headers["retry-after"]) >= 1


@pytest.mark.parametrize("num_seen", [2, 8])
async def test_tokens_that_are_not_this_answer_s_are_noticed_anywhere(tmp_path, num_seen):
    """The client's first router sent tokens that the store never got; the answer here has others."""
    async with router_cluster(tmp_path) as w:
        seen = await undisturbed(w.routers[0], max_tokens=8)
        cursor = Cursor.parse(seen[num_seen - 1].id)
        others = tuple(digest ^ 1 for digest in cursor.digests if digest is not None)
        forged = str(Cursor(cursor.request_id, cursor.counts, 0, others))
        for router in w.routers:
            async with resumed(router, cursor.request_id, forged) as stream:
                [event] = await stream.rest()
            assert json.loads(event.data)["error"]["code"] == "model_replaced"
            async with resumed(router, cursor.request_id, str(cursor)) as stream:
                assert same(seen[:num_seen] + await stream.rest(), seen)


async def test_the_call_of_another_tenant_is_unknown(tmp_path):
    keys = {tenant: new_key() for tenant in ("ada", "bob")}
    file = tmp_path / "keys"
    file.write_text("".join(f"{make_entry(tenant, key).line()}\n" for tenant, key in keys.items()))
    async with router_cluster(tmp_path, num_routers=1, api_keys_file=file) as w:
        http, body = w.routers[0].http, {"model": "mock", "prompt": [1], "max_tokens": 3}
        ada, bob = ({"authorization": f"Bearer {key}"} for key in keys.values())
        id = (await http.post(COMPLETIONS, json=body, headers=ada)).headers["x-baton-request-id"]
        await w.until(id, CallStatus.ENDED)
        for path in (f"/v1/requests/{id}", f"/v1/requests/{id}/stream"):
            assert (await http.get(path, headers=ada)).status_code == 200
            assert (await http.get(path, headers=bob)).status_code == 404


async def test_event_ids_go_to_sse_clients_or_to_all_by_the_setting(tmp_path):
    body = {"model": "mock", "prompt": [1, 2], "max_tokens": 3, "stream": True}
    for setting, num_ids in (("accepted", 0), ("always", 4)):
        async with router_cluster(tmp_path, num_routers=1, event_ids=setting) as w:
            text = (await w.routers[0].http.post(COMPLETIONS, json=body)).text
            assert text.count("id: cmpl-") == num_ids
            assert text.count("data: ") == 4


async def test_a_header_tells_whether_the_call_is_durable(tmp_path):
    async with router_cluster(tmp_path, num_routers=1) as w:
        router, body = w.routers[0], {"model": "mock", "prompt": [1, 2], "max_tokens": 2}
        whole = await router.http.post(COMPLETIONS, json=body)
        assert whole.headers["x-baton-durable"] == "true"
        assert whole.headers["x-baton-request-id"] == whole.json()["id"]
        large = await router.http.post(COMPLETIONS, json={**body, "user": "x" * 300_000})
        assert (large.status_code, large.headers["x-baton-durable"]) == (200, "false")
        router.store.away = True
        async with asyncio.timeout(TIMEOUT_S):
            while (await router.http.post(COMPLETIONS, json=body)).headers["x-baton-durable"] == "true":
                pass
