"""A request that has given a token goes on only with workers like those that made it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.domain.errors import DeadlineExceeded, ModelReplaced
from baton.domain.ids import AttemptId, RequestId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import OutputToken
from services.router.dispatch.admission_queue import AdmissionLimits
from services.router.dispatch.reserve import MAX_ASKING
from services.router.edge.http_errors import error_response
from services.router.generation import SequenceSpec, TokenChunk
from tests.mock_workers import Busy, Crash, Hold, MockDecode, Phase, ScriptedAction, token_at
from tests.service.dispatch.dispatch_world import (
    LIMITS,
    World,
    consume,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)
from tests.service.takeover.router_cluster import opened, resumed, router_cluster

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 0.8


class Selfish(MockDecode):
    """Prefills for itself; two of one fingerprint are one model."""

    prefills = True

    def __init__(self, id: str, fingerprint: str, script: Sequence[ScriptedAction] = ()) -> None:
        super().__init__(id, script)
        self.fingerprint = fingerprint


async def join(w: World, *workers: Selfish) -> None:
    """They are there, and the router knows it."""
    for worker in workers:
        await worker.start()
        w.cluster.decodes.append(worker)
    await w.cluster.announce()
    await two_refreshes(w)


async def leave(w: World, worker: Selfish) -> None:
    """It dies, and its record goes with it."""
    w.cluster.decodes.remove(worker)
    await w.store.withdraw(worker.id, worker.incarnation)
    await worker.stop()


@asynccontextmanager
async def begun(
    max_tokens: int = 5, deadline_s: float = 10.0
) -> AsyncIterator[tuple[World, Selfish, list[TokenChunk], AsyncGenerator[TokenChunk]]]:
    """A request that has two tokens of a worker of the old model, and hangs there."""
    async with world([], []) as w:
        old = Selfish("old-0", "old", [ScriptedAction(Phase.DECODE, Hold(), index=2)])
        await join(w, old)
        chunks = w.dispatcher.run(w.admit(sequence(max_tokens=max_tokens, deadline_s=deadline_s)))
        seen = [await anext(chunks), await anext(chunks)]
        yield w, old, seen, chunks


async def test_a_replay_waits_for_workers_like_the_first_and_then_says_why_it_ends():
    async with begun(deadline_s=DEADLINE_S) as (w, old, seen, chunks):
        new = Selfish("new-0", "new")
        await join(w, new)
        await leave(w, old)
        with pytest.raises(ModelReplaced, match="another model, other weights") as raised:
            await consume(chunks)
        assert tokens(seen) == scripted(2)
        assert new.reservations == []
        reply = error_response(raised.value)
        assert (reply.status, reply.body.code) == (503, "model_replaced")
        await w.writer.flush(5.0)
        assert (await w.store.read_journal(RequestId("r"), 0, 0.0)).failure_code == "model_replaced"
        assert await w.state(sequence()) is RequestState.FAILED


async def test_a_replay_goes_to_a_worker_like_the_first_although_others_are_idle():
    async with begun() as (w, old, seen, chunks):
        twin, new = Selfish("old-1", "old"), Selfish("new-0", "new")
        await join(w, twin, new)
        await w.cluster.change_load(twin, running_rows=7)  # the dearer one
        await two_refreshes(w)
        await leave(w, old)
        assert tokens(seen + await consume(chunks)) == scripted(5)
        served = {worker.id: [request.id.attempt for request in worker.requests] for worker in (old, twin, new)}
        assert served == {"old-0": [1], "old-1": [2], "new-0": []}


async def test_a_worker_like_the_first_that_comes_back_in_time_is_waited_for():
    async with begun() as (w, old, seen, chunks):
        new = Selfish("new-0", "new")
        await join(w, new)
        await leave(w, old)
        await w.generate(sequence("newcomer"))  # served meanwhile
        back = Selfish("old-0", "old")
        await join(w, back)
        assert tokens(seen + await consume(chunks)) == scripted(5)
        assert [request.id.request_id for request in new.requests] == ["newcomer"]


async def test_those_who_wait_for_another_model_do_not_hold_up_newcomers():
    """More than may stand at the head of the line."""
    async with world([], [], replace(LIMITS, admission=AdmissionLimits(32, 8, 1000))) as w:
        old, new = Selfish("old-0", "old"), Selfish("new-0", "new")
        for worker in (old, new):
            worker.load = replace(worker.load, max_rows=32)
        await join(w, new)
        waiting = [
            replace(sequence(f"waits-{n}", deadline_s=5.0), attempt=1001, fingerprint=old.fingerprint)
            for n in range(MAX_ASKING + 1)
        ]
        runs = [w.dispatcher.run(w.admit(one)) for one in waiting]
        tasks = [asyncio.ensure_future(consume(run)) for run in runs]
        await two_refreshes(w)  # all of them have found nobody
        assert tokens(await w.generate(sequence("newcomer", deadline_s=2.0))) == scripted(5)
        await join(w, old)
        for task in tasks:
            assert tokens(await task) == scripted(5)
        assert len(new.requests) == 1


async def test_those_who_wait_for_room_on_the_old_model_do_not_hold_up_newcomers():
    """As many as may ask again at a time stand at the head of their line, and it is theirs alone."""
    async with world([], [], replace(LIMITS, admission=AdmissionLimits(32, 8, 1000))) as w:
        old, new = (
            Selfish("old-0", "old", [ScriptedAction(Phase.RESERVE, Busy(60.0), times=99)]),
            Selfish("new-0", "new"),
        )
        for worker in (old, new):
            worker.load = replace(worker.load, max_rows=32)
        await join(w, old, new)
        waiting = [
            replace(sequence(f"waits-{n}", deadline_s=3.0), attempt=1001, fingerprint=old.fingerprint)
            for n in range(MAX_ASKING + 1)
        ]
        runs = [w.dispatcher.run(w.admit(one)) for one in waiting]
        tasks = [asyncio.ensure_future(consume(run)) for run in runs]
        await old.reached(Phase.RESERVE, times=MAX_ASKING + 1)
        await two_refreshes(w)  # all of them have been told
        admitted = w.admit(sequence("newcomer", deadline_s=10.0))
        assert tokens(await consume(w.dispatcher.run(admitted))) == scripted(5)
        assert not any(task.done() for task in tasks), "they wait still"
        for task in tasks:
            with pytest.raises(DeadlineExceeded):
                await task


async def test_a_request_that_has_given_no_token_goes_to_whatever_there_is():
    async with world([], []) as w:
        old, new = Selfish("old-0", "old", [ScriptedAction(Phase.IMPORT, Crash())]), Selfish("new-0", "new")
        await join(w, old)
        admitted = w.admit(sequence())
        running = asyncio.ensure_future(consume(w.dispatcher.run(admitted)))
        await old.reached(Phase.IMPORT)
        await join(w, new)
        await leave(w, old)
        assert tokens(await running) == scripted(5)
        record = await kept(w)
        assert record.fingerprint == "new"


async def kept(w: World):
    await w.writer.flush(5.0)
    record = await w.store.get(sequence().id)
    assert record is not None
    return record


@pytest.mark.parametrize("num_journalled", [0, 2])
async def test_a_job_that_is_taken_over_keeps_its_pin(num_journalled):
    """Also with an empty journal: its client may have heard more than was written down."""
    async with begun() as (w, old, _, chunks):
        await chunks.aclose()
        assert (await kept(w)).fingerprint == "old"
        assert await w.store.advance(AttemptId(sequence().id, 2), RequestEvent.RESUME) is RequestState.QUEUED
        new = Selfish("new-0", "new")
        await join(w, new)
        await leave(w, old)
        emitted = tuple(OutputToken(index, token_at(index)) for index in range(num_journalled))
        carried: SequenceSpec = replace(
            sequence(deadline_s=DEADLINE_S), attempt=2, emitted=emitted, fingerprint=(await kept(w)).fingerprint
        )
        with pytest.raises(ModelReplaced):
            await w.generate(carried)
        assert new.reservations == []
        assert (await kept(w)).fingerprint == "old"


async def test_a_job_of_a_version_that_wrote_no_fingerprint_goes_to_whatever_there_is_and_is_pinned_then():
    async with world([], []) as w:
        new = Selfish("new-0", "new")
        await join(w, new)
        emitted = (OutputToken(0, token_at(0)),)
        assert tokens(await w.generate(replace(sequence(), emitted=emitted))) == scripted(5)[1:]
        assert (await kept(w)).fingerprint == "new"


async def test_another_router_holds_to_the_pin(tmp_path):
    """Through the whole router: its call is claimed by the other one, while only workers of another kind are left."""
    async with router_cluster(
        tmp_path, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)], request_deadline_s=4.0
    ) as w:
        (here, there), new = w.routers, Selfish("new-0", "new")
        async with opened(here, max_tokens=8) as stream:
            seen = await stream.take(4)
            id = stream.call_id
            await w.until_emitted(id, 4)
            gone, w.cluster.prefills, w.cluster.decodes = w.cluster.workers, [], [new]
            await new.start()
            await w.cluster.announce()
            here.store.away = True  # before its attempt is lost: the other router is to hear of it from the store
            for worker in gone:
                await w.store.withdraw(worker.id, worker.incarnation)
                await worker.stop()
            await w.until_owned(id, "router-1")
        async with resumed(there, id, seen[-1].id) as stream:
            rest = await stream.rest()
        assert [event for event in rest if "choices" in event.data] == []
        assert "model_replaced" in rest[-1].data
        assert new.reservations == []
