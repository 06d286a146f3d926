"""Scores of prompts in streams that are resumed or taken over: each choice's first event has them, whoever sends it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.domain.ids import AttemptId, RequestId, first_attempt
from baton.store.store import CallStatus
from tests.mock_workers import Fail, Hold, Phase, ScriptedAction
from tests.service.takeover.router_cluster import (
    CHAT,
    COMPLETIONS,
    Event,
    by_choice,
    contents,
    opened,
    resumed,
    router_cluster,
    same,
    undisturbed,
)

pytestmark = pytest.mark.timeout(60)

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
SCORED: dict[str, Any] = {"max_tokens": 6, "echo": True, "logprobs": 1, "prompt_logprobs": 2}


def listed(events: list[Event]) -> list[Any]:
    """The `prompt_logprobs` of events of a completion that have them."""
    choices = [json.loads(event.data)["choices"][0] for event in events if event.data != "[DONE]"]
    return [choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice]


@pytest.mark.parametrize("num_seen", [1, 2, 5, 9])
async def test_each_choice_gets_its_scores_once(tmp_path, num_seen):
    """Some choices have their first event, others do not, when the client leaves."""
    body = {**SCORED, "prompt": PROMPTS, "n": 2, "seed": 5}
    script = [ScriptedAction(Phase.DECODE, Hold(), index=4, times=4)]
    async with router_cluster(tmp_path, decode=script) as w:
        async with opened(w.routers[0], **body) as stream:
            seen, id = await stream.take(num_seen), stream.call_id
        w.decode.release()
        async with resumed(w.routers[1], id, seen[-1].id) as stream:
            events = seen + await stream.rest()
        expected = await undisturbed(w.routers[0], **body)
    for choice in range(4):
        assert contents(by_choice(events, choice)) == contents(by_choice(expected, choice))
        [scores] = listed(by_choice(events, choice))
        assert len(scores) == len(PROMPTS[choice // 2])


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
async def test_a_client_that_left_before_its_first_event(tmp_path, endpoint):
    """Its router has given up the call; another one takes it over, without scores in its journal."""
    fields = SCORED if endpoint == COMPLETIONS else {"max_tokens": 6, "prompt_logprobs": 1}
    async with router_cluster(tmp_path) as w:
        [prefill] = w.cluster.prefills
        prefill.script.append(ScriptedAction(Phase.SEAL, Hold()))
        async with opened(w.routers[0], endpoint, **fields) as stream:
            id = stream.call_id
        await w.until(id, CallStatus.ABANDONED)
        prefill.release()
        async with resumed(w.routers[1], id) as stream:
            events = await stream.rest()
        assert same(events, await undisturbed(w.routers[0], endpoint, **fields))
        asked = [(r.id.request_id == id, r.prompt_logprobs) for r in prefill.requests if r.id.request_id.startswith(id)]
    k = max(fields.get("logprobs", 0), fields["prompt_logprobs"])
    assert asked[0] == (True, k)
    assert sorted(asked[1:]) == [(False, k), (True, None)], "the scores are a sequence of their own"


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_owner_that_is_overruled_before_the_scores(tmp_path, streamed):
    async with router_cluster(tmp_path, num_routers=1) as w:
        [prefill], seen = w.cluster.prefills, AttemptId(RequestId(""), first_attempt(3), 9)
        prefill.script.append(ScriptedAction(Phase.SCORE, Fail("superseded", seen)))
        if streamed:
            async with opened(w.routers[0], **SCORED) as stream:
                events = await stream.rest()
            assert same(events, await undisturbed(w.routers[0], **SCORED))
            return
        whole = {"model": "mock", "prompt": [1, 2, 3], **SCORED}
        answers = [(await w.routers[0].http.post("/v1/completions", json=whole)).json() for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert len(answers[0]["choices"][0]["prompt_logprobs"]) == 3


async def test_an_echo_alone_is_taken_over(tmp_path):
    body = {**SCORED, "max_tokens": 0}
    async with router_cluster(tmp_path) as w:
        expected = await undisturbed(w.routers[0], **body)
        [event, _] = expected
        assert json.loads(event.data)["choices"][0]["finish_reason"] == "length"
        async with resumed(w.routers[1], event.id.partition(":")[0]) as stream:
            assert same(await stream.rest(), expected)
