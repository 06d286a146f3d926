"""Sampling on the device equals sampling on the host: the same tokens and logprobs from the same logits."""

from __future__ import annotations

import pytest
import torch

from baton.domain.request import SamplingParams
from baton.engine.batch import SampleSpec
from baton.model.sampling.sampler import sample_tokens
from tests.gpu.marks import needs_gpu

pytestmark = needs_gpu

VOCAB_SIZE = 20_000


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=0.7, top_k=50, seed=8),
        SamplingParams(temperature=1.3, top_p=0.9, min_p=0.01, seed=9, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.5, seed=10),
        SamplingParams(temperature=0.8, frequency_penalty=0.3, logit_bias=((5, 4.0), (6, -100.0)), seed=11),
    ],
)
def test_tokens_are_those_of_the_host(sampling: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, VOCAB_SIZE, generator=generator) * 3
    rows = [SampleSpec(sampling, [1, 2, 3, 2, *range(row)], 2, frozenset({row})) for row in range(64)]
    here, there = sample_tokens(logits, rows).read(), sample_tokens(logits.cuda(), rows).read()
    assert [one.token for one in there] == [one.token for one in here]
    for ours, theirs in zip(here, there, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert theirs.logprobs.logprob == pytest.approx(ours.logprobs.logprob, abs=1e-4)
            assert [token for token, _ in theirs.logprobs.top] == [token for token, _ in ours.logprobs.top]
