"""Decode's tokens in sessions: breaks are pauses, lost sessions are lost attempts, and no stream holds up another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.domain.worker import CAPABILITIES, SESSION_PROMPTS
from baton.rpc.gen import session_pb2
from baton.rpc.version import PROTOCOL_VERSION
from baton.services.router.dispatch.sessions import worker_session
from baton.services.router.generation import TokenChunk
from baton.session import dialler
from baton.session.prompts import split_prompt
from baton.session.session import SessionLimits
from tests.mock_workers import Hold, MockWorker, Phase, ScriptedAction
from tests.mocks import sessions as mock_sessions
from tests.mocks.resetting_proxy import ProxyPair, ResettingProxy
from tests.service.dispatch import dispatch_world
from tests.service.dispatch.dispatch_world import (
    PROMPT,
    World,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)

pytestmark = pytest.mark.timeout(60)

LONG = 40


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_world, "uses_sessions", True)


def hold_at(*indices: int) -> tuple[ScriptedAction, ...]:
    return tuple(ScriptedAction(Phase.DECODE, Hold(), index=index) for index in indices)


@asynccontextmanager
async def proxied(w: World, worker: MockWorker, wire: str) -> AsyncIterator[ProxyPair]:
    """Registers `worker` anew, under the addresses of proxies. Its sessions go by `wire`: socket or grpc."""
    proxy = ProxyPair(ResettingProxy(lambda: worker.port), ResettingProxy(lambda: worker.in_sessions.port.port))
    worker.proxy_port = await proxy.calls.start()
    session_port = await proxy.sessions.start()
    worker.in_sessions.proxy_port = session_port if wire == "socket" else None
    worker.change_incarnation()
    await w.cluster.announce()
    await two_refreshes(w)
    try:
        yield proxy
    finally:
        await proxy.stop()


async def reset(proxy: ProxyPair) -> None:
    """Resets all connections; returns when there is a new one."""
    before = proxy.num_connections
    proxy.reset()
    await eventually(lambda: proxy.num_connections > before)


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 20 s")


async def test_a_reset_is_a_pause_and_no_attempt(wire: str):
    async with world(decode=[hold_at(3)]) as w, proxied(w, w.decode, wire) as proxy:
        run = asyncio.create_task(w.generate(sequence(max_tokens=LONG)))
        await w.decode.reached(Phase.DECODE, times=3)
        for _ in range(3):
            await reset(proxy)
        w.decode.release()
        assert tokens(await run) == scripted(LONG)
        assert [request.id.attempt for request in w.decode.requests] == [1]
        assert "retry" not in w.timings.entries
        assert (proxy.sessions.num_connections > 1) == (wire == "socket")


async def test_rows_are_handed_to_the_request_that_waits_for_them():
    """Without a switch to its task. A chunk that it leaves is yielded, and what follows comes behind it."""
    async with world(decode=[hold_at(3, 6)]) as w:
        taken, seen = list[TokenChunk](), list[TokenChunk]()

        def take(chunk: TokenChunk) -> bool:
            if chunk.tokens[0].index == LONG // 2:
                return False
            taken.append(chunk)
            seen.append(chunk)
            return True

        async def run() -> None:
            async for chunk in w.dispatcher.run(w.admit(sequence(max_tokens=LONG)), take):
                seen.append(chunk)

        running = asyncio.create_task(run())
        for num_seen in (3, 6):
            await eventually(lambda n=num_seen: len(seen) == n)  # type: ignore[misc]
            await w.decode.reached(Phase.DECODE, times=num_seen)
            w.decode.release()
            w.decode._released.clear()  # the next hold holds
        await running
        assert tokens(seen) == scripted(LONG)
        assert LONG // 2 not in dict(tokens(taken))
        assert len(taken) > LONG // 4
        assert w.dispatcher.num_tokens == LONG


async def test_what_was_emitted_during_a_break_is_sent_again(wire: str):
    async with world(decode=[hold_at(3)]) as w, proxied(w, w.decode, wire) as proxy:
        chunks = w.dispatcher.run(w.admit(sequence(max_tokens=LONG)))
        seen = [await anext(chunks) for _ in range(3)]
        proxy.refuses = True
        proxy.reset()
        w.decode.release()
        await w.decode.reached(Phase.DECODE, times=LONG - 1)
        proxy.refuses = False
        seen += [chunk async for chunk in chunks]
        assert tokens(seen) == scripted(LONG)
        assert len(w.decode.requests) == 1


async def test_a_worker_behind_a_dead_network_is_replaced(wire: str):
    async with world(decode=[hold_at(3), ()]) as w:
        first, second = w.cluster.decodes
        await w.cluster.change_load(second, running_rows=4)  # second choice
        async with proxied(w, first, wire) as proxy:
            run = asyncio.create_task(w.generate(sequence(max_tokens=LONG)))
            await first.reached(Phase.DECODE, times=3)
            proxy.refuses = True
            proxy.reset()
            assert tokens(await run) == scripted(LONG)
            assert [request.id.attempt for request in second.requests] == [2]


async def test_an_attempt_of_a_router_that_is_gone_is_aborted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mock_sessions, "LIMITS", SessionLimits(resume_s=0.3))
    async with world(decode=[hold_at(3)]) as w:
        run = asyncio.create_task(w.generate(sequence(max_tokens=LONG)))
        await w.decode.reached(Phase.DECODE, times=3)
        assert w.decode.sessions is not None
        assert w.decode.num_generating == 1
        sessions = w.workers.worker_sessions
        assert sessions is not None
        await sessions.close()
        await eventually(lambda: w.decode.num_generating == 0)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def test_a_hang_up_ends_the_stream_at_the_worker_and_nothing_else():
    async with world(decode=[hold_at(3)]) as w:
        chunks = w.dispatcher.run(w.admit(sequence("left", max_tokens=LONG)))
        for _ in range(3):
            await anext(chunks)
        await w.decode.reached(Phase.DECODE, times=3)
        await chunks.aclose()
        await eventually(lambda: w.decode.num_generating == 0)
        assert await w.decode.aborted(AttemptId(RequestId("left"), 1)) == "cancelled"
        assert tokens(await w.generate(sequence("next"))) == scripted(5)
        assert w.decode.sessions is not None
        assert w.decode.sessions.num_sessions == 1


async def test_a_reader_that_stops_holds_up_no_other():
    """Its tokens are kept where they were read; the session goes on."""
    async with world() as w:
        slow = w.dispatcher.run(w.admit(sequence("slow", max_tokens=180)))
        await anext(slow)  # and never again, for now
        for number in range(5):
            assert tokens(await w.generate(sequence(f"r{number}", max_tokens=LONG))) == scripted(LONG)
        await slow.aclose()


async def test_a_worker_without_sessions_keeps_its_calls():
    async with world(decode=[(), ()]) as w:
        old, new = w.cluster.decodes
        old.capabilities = CAPABILITIES
        for used, other in ((old, new), (new, old)):
            await w.cluster.change_load(used, running_rows=0)
            await w.cluster.change_load(other, running_rows=4)  # second choice
            await two_refreshes(w)
            assert tokens(await w.generate(sequence(used.id))) == scripted(5)
        assert [len(old.requests), old.num_in_sessions] == [1, 0]
        assert [len(new.requests), new.num_in_sessions] == [1, 1]


async def test_a_worker_of_another_version_keeps_its_calls(monkeypatch: pytest.MonkeyPatch):
    """Its listener refuses the session and names both versions; attempts then come as calls, and none is lost."""
    monkeypatch.setattr(dialler, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    async with world() as w:
        sessions = w.workers.worker_sessions
        assert sessions is not None
        await eventually(lambda: not sessions.serves(w.decode.record()))
        for number in range(2):
            assert tokens(await w.generate(sequence(f"r{number}"))) == scripted(5)
        assert [request.id.attempt for request in w.decode.requests] == [1, 1]
        assert w.decode.num_in_sessions == 0


@pytest.mark.parametrize("in_opens", [False, True])
async def test_a_prompt_is_in_the_open_of_a_worker_that_takes_it(monkeypatch: pytest.MonkeyPatch, in_opens: bool):
    """A worker of the version before gets it in parts, behind the open."""
    in_parts = list[int]()

    def note(prompt: Sequence[int]) -> list[session_pb2.PromptPart]:
        in_parts.append(len(prompt))
        return split_prompt(prompt)

    monkeypatch.setattr(worker_session, "split_prompt", note)
    async with world() as w:
        for worker in w.cluster.workers:
            if not in_opens:
                worker.capabilities = tuple(one for one in worker.capabilities if one != SESSION_PROMPTS)
            worker.change_incarnation()
        await w.cluster.announce()
        await two_refreshes(w)
        assert tokens(await w.generate(sequence())) == scripted(5)
        assert (w.decode.requests[0].tokens, w.decode.num_in_sessions) == (PROMPT, 1)
    assert in_parts == ([] if in_opens else [len(PROMPT)] * 2)


@pytest.mark.parametrize("num_tokens", [1, 1024, 1025, 12 * 1024, 12 * 1024 + 1])
async def test_a_prompt_arrives_whole(num_tokens: int):
    async with world() as w:
        w.decode.max_model_len = w.prefill.max_model_len = 1 << 16
        for worker in w.cluster.workers:
            await w.cluster.change_load(worker, available_pages=1 << 16, total_pages=1 << 16)
        await two_refreshes(w)
        prompt = tuple(number % 1999 for number in range(num_tokens))
        assert tokens(await w.generate(sequence(prompt=prompt))) == scripted(5)
        assert w.decode.requests[0].tokens == prompt
