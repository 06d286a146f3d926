"""Two routers side by side: a lost, cut-off or draining router loses its calls to the other, no token is lost."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from baton.domain.ids import AttemptId, OwnerId, RequestId, first_attempt
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken
from baton.store.store import CallRecord, CallStatus, SequenceRecord
from tests.contract.stores import journal_entry
from tests.lateness import in_time
from tests.mock_workers import Hold, Phase, ScriptedAction
from tests.service.takeover.router_cluster import (
    COMPLETIONS,
    TIMEOUT_S,
    Event,
    Router,
    RouterCluster,
    contents,
    opened,
    resumed,
    router_cluster,
    same,
    undisturbed,
)

pytestmark = pytest.mark.timeout(60)

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
TAKEN_WITHIN_S = 5.0
"""The promise is 2 s, of which one is the lease; the rest is for a busy machine."""


def held(num_requests: int = 1) -> list[ScriptedAction]:
    """A script: each of `num_requests` requests stops after its fourth token."""
    return [ScriptedAction(Phase.DECODE, Hold(), index=4, times=num_requests)]


async def until_degraded(router: Router) -> None:
    """Waits until the router notices that the store is unavailable, by a failed write or a failed ping."""
    body = {"model": "mock", "prompt": [1], "max_tokens": 1}
    async with asyncio.timeout(TIMEOUT_S):
        while not router.store.num_writes_refused:
            answer = await router.http.post(COMPLETIONS, json=body)
            assert answer.headers["x-baton-durable"] == "false"


async def test_a_router_cut_off_from_the_store_loses_its_calls(tmp_path, store):
    """The client stays connected. Events after the pause can only come from the other router's journal: the attempt of
    this router is held to the end.
    """
    async with router_cluster(tmp_path, store=store, decode=held()) as w:
        here, there = w.routers
        async with opened(here, max_tokens=8, **USAGE) as stream:
            seen = await stream.take(4)
            id = stream.call_id
            await w.until_emitted(id, 4)
            here.store.away = True
            parted_at = time.monotonic()
            taken = await w.until_owned(id, "router-1")
            in_time(time.monotonic() - parted_at, TAKEN_WITHIN_S, "the call is taken over")
            assert (taken.epoch, taken.status) in ((2, CallStatus.OPEN), (2, CallStatus.ENDED))
            await w.until(id, CallStatus.ENDED)
            assert [r.id.attempt for r in w.decode.requests if r.id.request_id == id] == [1, first_attempt(2)]
            here.store.away = False
            rest = await stream.rest()
        assert same(seen + rest, await undisturbed(there, max_tokens=8, **USAGE))
        record = await w.call(id)
        assert (record.epoch, record.status) == (2, CallStatus.ENDED)
        assert await w.decode.aborted(AttemptId(RequestId(id), 1))


async def test_an_unstreamed_answer_survives_a_lost_lease(tmp_path):
    """The other router abandons the call, since no client could read it there; this router claims it back."""
    async with router_cluster(tmp_path, decode=held()) as w:
        here = w.routers[0]
        asking = asyncio.create_task(
            here.http.post(COMPLETIONS, json={"model": "mock", "prompt": [1, 2, 3], "max_tokens": 8})
        )
        await w.decode.reached(Phase.DECODE, times=4)
        id = w.decode.requests[0].id.request_id
        await w.until_emitted(id, 4)
        here.store.away = True
        await w.until(id, CallStatus.ABANDONED)
        await until_degraded(here)  # else it might never notice the lost lease
        here.store.away = False
        answer = (await asking).json()
        assert answer["choices"][0]["text"].split() == [f"w{1000 + n}" for n in range(8)]


async def test_an_orphan_runs_to_its_end_without_a_client(tmp_path):
    body: dict[str, Any] = {"max_tokens": 8, "n": 2, "seed": 3, **USAGE}
    async with router_cluster(tmp_path, decode=held(2)) as w:
        here, there = w.routers
        async with opened(here, **body) as stream:
            seen = await stream.take(4)
            id = stream.call_id
            await w.decode.reached(Phase.DECODE, times=8)
            here.store.away = True
            await w.until_owned(id, "router-1")
        await w.until(id, CallStatus.ENDED)
        status = (await there.http.get(f"/v1/requests/{id}")).json()
        assert [(c["state"], c["num_tokens"], c["finish_reason"]) for c in status["choices"]] == [
            ("finished", 8, "length")
        ] * 2
        assert status["epoch"] == 2
        expected = await undisturbed(there, **body)
        async with resumed(there, id, seen[-1].id) as stream:
            rest = await stream.rest()
        for choice in range(2):
            got = [event for event in seen + rest if event.choice == choice]
            assert contents(got) == contents([event for event in expected if event.choice == choice])


ENDS_IN_THE_JOURNAL = [(FinishReason.LENGTH, "", RequestState.FINISHED), (None, "worker_lost", RequestState.FAILED)]


@pytest.mark.parametrize(("finish", "code", "end"), ENDS_IN_THE_JOURNAL)
async def test_an_end_that_was_only_journalled_is_recorded_by_the_next_owner(tmp_path, store, finish, code, end):
    """The router died between journal and record. The other choice continues, or ends with the call."""
    async with router_cluster(tmp_path, store=store) as w:
        sequences = (RequestId("cmpl-gone"), RequestId("cmpl-gone-1"))
        for sequence in sequences:
            await w.store.create(SequenceRecord(sequence, 1, RequestState.RECEIVED, "gone", "mock", 3))
            for event in (RequestEvent.ENQUEUE, RequestEvent.RESERVE, RequestEvent.PREFILL):
                await w.store.advance(AttemptId(sequence, 1), event)
        body = json.dumps({"model": "mock", "prompt": [1, 2, 3], "max_tokens": 2, "n": 2, "stream": True}).encode()
        owner = OwnerId("gone/1")
        await w.store.put_call(
            CallRecord(sequences[0], owner, 1, CallStatus.OPEN, COMPLETIONS, body, "", 0, 7, sequences)
        )
        tokens = tuple(OutputToken(index, 1000 + index) for index in range(2))
        await w.store.write_journal(
            [journal_entry(AttemptId(sequences[0], 1), tokens, finish=finish, failure_code=code)]
        )
        await w.until(sequences[0], CallStatus.ENDED)
        async with asyncio.timeout(TIMEOUT_S):
            while {(await kept(w, sequence)).state for sequence in sequences} != {end}:
                await w.routers[0].http.get("/health")
        settled = await kept(w, sequences[0])
        assert (settled.attempt, settled.num_emitted, settled.failure_code) == (first_attempt(2), 2, code)


async def test_a_call_that_cannot_be_resumed_ends_with_its_choices(tmp_path):
    """Its routers held longer prompts than those of this cluster. One choice had failed, one was never stored."""
    async with router_cluster(tmp_path, num_routers=1) as w:
        done, running, unknown = sequences = tuple(RequestId(f"cmpl-long-{choice}") for choice in range(3))
        for sequence in (done, running):
            await w.store.create(SequenceRecord(sequence, 1, RequestState.RECEIVED, "gone", "mock", 200))
            await w.store.advance(AttemptId(sequence, 1), RequestEvent.ENQUEUE)
        await w.store.advance(AttemptId(done, 1), RequestEvent.FAIL, failure_code="worker_lost")
        body = json.dumps({"model": "mock", "prompt": [1] * 200, "max_tokens": 2, "n": 3, "stream": True}).encode()
        call = RequestId("cmpl-long")
        w.routers[0].store.num_reads_lost = 2
        await w.store.put_call(
            CallRecord(call, OwnerId("gone/1"), 1, CallStatus.OPEN, COMPLETIONS, body, "", 0, 7, sequences)
        )
        await w.until(call, CallStatus.ENDED)
        async with asyncio.timeout(TIMEOUT_S):
            while {(await kept(w, sequence)).state for sequence in sequences} != {RequestState.FAILED}:
                await w.routers[0].http.get("/health")
        assert {(await kept(w, id)).failure_code for id in (running, unknown)} == {"context_length_exceeded"}
        assert (await kept(w, done)).failure_code == "worker_lost"
        assert w.routers[0].store.num_reads_lost == 0


async def kept(w: RouterCluster, sequence: RequestId) -> SequenceRecord:
    record = await w.store.get(sequence)
    assert record is not None
    return record


async def test_an_orphan_whose_claim_got_no_reply_is_claimed_again(tmp_path):
    """The store has a new owner that does not know it; other routers would never claim the call."""
    async with router_cluster(tmp_path, decode=held()) as w:
        here, there = w.routers
        async with opened(here, max_tokens=8) as stream:
            await stream.take(4)
            await w.until_emitted(stream.call_id, 4)
            there.store.num_claims_lost = 1
            here.store.away = True
            ended = await w.until(stream.call_id, CallStatus.ENDED)
        assert there.store.num_claims_lost == 0
        assert (ended.epoch, ended.owner.partition("/")[0]) == (2, "router-1")


async def test_a_takeover_waits_for_a_store_that_does_not_answer_a_read(tmp_path):
    async with router_cluster(tmp_path, decode=held()) as w:
        here, there = w.routers
        async with opened(here, max_tokens=8) as stream:
            seen = await stream.take(4)
            await w.until_emitted(stream.call_id, 4)
            there.store.num_reads_lost = 2
            here.store.away = True
            ended = await w.until(stream.call_id, CallStatus.ENDED)
        assert there.store.num_reads_lost == 0
        assert (ended.epoch, ended.owner.partition("/")[0]) == (2, "router-1")
        rest = await _rest(there, stream.call_id, seen[-1].id)
        assert same(seen + rest, await undisturbed(there, max_tokens=8))


async def test_a_client_does_not_claim_what_its_router_is_claiming(tmp_path):
    """A client asks for a call that the store assigns to this router, before the router knows of its claim.

    A second claim would fence off the run of the first one, and every token of it.
    """
    async with router_cluster(tmp_path, decode=held()) as w:
        here, there = w.routers
        async with opened(here, max_tokens=8) as stream:
            seen = await stream.take(4)
            await w.until_emitted(stream.call_id, 4)
            there.store.claims_answered.clear()
            here.store.away = True
            await w.until_owned(stream.call_id, "router-1")
            async with asyncio.TaskGroup() as group:
                rest = group.create_task(_rest(there, stream.call_id, seen[-1].id))
                num_before = there.store.num_calls_read
                async with asyncio.timeout(TIMEOUT_S):
                    while there.store.num_calls_read < num_before + 3:
                        await there.http.get("/health")
                there.store.claims_answered.set()
        assert same(seen + rest.result(), await undisturbed(there, max_tokens=8))
        assert (await w.until(stream.call_id, CallStatus.ENDED)).epoch == 2
        assert [r.id.attempt for r in w.decode.requests if r.id.request_id == stream.call_id] == [1, first_attempt(2)]


async def _rest(router: Router, id: str, after: str) -> list[Event]:
    async with resumed(router, id, after) as stream:
        return await stream.rest()


async def test_a_stopping_router_releases_its_calls(tmp_path):
    async with router_cluster(tmp_path, decode=held(), drain_timeout_s=0.1) as w:
        leaving, staying = w.routers
        async with opened(leaving, max_tokens=8) as stream:
            seen = await stream.take(4)
            leaving.stop.set()
            assert await asyncio.wait_for(leaving.task, 15.0) == 0
        async with resumed(staying, stream.call_id, seen[-1].id) as again:
            seen += await again.rest()
        assert same(seen, await undisturbed(staying, max_tokens=8))
        assert (await w.call(stream.call_id)).owner.startswith("router-1/")


async def test_a_draining_router_takes_nothing_over(tmp_path):
    async with router_cluster(tmp_path, decode=held(2)) as w:
        draining, lost = w.routers
        async with opened(draining, max_tokens=8) as own:
            await own.take(4)
            async with opened(lost, max_tokens=8) as stream:
                seen = await stream.take(4)
            await w.until(stream.call_id, CallStatus.ABANDONED)
            draining.stop.set()
            async with asyncio.timeout(5.0):
                while (await draining.http.get("/ready")).status_code != 503:
                    pass
            path = f"/v1/requests/{stream.call_id}/stream"
            refused = await draining.http.get(path, headers={"last-event-id": seen[-1].id})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            w.decode.release()
            assert len(await own.rest()) == 5
        assert (await w.call(stream.call_id)).status is CallStatus.ABANDONED


async def test_a_queued_call_is_taken_over(tmp_path):
    """The call has no token yet."""
    async with (
        router_cluster(tmp_path, decode=held(4), max_running_requests=1) as w,
        AsyncExitStack() as stack,
    ):
        mine = [await stack.enter_async_context(opened(w.routers[0], max_tokens=8)) for _ in range(2)]
        others = [await stack.enter_async_context(opened(w.routers[1], max_tokens=8)) for _ in range(2)]
        w.routers[0].store.away = True
        for stream in mine:
            await w.until_owned(stream.call_id, "router-1")
        w.decode.release()
        for stream in mine:
            await w.until(stream.call_id, CallStatus.ENDED)
        w.routers[0].store.away = False
        for stream in (*mine, *others):
            events = await stream.rest()
            assert (len(events), events[-1].data) == (9, "[DONE]")
