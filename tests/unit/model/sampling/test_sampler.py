"""The sampler against a plain-Python reference, and its tokens against their distribution."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.constraint import Constraint, FreePhase
from baton.domain.errors import Broken
from baton.domain.request import SampledToken, SamplingParams
from baton.engine.batch import MaskSpec, SampleSpec
from baton.model.kernels.library import load_kernels
from baton.model.loading.identity import SAMPLER_VERSION
from baton.model.sampling.distribution import TOP_P_CANDIDATES, Filters, filter_weights
from baton.model.sampling.native import NativeSampler
from baton.model.sampling.sampler import SamplerBackend, TorchSampler, sample_tokens
from tests.kernels import kernel_levels
from tests.unit.model.sampling.keyed_noise import gumbel, key_of

VOCAB_SIZE = 12
MASK = MaskSpec(Constraint((FreePhase(),)))
EDGE = 1e-5
"""Distance to a filter's edge within which a token may fall on either side: weights are float32."""

SAMPLERS: list[SamplerBackend] = [
    TorchSampler(),
    *(NativeSampler(load_kernels(level)) for level in kernel_levels()[-1:]),
]


def sample(
    logits: torch.Tensor, rows: list[SampleSpec], sampler: SamplerBackend = SAMPLERS[0]
) -> tuple[SampledToken, ...]:
    return sample_tokens(logits, rows, sampler).read()


def spec(history: list[int] | None = None, num_prompt: int = 1, banned: frozenset[int] = frozenset(), **sampling):
    return SampleSpec(SamplingParams(**sampling), [0] if history is None else history, num_prompt, banned)


def edited(logits: list[float], row: SampleSpec) -> list[float]:
    params, prompt, output = row.sampling, row.history[: row.num_prompt_tokens], row.history[row.num_prompt_tokens :]
    counts, bias = Counter(output), dict(row.sampling.logit_bias)
    result = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        if counts[token]:
            logit -= params.presence_penalty + params.frequency_penalty * counts[token]
        result.append(-math.inf if token in row.banned else logit + bias.get(token, 0.0))
    return result


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def reference(logits: list[float], row: SampleSpec, slack: float) -> list[float]:
    """The distribution to sample from, unnormalised; a positive `slack` keeps tokens at an edge, a negative one not."""
    params = row.sampling
    probs = softmax([logit / params.temperature for logit in edited(logits, row)])
    if params.top_k:
        probs = [p if sum(q > p + slack for q in probs) < params.top_k else 0.0 for p in probs]
    total = sum(probs)
    if params.top_p < 1.0:
        probs = [p if sum(q for q in probs if q > p + slack) < params.top_p * total + slack else 0.0 for p in probs]
    floor = params.min_p * max(probs) - slack
    return [p if p >= floor else 0.0 for p in probs]


rows = st.builds(
    spec,
    history=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=12),
    num_prompt=st.integers(1, 2),
    banned=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, VOCAB_SIZE + 2),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2.0),
    seed=st.integers(0, 2**63),
    logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-5, 5), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
)
row_logits = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(row_logits, rows), min_size=1, max_size=4))
def test_samples_have_the_largest_reference_probability_and_noise(sampler, batch):
    chosen = sample(torch.tensor([logits for logits, _ in batch]), [row for _, row in batch], sampler)
    for (logits, row), result in zip(batch, chosen, strict=True):
        key, acceptable = key_of(row.sampling.seed, len(row.history)), set()
        for slack in (-EDGE, 0.0, EDGE):
            probs = reference(logits, row, slack)
            scores = {token: math.log(p) + gumbel(key, token) for token, p in enumerate(probs) if p}
            best = max(scores.values(), default=0.0)
            acceptable |= {token for token, score in scores.items() if score >= best - EDGE}
        assert result.token in acceptable


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
@settings(max_examples=100, deadline=None)
@given(row_logits, rows)
def test_greedy_takes_the_largest_edited_logit(sampler, logits, row):
    greedy = SampleSpec(SamplingParams(temperature=0.0), row.history, row.num_prompt_tokens, row.banned)
    (result,) = sample(torch.tensor([logits]), [greedy], sampler)
    values = edited(logits, greedy)
    assert values[result.token] >= max(values) - EDGE


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(row_logits, rows), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_row_gives_the_same_token_alone_and_in_any_batch(sampler, batch, rng):
    alone = [sample(torch.tensor([logits]), [row], sampler)[0] for logits, row in batch]
    order = list(range(len(batch)))
    rng.shuffle(order)
    together = sample(torch.tensor([batch[i][0] for i in order]), [batch[i][1] for i in order], sampler)
    assert list(together) == [alone[i] for i in order]


def test_many_positions_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5])
    num_draws = 4000
    specs = [spec(history=[0] * (n + 1), temperature=0.7, seed=5) for n in range(num_draws)]
    counts = Counter(result.token for result in sample(logits.expand(num_draws, -1), specs))
    expected = (logits.double() / 0.7).softmax(-1) * num_draws
    chi_squared = sum((counts[token] - n) ** 2 / n for token, n in enumerate(expected.tolist()))
    assert chi_squared < 20.5  # 0.999 quantile for 5 degrees of freedom; the seed is fixed, so this cannot flake


DEMANDING: dict[str, Any] = dict(
    temperature=0.8, top_k=7, top_p=0.9, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.2,
    repetition_penalty=1.2, logit_bias=((3, 2.0),), logprobs=2,
    logprob_token_ids=(5, 1),
)  # fmt: skip


def test_nothing_is_read_back_before_the_result_is():
    rows_ = [spec([0, 1, 2], banned=frozenset({5}), **DEMANDING), spec(temperature=0.0), spec(top_p=0.5)]
    sample_result = sample_tokens(torch.zeros(3, VOCAB_SIZE, device="meta"), rows_)  # whose numbers cannot be read
    assert sample_result.tokens.shape == (3,)
    assert sample_result.logprobs is not None
    assert sample_result.logprobs.listed.shape == (1, 2)
    with pytest.raises(NotImplementedError):
        sample_result.read()


class HostSampler(TorchSampler):
    """Reads what is best at once, as the native kernels do, and counts how often."""

    def __init__(self) -> None:
        self.num_read = 0

    def read_argmax(self, logits: torch.Tensor) -> list[int]:
        self.num_read += 1
        best: list[int] = logits.argmax(-1).tolist()
        return best


def test_rows_that_need_only_the_best_token_are_read_at_once():
    sampler, logits = HostSampler(), torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0]])
    sample_result = sample_tokens(logits, [spec(temperature=0.0), spec(temperature=0.0)], sampler)
    assert sampler.num_read == 1
    assert sample_result.read() == (SampledToken(1), SampledToken(0))
    assert sample_result.tokens.tolist() == [1, 0]
    assert sample_result.logprobs is None


@pytest.mark.parametrize(
    ("row", "token"),
    [
        (spec(temperature=1.0, top_k=1), 1),
        (spec(temperature=0.0, logprobs=1), 1),
        (spec(banned=frozenset({1}), temperature=0.0), 2),
        (spec(temperature=0.0, logit_bias=((0, 9.0),)), 0),
        (spec(temperature=0.0, allowed_token_ids=(0,)), 0),
        (spec([1, 1, 1], temperature=0.0, presence_penalty=9.0), 2),
    ],
)
def test_one_row_that_needs_more_keeps_all_from_being_read(row: SampleSpec, token: int):
    sampler, logits = HostSampler(), torch.tensor([[0.0, 3.0, 1.0]]).expand(2, -1)
    sample_result = sample_tokens(logits, [spec(temperature=0.0), row], sampler)
    assert sampler.num_read == 0
    assert [sampled.token for sampled in sample_result.read()] == [1, token]


def test_a_mask_keeps_a_row_from_being_read():
    sampler, row = HostSampler(), replace(spec(temperature=0.0), mask=MASK)
    bits = np.array([0b101], dtype=np.uint32)
    assert sample_tokens(torch.tensor([[0.0, 3.0, 1.0]]), [row], sampler, {0: bits}).read()[0].token == 2
    assert sampler.num_read == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(row_logits, rows), min_size=1, max_size=4), st.sampled_from([(), (1,), (4, 8)]))
def test_a_nucleus_does_not_depend_on_the_search_sizes(batch, sizes):
    logits = torch.tensor([values for values, _ in batch])
    filters = Filters.of([row.sampling for _, row in batch], VOCAB_SIZE)
    assert torch.equal(filter_weights(logits, filters, sizes), filter_weights(logits, filters))


def test_a_wide_nucleus_exceeds_the_first_search_size():
    vocab_size = 3 * TOP_P_CANDIDATES[0]
    logits = torch.linspace(0.0, 0.5, vocab_size)[None]
    kept = int((filter_weights(logits, Filters.of([SamplingParams(top_p=0.9)], vocab_size)) > 0).sum())
    probs = logits.double().softmax(-1)[0].flip(0)
    assert abs(kept - int((probs.cumsum(0) - probs < 0.9).sum())) <= 1
    assert kept > TOP_P_CANDIDATES[0]


def test_rows_of_one_batch_keep_their_own_filters():
    logits = torch.zeros(3, 8)
    logits[:, 3] = 1.0
    rows_ = [SamplingParams(top_k=1), SamplingParams(), SamplingParams(min_p=0.99)]
    assert (filter_weights(logits, Filters.of(rows_, 8)) > 0).sum(-1).tolist() == [1, 8, 1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-37, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.tensor([[40.0, -1e4, 41.0, 0.0]])
    row = SamplingParams(temperature=temperature)
    assert filter_weights(logits, Filters.of([row], logits.shape[-1])).tolist() == [[0.0, 0.0, 1.0, 0.0]]
    assert sample(logits, [spec(temperature=temperature)])[0].token == 2


def test_logprobs_are_of_the_raw_distribution():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    wanted = logits.log_softmax(-1)[0]
    row = spec(temperature=0.0, logprobs=2, logit_bias=((1, -100.0),))
    (result,) = sample(logits, [row])
    assert result.token == 3
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(wanted[3].item())
    assert [token for token, _ in result.logprobs.top] == [1, 3]
    assert [value for _, value in result.logprobs.top] == pytest.approx([wanted[1].item(), wanted[3].item()])


def test_named_tokens_are_listed_in_their_order():
    """Beside a row with more names, and one that lists the best tokens."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [1.0, 0.0, 5.0, 2.0], [4.0, 0.0, 1.0, 2.0]])
    wanted = logits.log_softmax(-1)
    named = [(2, 0, 3), (), (1,)]
    rows_ = [spec(temperature=0.0, logprobs=2, logprob_token_ids=ids) for ids in named]
    for row, (result, ids) in enumerate(zip(sample(logits, rows_), [(2, 0, 3), (2, 3), (1,)], strict=True)):
        assert result.logprobs is not None
        assert result.logprobs.logprob == pytest.approx(wanted[row, result.token].item())
        assert [token for token, _ in result.logprobs.top] == list(ids)
        assert [value for _, value in result.logprobs.top] == pytest.approx(wanted[row, list(ids)].tolist())


def test_equally_probable_tokens_are_listed_by_id():
    """Beside any other row: rounded to bfloat16, logits are often equal."""
    logits = torch.zeros(3, 500)
    logits[1] = torch.randn(500, generator=torch.Generator().manual_seed(1))
    logits[:, [411, 7, 30, 2]] = torch.tensor([9.0, 8.0, 8.0, 8.0])
    asking = [spec(temperature=0.0, logprobs=count) for count in (3, 200, 1)]
    for number, result in enumerate(sample(logits, asking)):
        assert result.logprobs is not None
        assert [token for token, _ in result.logprobs.top[:3]] == [411, 2, 7][: asking[number].sampling.logprobs]
        assert sample(logits[number : number + 1], asking[number : number + 1])[0] == result


def test_only_rows_that_ask_get_logprobs():
    results = sample(torch.zeros(3, 4), [spec(temperature=0.0), spec(temperature=0.0, logprobs=0), spec(logprobs=1)])
    assert [result.logprobs is None for result in results] == [True, False, False]
    assert results[1].logprobs is not None
    assert results[1].logprobs.top == ()
    assert results[1].logprobs.logprob == pytest.approx(math.log(0.25))


def test_the_models_logits_are_not_changed():
    logits = torch.zeros(1, 4)
    sample(logits, [spec(logit_bias=((1, 5.0),), banned=frozenset({2}))])
    assert torch.equal(logits, torch.zeros(1, 4))


def test_no_rows_give_no_tokens():
    assert sample(torch.zeros(0, 4), []) == ()


GOLDEN_DRAWS = [
    *(6, 10, 8, 9, 11, 11, 9, 11, 9, 6, 10, 9, 9, 10, 9, 11, 11, 5, 10, 8, 10, 8, 7, 7, 9, 8, 6, 9, 7, 11, 5, 10),
    *(6, 9, 5, 11, 11, 9, 9, 10, 10, 10, 8, 11, 8, 8, 11, 6, 11, 6, 8, 6, 9, 11, 8, 9, 6, 9, 7, 7, 11, 9, 10, 9),
]
"""Tokens that sampler version 2 draws."""


def golden_draws(sampler: SamplerBackend) -> list[int]:
    """Tokens of fixed logits under eight seeds, at eight positions each."""
    logits = torch.linspace(-2.0, 2.0, VOCAB_SIZE).sin().expand(64, VOCAB_SIZE)
    rows = [
        spec(list(range(1, 2 + position)), temperature=0.9, top_p=0.9, top_k=9, seed=seed * 0x9E3779B9)
        for seed in range(8)
        for position in range(8)
    ]
    return [token.token for token in sample(logits, rows, sampler)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_golden_draws_belong_to_this_sampler_version(sampler: SamplerBackend):
    """A change that moves a draw must raise `SAMPLER_VERSION`: workers of two versions would continue differently."""
    assert (SAMPLER_VERSION, golden_draws(sampler)) == (2, GOLDEN_DRAWS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_mask_removes_tokens_and_changes_no_other_row(sampler: SamplerBackend, temperature: float):
    torch.manual_seed(3)
    logits = torch.randn(3, 70)
    allowed = {2, 33, 64, 69}
    bits = np.zeros(3, np.uint32)
    for token in allowed:
        bits[token // 32] |= np.uint32(1 << token % 32)
    sampling = SamplingParams(temperature=temperature, seed=4, logprobs=1)
    history = [1, 2, 3]
    plain = [SampleSpec(sampling, history, 3) for _ in range(3)]
    rows = [plain[0], replace(plain[1], mask=MASK), replace(plain[2], mask=MASK)]
    masked = sample_tokens(logits, rows, sampler, {1: bits, 2: None}).read()
    unmasked = sample_tokens(logits, plain, sampler).read()
    assert masked[0] == unmasked[0]
    assert masked[2] == unmasked[2]
    assert masked[1].token in allowed
    assert masked[1].logprobs is not None
    raw = logits[1].log_softmax(-1)[masked[1].token]
    assert masked[1].logprobs.logprob == pytest.approx(float(raw), abs=1e-6)
    if temperature == 0.0:
        assert masked[1].token == max(allowed, key=lambda token: float(logits[1, token]))


def test_a_constrained_row_is_never_sampled_without_its_mask():
    spec = SampleSpec(SamplingParams(temperature=0.0), [1], 1, mask=MASK)
    for masks in (None, {}, {1: None}):
        with pytest.raises(Broken, match="mask"):
            sample_tokens(torch.zeros(1, 70), [spec], masks=masks)
