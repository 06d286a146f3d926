"""A router that is overruled, or whose store has lost a call: its client still gets the whole answer."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from baton.domain.ids import AttemptId, RequestId, first_attempt
from baton.store.memory_store import MemoryStore
from baton.store.options import StoreOptions
from baton.store.ownership import patience_s
from baton.store.store import CallStatus
from tests.mock_workers import Fail, Hold, Phase, ScriptedAction
from tests.service.takeover.router_cluster import opened, resumed, router_cluster, same, undisturbed

pytestmark = pytest.mark.timeout(60)

BODY: dict[str, Any] = {"max_tokens": 8, "stream_options": {"include_usage": True}}
PATIENCE_S = patience_s(StoreOptions().owner_ttl_s)


def overruled(attempt: int, owner_tag: int = 0, index: int = 3) -> list[ScriptedAction]:
    """A script: decode reports before token `index` that it has seen this attempt of the request."""
    seen = AttemptId(RequestId(""), attempt, owner_tag)
    return [ScriptedAction(Phase.DECODE, Fail("superseded", seen), index=index)]


class WipedStore(MemoryStore):
    """`wipe` loses everything but the workers."""

    def wipe(self) -> None:
        """FLUSHALL, as the routers see it."""
        fresh, before = MemoryStore(self._options), self._calls
        self._sequences, self._calls = fresh._sequences, fresh._calls
        before.close()


async def test_an_owner_overruled_by_an_unknown_ballot_claims_above_it(tmp_path) -> None:
    """SIGSTOP and FLUSHALL: the newer owner is known to the workers only. The client hears no end and no silence."""
    async with router_cluster(tmp_path, num_routers=1, decode=overruled(first_attempt(5) + 2, owner_tag=9)) as w:
        began = time.monotonic()
        async with opened(w.routers[0], **BODY) as stream:
            events, id = await stream.rest(), stream.call_id
        assert time.monotonic() - began >= PATIENCE_S - 0.5, "the newer owner had its time"
        record = await w.until(id, CallStatus.ENDED)
        attempts = [request.id for request in w.decode.requests if request.id.request_id == id]
        assert [attempt.epoch for attempt in attempts] == [1, 6]
        assert attempts[1].ballot == record.ballot > (5, 9)
        stored = await w.store.get(RequestId(id))
        assert stored is not None
        assert (stored.state.value, stored.failure_code) == ("finished", "")
        assert same(events, await undisturbed(w.routers[0], **BODY))


async def test_an_owner_refused_for_its_own_ballot_goes_on_at_once(tmp_path) -> None:
    async with router_cluster(tmp_path, num_routers=1, decode=overruled(4)) as w:
        async with opened(w.routers[0], **BODY) as stream:
            events, id = await stream.rest(), stream.call_id
        assert [r.id.attempt for r in w.decode.requests if r.id.request_id == id] == [1, 5]
        assert (await w.until(id, CallStatus.ENDED)).epoch == 1
        assert same(events, await undisturbed(w.routers[0], **BODY))


async def test_an_unstreamed_answer_survives_an_unknown_ballot_too(tmp_path) -> None:
    async with router_cluster(tmp_path, num_routers=1, decode=overruled(first_attempt(3), owner_tag=1)) as w:
        answer = await w.routers[0].http.post(
            "/v1/completions", json={"model": "mock", "prompt": [1, 2, 3], "max_tokens": 8}
        )
        assert answer.json()["choices"][0]["text"].split() == [f"w{1000 + n}" for n in range(8)]


async def test_two_overrulings_in_one_request_end_in_an_answer(tmp_path) -> None:
    script = [*overruled(first_attempt(3), 9), *overruled(first_attempt(9), 9, index=5)]
    async with router_cluster(tmp_path, num_routers=1, decode=script) as w:
        async with opened(w.routers[0], **BODY) as stream:
            events, id = await stream.rest(), stream.call_id
        assert [r.id.epoch for r in w.decode.requests if r.id.request_id == id] == [1, 4, 10]
        assert same(events, await undisturbed(w.routers[0], **BODY))


async def test_a_reader_enters_a_call_that_store_and_owner_have_lost(tmp_path) -> None:
    """The owner is killed, Redis is flushed; another router's client still reads the call."""
    store = WipedStore(StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
    script = [ScriptedAction(Phase.DECODE, Hold(), index=4)]
    async with router_cluster(tmp_path, store=store, decode=script) as w:
        here, there = w.routers
        async with opened(here, **BODY) as stream:
            await stream.take(4)
            id = stream.call_id
            await w.until_emitted(id, 4)
            async with resumed(there, id) as reading:
                seen = await reading.take(4)
                here.store.away = True  # as if it were dead: it renews nothing and puts nothing again
                store.wipe()
                rest = await reading.rest()
        record = await w.until(id, CallStatus.ENDED)
        assert record.owner.startswith("router-1/")
        assert same(seen + rest, await undisturbed(there, **BODY))


async def test_a_call_that_the_store_has_just_lost_is_unavailable(tmp_path) -> None:
    store = WipedStore(StoreOptions(worker_ttl_s=60.0, heartbeat_s=0.05))
    async with router_cluster(
        tmp_path, num_routers=1, store=store, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)]
    ) as w:
        http = w.routers[0].http
        assert (await http.get("/v1/requests/cmpl-unknown/stream")).status_code == 404
        async with opened(w.routers[0], **BODY) as stream:
            await stream.take(4)
            await w.until_emitted(stream.call_id, 4)
            store.wipe()
            response = await http.get(f"/v1/requests/{stream.call_id}/stream")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "store_unavailable")
            assert "retry-after" in response.headers


async def test_a_call_that_nobody_has_is_answer_lost(tmp_path) -> None:
    """Its copy is not known to the router that reads it: the body was too large for the store."""
    script = [*overruled(first_attempt(3), 9), ScriptedAction(Phase.DECODE, Hold(), index=7)]
    body = {**BODY, "user": "x" * 300_000}
    async with router_cluster(tmp_path, num_routers=1, decode=script) as w:
        began = time.monotonic()
        async with asyncio.timeout(20.0), opened(w.routers[0], **body) as stream:
            events = await stream.rest()
        assert json.loads(events[-1].data)["error"]["code"] == "answer_lost"
        assert time.monotonic() - began >= PATIENCE_S - 0.5


async def test_an_abandoned_call_of_another_tokenizer_is_503(tmp_path) -> None:
    """Also when it has tokens; its client would otherwise wait to the deadline."""
    async with router_cluster(tmp_path, num_routers=1, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)]) as w:
        async with opened(w.routers[0], **BODY) as stream:
            await stream.take(4)
            id = stream.call_id
            await w.until_emitted(id, 4)
        record = await w.until(id, CallStatus.ABANDONED)
        foreign = replace(record, epoch=2, text_digest="other", status=CallStatus.OPEN)
        await w.store.put_call(foreign)
        assert await w.store.end_call(record.id, foreign.ballot, CallStatus.ABANDONED)
        response = await w.routers[0].http.get(f"/v1/requests/{id}/stream")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "other_tokenizer")
        assert response.headers["retry-after"] == "1"
