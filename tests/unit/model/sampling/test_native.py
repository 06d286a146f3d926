"""The native sampler at every level against the torch sampler: same filters, same noise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.domain.request import SamplingParams
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.sampling.distribution import Filters, filter_weights, mask_logits
from baton.model.sampling.gumbel import draw_key, sample_by_gumbel
from baton.model.sampling.native import NativeSampler
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

VOCAB_SIZES = (1, 7, 64, 1000, 32_003)
KEYS = (0, 2**64 - 1, *(draw_key(seed, 9) for seed in range(5)))
FILTERS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.3, 1.0, 1.7), (0, 1, 40), (1.0, 0.9, 0.01), (0.0, 0.05)
    )
]


class NativeTokens:
    """Tokens of one level as lists."""

    def __init__(self, level: IsaLevel) -> None:
        self._sampler = NativeSampler(load_kernels(level))

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingParams], keys: Sequence[int]) -> list[int]:
        return self._sampler.sample(logits, rows, keys).tolist()

    def argmax(self, logits: torch.Tensor) -> list[int]:
        tokens: list[int] = self._sampler.argmax(logits).tolist()
        assert list(self._sampler.read_argmax(logits)) == tokens
        return tokens


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def by_torch(logits: torch.Tensor, rows: list[SamplingParams], keys: list[int]) -> list[int]:
    tokens: list[int] = sample_by_gumbel(filter_weights(logits, Filters.of(rows, logits.shape[-1])), keys).tolist()
    return tokens


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_equal_the_torch_samplers(level: IsaLevel, vocab_size: int, dtype: torch.dtype):
    logits = random_logits(len(KEYS), vocab_size).to(dtype)
    for params in FILTERS:
        rows = [params] * len(KEYS)
        assert NativeTokens(level).sample(logits, rows, KEYS) == by_torch(logits, rows, list(KEYS)), params


@pytest.mark.parametrize("level", kernel_levels())
def test_equally_probable_tokens_stay_or_go_together(level: IsaLevel):
    """Three tokens share the second place: top-k 2, and a nucleus that ends at the first of them, keep all four."""
    logits = torch.full((1, 50), -30.0)
    logits[0, [3, 17, 40, 41]] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(top_k=2, top_p=0.6)):
        drawn = {NativeTokens(level).sample(logits, [params], [draw_key(0, step)])[0] for step in range(64)}
        assert drawn == {3, 17, 40, 41}


@pytest.mark.parametrize("level", kernel_levels())
def test_banned_and_impossible_tokens_are_never_sampled(level: IsaLevel):
    logits = torch.full((1, 20), -torch.inf)
    logits[0, 7] = 0.0
    logits[0, 3] = -200.0  # negligible beside the other
    for key in KEYS:
        assert NativeTokens(level).sample(logits, [SamplingParams(temperature=1.0)], [key]) == [7]
    assert NativeTokens(level).sample(random_logits(1, 999), [SamplingParams(temperature=1e-40)], [7]) == [
        int(random_logits(1, 999).argmax())
    ]


@pytest.mark.parametrize("level", kernel_levels())
def test_every_row_has_its_own_parameters_and_key(level: IsaLevel):
    logits = random_logits(4, 5000)
    rows = [SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.2)]
    keys = list(KEYS[2:6])
    together = NativeTokens(level).sample(logits, rows, keys)
    alone = [NativeTokens(level).sample(logits[i : i + 1], rows[i : i + 1], keys[i : i + 1])[0] for i in range(4)]
    assert together == alone == by_torch(logits, rows, keys)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_ties_go_to_the_lowest_id(level: IsaLevel, vocab_size: int):
    logits = random_logits(5, vocab_size)
    assert NativeTokens(level).argmax(logits) == logits.argmax(-1).tolist()
    assert NativeTokens(level).argmax(logits.bfloat16()) == logits.bfloat16().argmax(-1).tolist()
    logits[:, vocab_size // 3] = logits[:, vocab_size - 1] = 99.0
    assert NativeTokens(level).argmax(logits) == [vocab_size // 3] * 5
    assert NativeTokens(level).argmax(torch.full((1, vocab_size), -torch.inf)) == [0]


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masks_equal_the_torch_samplers(level: IsaLevel, vocab_size: int, dtype: torch.dtype):
    """Words with every bit, some and none; bits behind the vocabulary change nothing; the second row has no mask."""
    draw = np.random.default_rng(vocab_size)
    num_words = (vocab_size + 31) // 32
    words = draw.integers(0, 2**32, (2, num_words), dtype=np.uint32)
    words[draw.random(words.shape) < 0.3] = 0
    words[draw.random(words.shape) < 0.3] = 0xFFFFFFFF
    masks, logits = {0: words[0], 2: words[1]}, random_logits(4, vocab_size).to(dtype)
    behind = logits[3].clone()
    expected = logits.clone()
    mask_logits(expected, masks)
    NativeSampler(load_kernels(level)).mask(logits[:3], masks)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[3], behind)


def test_a_mask_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="every token"):
        NativeSampler(load_kernels(kernel_levels()[0])).mask(torch.zeros(1, 33), {0: np.zeros(1, np.uint32)})


def test_logits_on_a_device_are_refused():
    with pytest.raises(ValueError, match="rows, vocab_size"):
        NativeTokens(kernel_levels()[0]).argmax(torch.zeros(5))
