"""Chains of drafts: each is drawn with the key of its place, from a distribution as sharp as the drafter asks for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.engine.batch import Row, SampleSpec, WantedDrafts
from baton.engine.runner import _draft_row
from baton.model.attention.base import Segment
from baton.model.drafts.chains import DraftRow, make_chains
from baton.model.sampling.gumbel import draw_key, sample_by_gumbel
from baton.model.sampling.sampler import TorchSampler

VOCAB_SIZE, NUM_ROWS, COUNT = 40, 30, 3
TEMPERATURE = 0.8
TABLE = 2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
"""The drafter's logits after each token."""


def row(seed: int, temperature: float) -> DraftRow:
    prompt = [1, 2, seed]
    sampling = SamplingParams(temperature=temperature, seed=seed, logprobs=2)
    request = EngineRequest(AttemptId(RequestId(str(seed)), 1), tuple(prompt), 3, sampling, StopParams(20))
    wanted = WantedDrafts(request, COUNT)
    return _draft_row(Row(request.id, [seed], 2, [PageId(0)], SampleSpec.of(request, prompt)), wanted, VOCAB_SIZE)


def logits_after(active: Sequence[int], tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
    return TABLE[list(tokens)]


def expected(seed: int, sharpness: float) -> tuple[int, ...]:
    drafts = list[int]()
    for place in range(COUNT):
        weights = (TABLE[drafts[-1] if drafts else seed] / TEMPERATURE).softmax(-1).pow(sharpness)
        drafts.append(int(sample_by_gumbel(weights[None], [draw_key(seed, 3 + place)])))
    return tuple(drafts)


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_drafts_are_drawn_from_a_power_of_the_drafters_distribution(sharpness: float) -> None:
    made = make_chains([row(seed, TEMPERATURE) for seed in range(NUM_ROWS)], logits_after, TorchSampler(), sharpness)
    assert made == [expected(seed, sharpness) for seed in range(NUM_ROWS)]


def test_greedy_drafts_do_not_depend_on_the_sharpness() -> None:
    rows = [row(seed, 0.0) for seed in range(NUM_ROWS)]
    plain, sharp = (make_chains(rows, logits_after, TorchSampler(), sharpness) for sharpness in (1.0, 2.0))
    assert plain == sharp
    assert plain[7][0] == int(TABLE[7].argmax())
