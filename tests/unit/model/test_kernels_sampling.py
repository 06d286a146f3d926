"""The native choice of tokens at every level against the torch one: same filters, same order of the draw."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from baton.domain.request import SamplingParams
from baton.model.distribution import Filters, draw, filtered
from baton.model.kernels.build import Level
from baton.model.kernels.library import load_kernels
from baton.model.kernels.sampling import NativeChooser
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

VOCAB_SIZES = (1, 7, 64, 1000, 32_003)
UNIFORMS = (0.0, 1e-7, 0.125, 0.5, 0.875, 0.999, 1 - 1e-6)
FILTERS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.3, 1.0, 1.7), (0, 1, 40), (1.0, 0.9, 0.01), (0.0, 0.05)
    )
]


class Chosen:
    """A level's choices, as lists."""

    def __init__(self, level: Level) -> None:
        self._chooser = NativeChooser(load_kernels(level))

    def drawn(self, logits: torch.Tensor, rows: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
        return self._chooser.drawn(logits, rows, uniforms).tolist()

    def likeliest(self, logits: torch.Tensor) -> list[int]:
        return self._chooser.likeliest(logits).tolist()


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def by_torch(logits: torch.Tensor, rows: list[SamplingParams], uniforms: list[float]) -> list[int]:
    tokens: list[int] = draw(filtered(logits, Filters.of(rows, logits.shape[-1])), uniforms).tolist()
    return tokens


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_what_torch_draws(level: Level, vocab_size: int, dtype: torch.dtype):
    logits = random_logits(len(UNIFORMS), vocab_size).to(dtype)
    for params in FILTERS:
        rows = [params] * len(UNIFORMS)
        assert Chosen(level).drawn(logits, rows, UNIFORMS) == by_torch(logits, rows, list(UNIFORMS)), params


@pytest.mark.parametrize("level", kernel_levels())
def test_equals_stay_or_go_together(level: Level):
    """Three tokens share the second place: top-k 2 and a nucleus that the first of them crosses keep all four."""
    logits = torch.full((1, 50), -30.0)
    logits[0, [3, 17, 40, 41]] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(top_k=2, top_p=0.6)):
        drawn = {Chosen(level).drawn(logits, [params], [step / 64])[0] for step in range(64)}
        assert drawn == {3, 17, 40, 41}


@pytest.mark.parametrize("level", kernel_levels())
def test_what_is_banned_or_hopeless_is_never_drawn(level: Level):
    logits = torch.full((1, 20), -torch.inf)
    logits[0, 7] = 0.0
    logits[0, 3] = -200.0  # nothing, beside the other
    for uniform in (*UNIFORMS, 1 - 2.0**-53):
        assert Chosen(level).drawn(logits, [SamplingParams(temperature=1.0)], [uniform]) == [7]
    assert Chosen(level).drawn(random_logits(1, 999), [SamplingParams(temperature=1e-40)], [0.99]) == [
        int(random_logits(1, 999).argmax())
    ]


@pytest.mark.parametrize("level", kernel_levels())
def test_every_row_has_its_own_parameters_and_number(level: Level):
    logits = random_logits(4, 5000)
    rows = [SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.2)]
    uniforms = [0.1, 0.6, 0.9, 0.99]
    together = Chosen(level).drawn(logits, rows, uniforms)
    alone = [Chosen(level).drawn(logits[i : i + 1], rows[i : i + 1], uniforms[i : i + 1])[0] for i in range(4)]
    assert together == alone == by_torch(logits, rows, uniforms)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_likeliest_is_the_first_of_equals(level: Level, vocab_size: int):
    logits = random_logits(5, vocab_size)
    assert Chosen(level).likeliest(logits) == logits.argmax(-1).tolist()
    assert Chosen(level).likeliest(logits.bfloat16()) == logits.bfloat16().argmax(-1).tolist()
    logits[:, vocab_size // 3] = logits[:, vocab_size - 1] = 99.0
    assert Chosen(level).likeliest(logits) == [vocab_size // 3] * 5
    assert Chosen(level).likeliest(torch.full((1, vocab_size), -torch.inf)) == [0]


def test_only_rows_on_the_cpu_are_taken():
    with pytest.raises(ValueError, match="rows, vocab_size"):
        Chosen(kernel_levels()[0]).likeliest(torch.zeros(5))
