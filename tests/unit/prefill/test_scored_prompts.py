"""A scored prompt is computed from its first token, and its scores are those of all its tokens, once each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.request import EngineRequest, StopParams
from baton.domain.scores.prompt_scores import PromptScores, join_scores
from baton.engine.fake_runner import fake_scores, fake_slots
from baton.engine.handoff.export_events import Seal
from baton.engine.messages import Scored
from tests.tiny_workers import PAGE_SIZE, REPEATABLE_SETTINGS, VOCAB_SIZE, TinyPrefill, engine_request, tiny_prefill

PROMPT = [0, 1, 1, 0, 1, 0, 0]


def expected(prompt: list[int], k: int) -> PromptScores:
    return fake_scores(fake_slots(prompt)[1:], 1, k, VOCAB_SIZE)


def computed(worker: TinyPrefill, *requests: EngineRequest) -> dict[str, tuple[list[PromptScores], Seal]]:
    """Scores and seals of prompts that run together, by the names of their requests."""
    for request in requests:
        worker.scheduler.add(request, 0, deadline=9.0)
    parts: dict[str, list[PromptScores]] = {request.id.request_id: [] for request in requests}
    seals: dict[str, Seal] = {}
    for step in range(40):
        batch = worker.scheduler.schedule(float(step) / 100)
        if batch is None:
            break
        for effect in worker.scheduler.commit(batch, worker.runner.run(batch), 0.0):
            if isinstance(effect, Scored):
                assert effect.id.request_id not in seals, "scores come before the seal"
                parts[effect.id.request_id].append(effect.scores)
            if isinstance(effect, Seal):
                seals[effect.id.request_id] = effect
                worker.exports.commit(effect.id)
    return {name: (parts[name], seals[name]) for name in parts}


def scored(name: str, prompt: list[int], k: int | None, emitted: list[int] | None = None) -> EngineRequest:
    made = engine_request(name, prompt, emitted=emitted, stop=StopParams(9))
    return replace(made, prompt_logprobs=k)


@REPEATABLE_SETTINGS
@given(
    st.lists(st.integers(0, 1), min_size=2, max_size=9),
    st.integers(0, 2),
    st.lists(st.integers(0, 1), max_size=3),
    st.sampled_from([PAGE_SIZE, 3 * PAGE_SIZE, 40]),
)
def test_scores_of_all_chunks_are_those_of_the_prompt(prompt: list[int], k: int, emitted: list[int], budget: int):
    """Of a replay, too: tokens of earlier attempts are no prompt tokens."""
    worker = tiny_prefill(9.0, token_budget=budget)
    [(parts, _)] = computed(worker, scored("r", prompt, k, emitted)).values()
    assert join_scores(parts) == expected(prompt, k)


def test_cached_pages_are_not_matched_and_still_entered():
    worker = tiny_prefill(9.0)
    for name in ("a", "b"):
        [(parts, seal)] = computed(worker, scored(name, PROMPT, 1)).values()
        assert join_scores(parts) == expected(PROMPT, 1)
        assert seal.times.cached_tokens == 0
    [(parts, seal)] = computed(worker, scored("plain", PROMPT, None)).values()
    assert parts == []
    assert seal.times.cached_tokens == 3 * PAGE_SIZE


def test_a_batch_scores_only_who_asked():
    worker = tiny_prefill(9.0, token_budget=40, max_partial_prompts=4, max_pinned_pages=8)
    found = computed(worker, scored("a", [0, 1, 1], 2), scored("b", [1, 1], None), scored("c", [1, 0, 0, 1], 0))
    assert [join_scores(parts) if parts else None for parts, _ in found.values()] == [
        expected([0, 1, 1], 2),
        None,
        expected([1, 0, 0, 1], 0),
    ]


@pytest.mark.parametrize("k", [0, 2])
def test_a_prompt_of_one_token_has_nothing_to_score(k: int):
    [(parts, _)] = computed(tiny_prefill(9.0), scored("r", [1], k)).values()
    assert parts == []
