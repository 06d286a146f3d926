"""A request with a token continues only on workers with the same fingerprint."""

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
from baton.domain.worker import WorkerBudgets
from baton.services.router.admission.admission_queue import AdmissionLimits
from baton.services.router.dispatch.reserve import MAX_ASKING
from baton.services.router.edge.http_errors import error_response
from baton.services.router.generation import SequenceSpec, TokenChunk
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

DEADLINE_S = 2.0


class SelfPrefillingDecode(MockDecode):
    """A mock decode worker that prefills for itself. One fingerprint is one model."""

    budgets = WorkerBudgets(prefill_tokens=64, rows=8)

    def __init__(self, id: str, fingerprint: str, script: Sequence[ScriptedAction] = ()) -> None:
        super().__init__(id, script)
        self.fingerprint = fingerprint


async def join(w: World, *workers: SelfPrefillingDecode) -> None:
    """Starts workers and waits until the router knows them."""
    for worker in workers:
        await worker.start()
        w.cluster.decodes.append(worker)
    await w.cluster.announce()
    await two_refreshes(w)


async def leave(w: World, worker: SelfPrefillingDecode) -> None:
    """Stops a worker and withdraws its record."""
    w.cluster.decodes.remove(worker)
    await w.store.withdraw(worker.id, worker.incarnation)
    await worker.stop()


@asynccontextmanager
async def begun(
    max_tokens: int = 5, deadline_s: float = 10.0
) -> AsyncIterator[tuple[World, SelfPrefillingDecode, list[TokenChunk], AsyncGenerator[TokenChunk]]]:
    """Starts a request that has two tokens from an old worker, and hangs there."""
    async with world([], []) as w:
        old = SelfPrefillingDecode("old-0", "old", [ScriptedAction(Phase.DECODE, Hold(), index=2)])
        await join(w, old)
        chunks = w.dispatcher.run(w.admit(sequence(max_tokens=max_tokens, deadline_s=deadline_s)))
        seen = [await anext(chunks), await anext(chunks)]
        yield w, old, seen, chunks


async def test_a_retry_waits_for_its_fingerprint_until_the_deadline():
    async with begun(deadline_s=DEADLINE_S) as (w, old, seen, chunks):
        new = SelfPrefillingDecode("new-0", "new")
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


async def test_a_retry_prefers_its_fingerprint_to_idle_workers():
    async with begun() as (w, old, seen, chunks):
        twin, new = SelfPrefillingDecode("old-1", "old"), SelfPrefillingDecode("new-0", "new")
        await join(w, twin, new)
        await w.cluster.change_load(twin, running_rows=7)  # the dearer one
        await two_refreshes(w)
        await leave(w, old)
        assert tokens(seen + await consume(chunks)) == scripted(5)
        served = {worker.id: [request.id.attempt for request in worker.requests] for worker in (old, twin, new)}
        assert served == {"old-0": [1], "old-1": [2], "new-0": []}


async def test_a_worker_with_the_fingerprint_that_returns_is_used():
    async with begun() as (w, old, seen, chunks):
        new = SelfPrefillingDecode("new-0", "new")
        await join(w, new)
        await leave(w, old)
        await w.generate(sequence("newcomer"))  # served meanwhile
        back = SelfPrefillingDecode("old-0", "old")
        await join(w, back)
        assert tokens(seen + await consume(chunks)) == scripted(5)
        assert [request.id.request_id for request in new.requests] == ["newcomer"]


async def test_waiting_for_a_fingerprint_holds_up_no_other_request():
    """More requests than `MAX_ASKING`."""
    async with world([], [], replace(LIMITS, admission=AdmissionLimits(32))) as w:
        old, new = SelfPrefillingDecode("old-0", "old"), SelfPrefillingDecode("new-0", "new")
        for worker in (old, new):
            worker.budgets = replace(worker.budgets, rows=32)
        await join(w, new)
        waiting = [
            replace(sequence(f"waits-{n}", deadline_s=5.0), attempt=1001, fingerprint=old.fingerprint)
            for n in range(MAX_ASKING + 1)
        ]
        runs = [w.dispatcher.run(w.admit(one)) for one in waiting]
        tasks = [asyncio.ensure_future(consume(run)) for run in runs]
        await two_refreshes(w)  # no worker matched for any of them
        assert tokens(await w.generate(sequence("newcomer", deadline_s=2.0))) == scripted(5)
        await join(w, old)
        for task in tasks:
            assert tokens(await task) == scripted(5)
        assert len(new.requests) == 1


async def test_waiting_for_room_on_old_workers_holds_up_no_other():
    """`MAX_ASKING` requests hold all entries of the queue of their fingerprint."""
    async with world([], [], replace(LIMITS, admission=AdmissionLimits(32))) as w:
        old, new = (
            SelfPrefillingDecode("old-0", "old", [ScriptedAction(Phase.RESERVE, Busy(60.0), times=99)]),
            SelfPrefillingDecode("new-0", "new"),
        )
        for worker in (old, new):
            worker.budgets = replace(worker.budgets, rows=32)
        await join(w, old, new)
        waiting = [
            replace(sequence(f"waits-{n}", deadline_s=3.0), attempt=1001, fingerprint=old.fingerprint)
            for n in range(MAX_ASKING + 1)
        ]
        runs = [w.dispatcher.run(w.admit(one)) for one in waiting]
        tasks = [asyncio.ensure_future(consume(run)) for run in runs]
        await old.reached(Phase.RESERVE, times=MAX_ASKING + 1)
        await two_refreshes(w)  # all of them are refused
        admitted = w.admit(sequence("newcomer", deadline_s=10.0))
        assert tokens(await consume(w.dispatcher.run(admitted))) == scripted(5)
        assert not any(task.done() for task in tasks), "they wait still"
        for task in tasks:
            with pytest.raises(DeadlineExceeded):
                await task


async def test_a_request_without_a_token_may_use_any_worker():
    async with world([], []) as w:
        old, new = (
            SelfPrefillingDecode("old-0", "old", [ScriptedAction(Phase.IMPORT, Crash())]),
            SelfPrefillingDecode("new-0", "new"),
        )
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
async def test_a_takeover_keeps_the_required_fingerprint(num_journalled):
    """Also with an empty journal: its client may have tokens that were never written."""
    async with begun() as (w, old, _, chunks):
        await chunks.aclose()
        assert (await kept(w)).fingerprint == "old"
        assert await w.store.advance(AttemptId(sequence().id, 2), RequestEvent.RESUME) is RequestState.QUEUED
        new = SelfPrefillingDecode("new-0", "new")
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


async def test_a_record_without_a_fingerprint_gets_one_at_the_next_attempt():
    async with world([], []) as w:
        new = SelfPrefillingDecode("new-0", "new")
        await join(w, new)
        emitted = (OutputToken(0, token_at(0)),)
        assert tokens(await w.generate(replace(sequence(), emitted=emitted))) == scripted(5)[1:]
        assert (await kept(w)).fingerprint == "new"


async def test_another_router_keeps_the_required_fingerprint(tmp_path):
    """Runs two whole routers: one claims the other's call while only workers with another fingerprint are left."""
    async with router_cluster(
        tmp_path, decode=[ScriptedAction(Phase.DECODE, Hold(), index=4)], request_deadline_s=4.0
    ) as w:
        (here, there), new = w.routers, SelfPrefillingDecode("new-0", "new")
        async with opened(here, max_tokens=8) as stream:
            seen = await stream.take(4)
            id = stream.call_id
            await w.until_emitted(id, 4)
            gone, w.cluster.prefills, w.cluster.decodes = w.cluster.workers, [], [new]
            await new.start()
            await w.cluster.announce()
            here.store.away = True  # before its attempt fails: the other router learns of it from the store
            for worker in gone:
                await w.store.withdraw(worker.id, worker.incarnation)
                await worker.stop()
            await w.until_owned(id, "router-1")
        async with resumed(there, id, seen[-1].id) as stream:
            rest = await stream.rest()
        assert [event for event in rest if "choices" in event.data] == []
        assert "model_replaced" in rest[-1].data
        assert new.reservations == []


def taken_over(name: str, deadline_s: float = 10.0, num_emitted: int = 0) -> SequenceSpec:
    """A sequence that another router began on workers with the old fingerprint."""
    emitted = tuple(OutputToken(index, token_at(index)) for index in range(num_emitted))
    return replace(sequence(name, deadline_s=deadline_s), attempt=1001, fingerprint="old", emitted=emitted)


async def until_slots(w: World, *, suspended: int = 0, running: int = 0, waiting: int = 0) -> None:
    """Waits until so many slots are in these states."""
    queue = w.dispatcher.admission_queue
    async with asyncio.timeout(10):
        while (queue.num_suspended, queue.num_running, queue.num_waiting) != (suspended, running, waiting):
            await w.workers.wait_for_change()


@asynccontextmanager
async def after_a_change_of_models(
    num: int, num_slots: int = 2, deadline_s: float = 10.0, script: Sequence[ScriptedAction] = ()
) -> AsyncIterator[tuple[World, SelfPrefillingDecode, list[asyncio.Task[list[TokenChunk]]]]]:
    """A router with new workers only that has taken over `num` requests of the old ones. All are suspended."""
    async with world([], [], replace(LIMITS, admission=AdmissionLimits(num_slots))) as w:
        new = SelfPrefillingDecode("new-0", "new", script)
        await join(w, new)
        runs = [w.dispatcher.run(w.admit(taken_over(f"old-{n}", deadline_s))) for n in range(num)]
        tasks = [asyncio.create_task(consume(run)) for run in runs]
        await until_slots(w, suspended=num)
        yield w, new, tasks
        await until_slots(w)


async def test_requests_whose_model_is_gone_leave_their_slots_to_others():
    """More of them than slots. They are the next ones when their model is back."""
    async with after_a_change_of_models(5, num_slots=2) as (w, new, tasks):
        for n in range(3):
            assert tokens(await w.generate(sequence(f"newcomer-{n}", deadline_s=2.0))) == scripted(5)
        await join(w, old := SelfPrefillingDecode("old-0", "old"))
        for task in tasks:
            assert tokens(await task) == scripted(5)
        assert (len(new.requests), len(old.requests)) == (3, 5)


async def test_a_suspended_request_ends_at_its_deadline():
    async with after_a_change_of_models(1, num_slots=1, deadline_s=DEADLINE_S) as (w, _, tasks):
        with pytest.raises(ModelReplaced):
            await tasks[0]
        assert w.dispatcher.num_open == 0


async def test_a_suspended_request_is_cancelled():
    async with after_a_change_of_models(2, num_slots=1) as (w, _, tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        assert w.dispatcher.num_open == 0


async def test_waiting_requests_are_suspended_too():
    """All slots are taken: those whose model is gone do not count as work before a newcomer."""
    script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
    async with world([], [], replace(LIMITS, admission=AdmissionLimits(1))) as w:
        await join(w, SelfPrefillingDecode("new-0", "new", script))
        running = w.dispatcher.run(w.admit(sequence("running")))
        await anext(running)
        waiting = asyncio.ensure_future(w.generate(taken_over("old-0", deadline_s=DEADLINE_S)))
        complete = await w.generate(taken_over("old-1", num_emitted=5))
        assert [chunk.finish is not None for chunk in complete] == [True], "it needs no worker and no slot"
        await until_slots(w, suspended=1, running=1)
        with pytest.raises(ModelReplaced):
            await waiting
        await running.aclose()


async def test_a_request_keeps_its_slot_while_there_are_no_workers():
    """Nobody else could use it. It is suspended when workers with another model come, and goes on with its own."""
    async with begun() as (w, old, seen, chunks):
        rest = asyncio.ensure_future(consume(chunks))
        await leave(w, old)
        async with asyncio.timeout(10):
            while w.workers.readiness()[0]:
                await w.workers.wait_for_change()
        await two_refreshes(w)
        await until_slots(w, running=1)
        await join(w, SelfPrefillingDecode("new-0", "new"))
        await until_slots(w, suspended=1)
        await join(w, SelfPrefillingDecode("old-0", "old"))
        assert tokens(seen + await rest) == scripted(5)
        await until_slots(w)


async def test_a_model_that_comes_and_goes_holds_no_slot():
    """It is back while the only slot is taken, and gone again when that is free."""
    script = [ScriptedAction(Phase.DECODE, Hold(), index=2)]
    async with after_a_change_of_models(1, num_slots=1, script=script) as (w, _, tasks):
        running = w.dispatcher.run(w.admit(sequence("running")))
        await anext(running)
        await join(w, old := SelfPrefillingDecode("old-0", "old"))
        await until_slots(w, running=1, waiting=1)
        await leave(w, old)
        await until_slots(w, suspended=1, running=1)
        await running.aclose()
        await until_slots(w, suspended=1)
        await join(w, SelfPrefillingDecode("old-0", "old"))
        assert tokens(await tasks[0]) == scripted(5)
