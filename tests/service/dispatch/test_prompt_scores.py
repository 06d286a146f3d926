"""Scores of a prompt through the dispatcher: whole, once, from a worker that can, whatever fails on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.errors import LinkBroken, WorkerLost
from baton.domain.request import SamplingParams
from baton.domain.worker import PROMPT_SCORES, TOKEN_BANS, WorkerBudgets
from tests.mock_workers import Crash, Fail, Phase, ScriptedAction
from tests.service.dispatch.dispatch_world import (
    LIMITS,
    expected_scores,
    scores,
    scripted,
    sequence,
    tokens,
    two_refreshes,
    world,
)

pytestmark = pytest.mark.usefixtures("both_streams")

ASKED = sequence(prompt_logprobs=2)


async def test_scores_come_with_the_first_token():
    async with world() as w:
        answer = await w.generate(ASKED)
    assert tokens(answer) == scripted(5)
    assert answer[0].prompt_scores == expected_scores(ASKED)
    assert scores(answer[1:]) == [None]


async def test_a_prompt_of_one_token_has_no_scores_but_is_scored():
    async with world() as w:
        [found] = scores(await w.generate(replace(ASKED, prompt_tokens=(7,))))
    assert found is not None
    assert len(found) == 0


@pytest.mark.parametrize("action", [Crash(), Fail("worker_lost")])
async def test_scores_that_are_cut_off_are_computed_again(action):
    """The second attempt asks for all of them: parts of two attempts are never joined."""
    script = [ScriptedAction(Phase.SCORE, action, times=1)]
    script.insert(0, ScriptedAction(Phase.SCORE, Fail("worker_lost"), times=0))
    async with world(prefill=(script, ())) as w:
        answer = await w.generate(ASKED)
        asked = [request.prompt_logprobs for worker in w.cluster.prefills for request in worker.requests]
    assert tokens(answer) == scripted(5)
    assert scores(answer) == [expected_scores(ASKED)]
    assert asked[0] == 2
    assert set(asked) == {2}


async def test_after_the_seal_no_attempt_asks_again():
    async with world(decode=([ScriptedAction(Phase.DECODE, Crash(), index=3)], ())) as w:
        answer = await w.generate(ASKED)
        asked = [request.prompt_logprobs for worker in w.cluster.prefills for request in worker.requests]
    assert tokens(answer) == scripted(5)
    assert scores(answer) == [expected_scores(ASKED)]
    assert sorted(asked, key=str) == [2] if len(asked) == 1 else sorted(asked, key=str) == [2, None]


@pytest.mark.parametrize("lost", [{0}, {2}, {4}, {0, 1, 2, 3, 4}])
async def test_an_answer_without_all_scores_is_an_error(lost: set[int]):
    async with world() as w:
        w.prefill.lost_scores = frozenset(lost)
        with pytest.raises(LinkBroken):
            await w.generate(ASKED)


async def test_only_workers_that_can_are_asked():
    async with world(prefill=((), ())) as w:
        old, new = w.cluster.prefills
        old.capabilities = ()
        await w.cluster.announce()
        await two_refreshes(w)
        for number in range(4):
            answer = await w.generate(replace(ASKED, id=sequence(f"r{number}").id))
            assert scores(answer) == [expected_scores(ASKED)]
        assert not old.requests
        assert len(new.requests) == 4
        new.capabilities = (TOKEN_BANS,)
        await w.cluster.announce()
        await two_refreshes(w)
        with pytest.raises(WorkerLost):
            await w.generate(ASKED)
        assert tokens(await w.generate(sequence("plain"))) == scripted(5)


async def test_only_workers_that_can_list_named_tokens_are_asked():
    """An older one would list the best tokens instead."""
    named = replace(sequence("named"), sampling=SamplingParams(logprobs=0, logprob_token_ids=(5,)))
    async with world() as w:
        assert tokens(await w.generate(named)) == scripted(5)
        w.decode.capabilities = (PROMPT_SCORES, TOKEN_BANS)
        await w.cluster.announce()
        await two_refreshes(w)
        with pytest.raises(WorkerLost):
            await w.generate(replace(named, id=sequence("again").id))


async def test_a_decode_worker_that_prefills_for_itself_matches_nothing():
    async with world(prefill=(), limits=LIMITS, linked=False) as w:
        w.decode.budgets = WorkerBudgets(prefill_tokens=64, rows=8)
        await w.cluster.announce()
        await two_refreshes(w)
        answer = await w.generate(ASKED)
        plain = await w.generate(sequence("plain"))
        keys = [len(reservation.page_keys) for reservation in w.decode.reservations]
    assert tokens(answer) == tokens(plain) == scripted(5)
    assert scores(answer) == [expected_scores(ASKED)]
    assert keys == [0, 2]
