"""Tokens and log probabilities with an adversarial drafter are those without one, bit for bit where rows keep bits.

Both engines in one process, on real models: mixed lengths of rows in a step, windows, penalties, bans, stops, seeds.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.domain.ids import AttemptId
from baton.domain.request import OutputToken, SamplingParams, StopParams
from baton.engine.drafts.base import Drafter
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS, DraftPolicy
from baton.model.drafts.tree_support import tree_refusal
from baton.model.loading.bit_check import check_bits
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.loading.self_check import VerificationBits
from baton.services.local.pair import LocalPair, PairLimits
from tests.kernels import kernel_levels
from tests.property.drafts.drafters import AdversarialDrafter, OracleDrafter, TreeDrafter
from tests.tiny_models import VOCAB_SIZE, save_random_model

pytestmark = [pytest.mark.exactness, pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")]

PAGE_SIZE = 8
MAX_TOKENS = 30
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy with logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "seeded": SamplingParams(temperature=0.9, seed=4, top_p=0.95, logprobs=0),
    "penalties": SamplingParams(
        temperature=0.7, seed=5, presence_penalty=0.4, frequency_penalty=0.6, repetition_penalty=1.2, logprobs=2
    ),
    "bias": SamplingParams(temperature=0.5, seed=6, top_k=40, min_p=0.01, logit_bias=((7, 3.0), (11, -100.0))),
}
"""Of the rows of one batch."""


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(7)
    lengths = (1, PAGE_SIZE - 1, PAGE_SIZE, 3 * PAGE_SIZE + 5, 41)
    return [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(length)) for length in lengths]


def generate(model: LoadedModel, stops: list[StopParams], expected: list[list[OutputToken]] | None, drafter: str):
    """The output of each prompt, in one batch; and the drafts that were verified and accepted."""
    pair = LocalPair(model, PairLimits(num_pages=96, max_rows=6, token_budget=2 * PAGE_SIZE))
    right: dict[AttemptId, list[int]] = {}
    policy = None
    if expected is not None:
        policy = _plant(pair, _make(drafter, right))
    outputs: dict[AttemptId, list[OutputToken]] = {}
    for index, (prompt, sampling) in enumerate(zip(prompts(), SAMPLINGS.values(), strict=True)):
        id = pair.submit(prompt, sampling, stops[index])
        assert id is not None
        outputs[id] = []
        if expected is not None:
            behind = [3] * (MAX_TOKENS + MAX_DRAFT_TOKENS)  # a drafter does not know where an output ends
            right[id] = [*prompt, *(token.token for token in expected[index]), *behind]
    finished = 0
    while finished < len(outputs):
        for part in pair.run():
            outputs[part.id] += part.tokens
            finished += part.finish is not None
    return list(outputs.values()), None if policy is None else policy.totals


def _make(name: str, right: dict[AttemptId, list[int]]) -> Drafter:
    if name == "adversary":
        return AdversarialDrafter(right.__getitem__, VOCAB_SIZE)
    if name == "trees":
        return TreeDrafter(right.__getitem__, VOCAB_SIZE)
    return OracleDrafter(right.__getitem__, float(name), VOCAB_SIZE)


def _plant(pair: LocalPair, drafter: Drafter) -> DraftPolicy:
    scheduler = pair.decode._scheduler
    pool = scheduler._imports._cache.pool
    scheduler._drafts = policy = DraftPolicy(drafter, MAX_DRAFT_TOKENS, PAGE_SIZE, pool)
    return policy


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", "float32"), ("qwen3", "bfloat16"), ("gemma2", "bfloat16")],
)
def test_output_does_not_depend_on_the_drafter(tmp_path: Path, family: str, dtype: str):
    directory = save_random_model(family, tmp_path)
    model = load_model(directory, dtype=DtypeChoice(dtype), page_size=PAGE_SIZE)
    assert check_bits(model) is VerificationBits.EXACT
    stops = [StopParams(MAX_TOKENS)] * len(SAMPLINGS)
    plain, _ = generate(model, stops, None, "")
    stops[1] = StopParams(MAX_TOKENS, 0, frozenset({plain[1][12].token}))  # a stop id that comes up
    bans = frozenset({plain[3][2].token, plain[3][8].token, plain[4][7].token})
    stops[3], stops[4] = StopParams(MAX_TOKENS, 5, bans), StopParams(MAX_TOKENS, 11, bans)
    plain, _ = generate(model, stops, None, "")
    assert len(plain[1]) <= 13
    for drafter in ("1.0", "0.6", "adversary", *(["trees"] if not tree_refusal(model) else [])):
        drafted, totals = generate(model, stops, plain, drafter)
        assert drafted == plain, f"{drafter}: tokens, indices or log probabilities differ"
        assert totals.num_drafts > totals.num_accepted > 0
        assert max(place for place, count in enumerate(totals.accepted_at) if count) >= 3
        assert (totals.num_off_chain > 10) == (drafter == "trees")
    assert (tree_refusal(model) == "layers with a sliding window") == (family == "gemma2")
