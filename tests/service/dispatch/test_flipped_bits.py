"""Bits flipped in the messages between router and workers: every answer is right, none fails."""

from __future__ import annotations

import random

import pytest

from tests.service.dispatch import dispatch_world
from tests.service.dispatch.dispatch_world import (
    World,
    expected_scores,
    scores,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)
from tests.service.dispatch.frame_flipper import (
    DATA,
    HEADERS,
    SESSION,
    FlippingProxy,
    FlipPlan,
    session_frames,
)

NUM_TOKENS = 5
NUM_SEEDS = 60
NUM_HEADER_SEEDS = 25
NUM_SESSION_SEEDS = 25
TWO = ((), ())


async def put_proxies(w: World, plan: FlipPlan) -> list[FlippingProxy]:
    """Registers every worker under the address of a proxy: of its port of sessions, or of its server alone."""
    proxies = []
    for worker in w.cluster.workers:
        if plan.kind == SESSION:
            proxy = FlippingProxy(lambda worker=worker: worker.in_sessions.port.port, plan, session_frames)  # type: ignore[misc]
            worker.in_sessions.proxy_port = await proxy.start()
        else:
            proxy = FlippingProxy(lambda worker=worker: worker.port, plan)  # type: ignore[misc]
            worker.proxy_port = await proxy.start()
        worker.change_incarnation()  # so that it is dialled there
        proxies.append(proxy)
    await w.cluster.announce()
    await two_refreshes(w)
    return proxies


async def answer_with_one_flip(seed: int, kind: int = DATA) -> bool:
    """Generates behind proxies of which one flips a bit; True if it did. The answer has to be right."""
    rng = random.Random(seed)
    plan = FlipPlan(rng, skip=rng.randrange(14), kind=kind)
    async with world(prefill=TWO, decode=TWO) as w:
        proxies = await put_proxies(w, plan)
        try:
            asked = sequence(max_tokens=NUM_TOKENS, prompt_logprobs=seed % 3 or None)
            answer = await w.generate(asked)
            assert tokens(answer) == scripted(NUM_TOKENS), f"seed {seed}"
            assert scores(answer) == [expected_scores(asked)], f"seed {seed}"
        finally:
            for proxy in proxies:
                await proxy.stop()
    return plan.flipped


@pytest.mark.timeout(120)
async def test_a_flipped_bit_in_any_message_changes_no_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch_world, "uses_sessions", False)
    flipped = [await answer_with_one_flip(seed) for seed in range(NUM_SEEDS)]
    assert sum(flipped) > NUM_SEEDS // 2


@pytest.mark.timeout(120)
async def test_a_flipped_bit_in_a_session_changes_no_answer(wire: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch_world, "uses_sessions", True)
    kind = SESSION if wire == "socket" else DATA
    flipped = [await answer_with_one_flip(seed, kind) for seed in range(NUM_SESSION_SEEDS)]
    assert sum(flipped) > NUM_SESSION_SEEDS // 2


async def answers_after_one_flip(seed: int) -> bool:
    """Generates three times behind proxies of which one flips a bit of a header; True if it did.

    Every answer has to be right: the damage may last as long as its connection.
    """
    rng = random.Random(seed)
    plan = FlipPlan(rng, skip=rng.randrange(12), kind=HEADERS)
    async with world() as w:
        w.workers.suspect = lambda *_: None  # type: ignore[method-assign]  # its only workers are tried again at once
        proxies = await put_proxies(w, plan)
        try:
            for number in range(3):
                answer = await w.generate(sequence(f"r{number}", max_tokens=NUM_TOKENS))
                assert tokens(answer) == scripted(NUM_TOKENS), f"seed {seed}"
        finally:
            for proxy in proxies:
                await proxy.stop()
    return plan.flipped


@pytest.mark.timeout(240)
async def test_a_flipped_bit_in_any_header_harms_no_later_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch_world, "uses_sessions", False)
    flipped = [await answers_after_one_flip(seed) for seed in range(NUM_HEADER_SEEDS)]
    assert sum(flipped) > NUM_HEADER_SEEDS // 2
