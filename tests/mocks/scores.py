"""The scores that scripted workers compute for prompts."""

from __future__ import annotations

from baton.domain.request import EngineRequest
from baton.domain.scores.prompt_scores import PromptScores
from baton.engine.fake_runner import fake_scores, fake_slots
from baton.rpc.codec import encode_scores
from baton.rpc.gen import common_pb2

VOCAB_SIZE = 2000


def scores_of(request: EngineRequest) -> PromptScores | None:
    """The scores that every worker computes for a prompt; None if they are not asked for."""
    if request.prompt_logprobs is None:
        return None
    slots = fake_slots(request.tokens[: request.num_prompt_tokens])[1:]
    return fake_scores(slots, 1, request.prompt_logprobs, VOCAB_SIZE)


def score_messages(request: EngineRequest) -> list[common_pb2.PromptScores]:
    """The messages of these scores, two prompt tokens each."""
    scores = scores_of(request)
    parts = scores.split(4 * (scores.k + 1)) if scores else []
    return [message for part in parts for message in encode_scores(part)]
