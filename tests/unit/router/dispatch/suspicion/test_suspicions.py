"""A worker whose call failed is suspected, until it answers others well; see `suspicions`."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from baton.domain.errors import WorkerLost
from baton.domain.request import FinishReason
from baton.services.router.dispatch.suspicions import Suspicions
from tests.unit.router.dispatch.test_attempt import IMPORTED, PAIR, running, sealed, tokens
from tests.unit.router.dispatch.test_placement import QUERY
from tests.unit.router.dispatch.test_workers import D0, P0, watched


async def test_a_good_answer_ends_a_suspicion_once_a_ttl():
    """One lost message breaks a call. A worker that fails again though its older rows go on stays suspected."""
    async with watched() as w:
        await w.look(P0, D0, at=0.0)

        def is_chosen(now: float) -> bool:
            w.now = now
            return w.workers.choose(QUERY) is not None

        w.workers.suspect(D0, WorkerLost("a lost message"))
        w.workers.on_answer(P0)
        assert not is_chosen(0.1)
        waiting = asyncio.create_task(w.workers.wait_for_change())
        await asyncio.sleep(0)
        w.workers.on_answer(D0)
        await asyncio.wait_for(waiting, 5.0)
        assert is_chosen(0.1)
        assert not w.workers.suspicions.any
        w.workers.suspect(D0, WorkerLost("again"))
        w.workers.on_answer(D0)
        assert not is_chosen(0.2)
        await w.look(P0, D0, at=2.0)
        w.workers.suspect(D0, WorkerLost("later"))
        w.now = 2.1
        w.workers.on_answer(D0)
        assert is_chosen(2.1)


async def test_answers_of_a_worker_that_refuses_requests_end_no_suspicion():
    async with watched() as w:
        await w.look(P0, D0, at=0.0)
        w.workers.suspect(D0, WorkerLost("draining"), refuses=True)
        w.workers.on_answer(D0)
        assert w.workers.choose(QUERY) is None
        await w.look(P0, D0, at=2.0)
        w.workers.on_answer(D0)
        assert w.workers.choose(QUERY) is not None
        assert not w.workers.suspicions.any, "each token would look it up"


async def test_seals_and_tokens_end_suspicions():
    async with running() as r:
        r.workers.prefill.send(sealed(), None)
        r.workers.decode.send(IMPORTED, tokens(1), tokens(2), tokens(3, finish=FinishReason.STOP))
        answered: list[str] = []
        workers = cast(Any, r.workers)
        workers.suspicions, workers.on_answer = Suspicions(1.0), lambda record: answered.append(record.role.value)
        workers.suspicions.add(PAIR.prefill.incarnation, 0.0)
        await r.chunks(2)
        assert answered == ["prefill", "decode"]
        workers.suspicions.forget(PAIR.prefill.incarnation)
        await r.chunks(2)
        assert answered == ["prefill", "decode"], "looked up for nothing"
