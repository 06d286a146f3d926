"""A prompt that its session hands over by calls: no task reads it, and it ends as one that a task reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from baton.domain.errors import WorkerLost
from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.rpc.gen import decode_pb2, prefill_pb2
from baton.services.router.dispatch.prefill.prefill_run import PrefillRun, PrefillSpec
from baton.services.router.dispatch.sessions.session_stream import PROMPT, SessionStream
from baton.services.router.dispatch.worker_errors import AttemptFailure
from tests.unit.router.dispatch.test_attempt import ACCEPTED, PAIR, ScriptedWorkers, prefill_failed, sealed


class PromptSessions:
    """A session with prefill that a test fills by its stream."""

    def __init__(self) -> None:
        self.num_aborts = 0
        self.stream = SessionStream(self._on_cancel, PROMPT)

    def _on_cancel(self) -> None:
        self.num_aborts += 1

    def takes_opens(self, worker: object) -> bool:
        return True

    def prefill(self, worker: object, request: object, metadata: object) -> SessionStream:
        return self.stream


class Rig:
    def __init__(self) -> None:
        self.workers = ScriptedWorkers()
        self.sessions = self.workers.worker_sessions = PromptSessions()
        self.stream = self.sessions.stream
        request = EngineRequest(AttemptId(RequestId("r"), 1), (1, 2, 3), 3, SamplingParams(), StopParams(4))
        spec = PrefillSpec(PAIR, request, (), asyncio.get_running_loop().time() + 60, ())
        self.run = PrefillRun(cast(Any, self.workers), cast(Any, None), spec)


@asynccontextmanager
async def prompt() -> AsyncIterator[Rig]:
    tasks = asyncio.all_tasks()
    rig = Rig()
    try:
        yield rig
    finally:
        rig.run.close()
        assert asyncio.all_tasks() <= tasks
        await rig.run.wait_closed()


def lose(rig: Rig) -> None:
    rig.stream.end(WorkerLost("gone"))


async def test_a_seal_comes_in_the_pass_of_its_frame():
    async with prompt() as rig:
        accepted = []
        rig.run.when_accepted(lambda age_s, encode_s: accepted.append((age_s, encode_s)))
        rig.stream.put(ACCEPTED)
        rig.stream.put(sealed())
        rig.stream.end()
        assert (accepted, rig.run.accepted) == ([(0.0, 0.0)], True)
        assert rig.run.sealed.result() == sealed().sealed
    assert rig.sessions.num_aborts == 0


async def test_what_came_before_the_listener_is_taken():
    stream = SessionStream(lambda: None, PROMPT)
    for event in (ACCEPTED, sealed()):
        stream.put(event)
    workers = ScriptedWorkers()
    workers.worker_sessions = sessions = PromptSessions()
    sessions.stream = stream
    request = EngineRequest(AttemptId(RequestId("r"), 1), (1, 2, 3), 3, SamplingParams(), StopParams(4))
    spec = PrefillSpec(PAIR, request, (), asyncio.get_running_loop().time() + 60, ())
    run = PrefillRun(cast(Any, workers), cast(Any, None), spec)
    assert (run.accepted, run.sealed.result()) == (True, sealed().sealed)
    run.close()


@pytest.mark.parametrize(
    ("give", "why", "suspected"),
    [
        pytest.param(lambda rig: rig.stream.put(prefill_failed("link_broken")), "said so", [], id="failure"),
        pytest.param(lambda rig: rig.stream.end(), "prefill ended its stream early", [], id="end"),
        pytest.param(lose, "gone", ["prefill"], id="session lost"),
        pytest.param(lambda rig: rig.stream.put(decode_pb2.ReserveReply()), "ReserveReply", [], id="another kind"),
        pytest.param(lambda rig: rig.stream.put(prefill_pb2.PrefillEvent()), "an empty event", [], id="empty"),
    ],
)
async def test_what_ends_a_prompt_is_raised_by_its_seal(give: Callable[[Rig], None], why: str, suspected: list[str]):
    async with prompt() as rig:
        give(rig)
        with pytest.raises(AttemptFailure, match=why):
            await rig.run.sealed
        assert rig.workers.suspected == suspected
        assert isinstance(rig.run.failure, AttemptFailure)


async def test_after_the_seal_a_lost_session_only_suspects_the_worker():
    async with prompt() as rig:
        rig.stream.put(sealed())
        lose(rig)
        assert rig.run.sealed.result() == sealed().sealed
        assert rig.workers.suspected == ["prefill"]


async def test_an_error_of_a_listener_is_the_attempts_and_not_the_sessions():
    def fail(age_s: float, encode_s: float) -> None:
        raise ValueError("a bug")

    async with prompt() as rig:
        rig.run.when_accepted(fail)
        rig.stream.put(ACCEPTED)
        rig.stream.put(sealed())
        with pytest.raises(ValueError, match="a bug"):
            await rig.run.sealed


async def test_a_prompt_that_is_closed_is_aborted_once_and_hears_nothing():
    async with prompt() as rig:
        rig.run.close()
        rig.run.close()
        rig.stream.put(ACCEPTED)
        assert (rig.sessions.num_aborts, rig.run.accepted, rig.run.sealed.cancelled()) == (1, False, True)


async def test_a_wait_for_the_seal_that_is_cancelled_can_be_closed():
    async with prompt() as rig:
        waiting = asyncio.ensure_future(_seal(rig.run))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        rig.stream.put(sealed())
        assert rig.run.failure is None


async def _seal(run: PrefillRun) -> prefill_pb2.Sealed:
    return await run.sealed
