"""Uploads that fail: a late answer for that request, and none for text."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.errors import DeadlineExceeded, LinkBroken, NeedMedia, Overloaded
from baton.domain.worker import TEXT, WorkerBudgets
from baton.services.router.admission.admission_queue import AdmissionLimits
from baton.services.router.dispatch.dispatcher import MAX_NEED_MEDIA
from baton.services.router.dispatch.reserve import MAX_ASKING, ReserveLimits
from baton.telemetry.metrics import REGISTRY
from tests.service.dispatch.dispatch_world import LIMITS, REQUEST_BYTES, scripted, sequence, tokens
from tests.service.dispatch.media.vision_world import RED, announce, image, seen, vision

TIMEOUT_S = 10.0


def uploads(outcome: str) -> float:
    return REGISTRY.get_sample_value("baton_media_uploads_total", {"outcome": outcome}) or 0.0


async def test_a_worker_without_room_for_an_image_serves_text_and_gets_it_later():
    async with vision() as w:
        media = w.prefill.media
        media.errors = [Overloaded("no room") for _ in range(1000)]
        before = uploads("busy"), uploads("failed")
        running = asyncio.create_task(w.generate(seen("a", RED)))
        async with asyncio.timeout(TIMEOUT_S):
            await media.arrived.wait()
            assert tokens(await w.generate(sequence("text"))) == scripted(5)
            assert not running.done()
            media.errors.clear()
            assert tokens(await running) == scripted(5)
        assert (uploads("busy") > before[0], uploads("failed")) == (True, before[1])
        assert [request.id.attempt for request in w.prefill.requests] == [1, 1]


async def test_a_damaged_upload_is_no_failure_of_the_link():
    async with vision() as w:
        w.prefill.media.errors = [LinkBroken("damaged")]
        opened = []
        w.workers.on_link_failure = lambda *args: opened.append(args) or True  # type: ignore[method-assign,func-returns-value]
        assert tokens(await w.generate(seen("a", RED))) == scripted(5)
        assert tokens(await w.generate(sequence("text"))) == scripted(5)
        assert opened == []


async def test_a_deadline_during_an_upload_suspects_no_worker():
    async with vision() as w:
        w.prefill.media.hangs = True
        with pytest.raises(DeadlineExceeded):
            await w.generate(replace(seen("a", RED), deadline_s=0.2))
        assert not w.workers.suspicions.any
        assert tokens(await w.generate(sequence("text"))) == scripted(5)


async def test_images_that_evict_each_other_make_an_answer_late():
    async with vision() as w:
        w.prefill.media.num_forgotten = MAX_NEED_MEDIA
        assert tokens(await w.generate(seen("a", RED))) == scripted(5)
        assert w.prefill.requests[-1].id.attempt == MAX_NEED_MEDIA + 1


async def test_an_image_that_is_always_lost_ends_its_request():
    async with vision() as w:
        w.prefill.media.num_forgotten = 1000
        with pytest.raises(NeedMedia):
            await w.generate(seen("a", RED))
        assert len(w.prefill.requests) == MAX_NEED_MEDIA + 1


@pytest.mark.parametrize("holder", [0, 1, None])
async def test_a_takeover_looks_for_the_image_on_all_workers(holder):
    async with vision(num_prefill=2) as w:
        sent = seen("a", RED)
        file = image(RED)
        if holder is not None:
            w.cluster.prefills[holder].media.held["", file.identity] = RED
        without = replace(sent, files=tuple(replace(file, data=None) for file in sent.files))
        if holder is None:
            with pytest.raises(NeedMedia):
                await w.generate(without)
            assert [len(prefill.requests) for prefill in w.cluster.prefills] == [1, 1]
        else:
            assert tokens(await w.generate(without)) == scripted(5)


async def test_images_that_wait_for_workers_hold_up_no_text():
    limits = replace(
        LIMITS,
        admission=AdmissionLimits(max_running_requests=32, max_queued_bytes=32 * REQUEST_BYTES),
        reserve=ReserveLimits(reserve_timeout_s=2.0, worker_wait_s=60.0),
    )
    async with vision(limits=limits) as w:
        w.prefill.modalities = (TEXT,)
        w.decode.budgets = WorkerBudgets(rows=32)
        await announce(w)
        admitted = [replace(seen(f"a{number}", RED), attempt=2) for number in range(MAX_ASKING)]
        waiting = [asyncio.create_task(w.generate(spec)) for spec in admitted]
        queues = w.dispatcher._reserver._wait_queues
        async with asyncio.timeout(TIMEOUT_S):
            while sum(queue.num_waiting for queue in queues.values()) < MAX_ASKING:
                await w.workers.wait_for_change()
            assert tokens(await w.generate(sequence("text"))) == scripted(5)
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
