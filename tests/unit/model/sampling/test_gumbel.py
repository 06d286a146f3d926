"""The keyed draw: its numbers are constant for ever, follow the distribution, and couple two distributions."""

from __future__ import annotations

import pytest
import torch

from baton.model.sampling.gumbel import draw_key, exponentials, sample_by_gumbel
from tests.unit.model.sampling.keyed_noise import gumbel, key_of

NUM_DRAWS = 4000
KEYS = [draw_key(5, position) for position in range(NUM_DRAWS)]


def test_randomness_is_keyed_by_seed_position_and_token_and_nothing_else() -> None:
    """Constant for ever: another process, attempt or release must draw the same numbers."""
    assert draw_key(0, 0) == 13170756389223590335
    assert draw_key(-3, 7) == key_of(-3, 7)
    keys = [draw_key(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, draw_key(7, 3)])
def test_numbers_are_those_of_the_plain_formula(key: int) -> None:
    tokens = (0, 1, 77, 4095, 32_003)
    found = -exponentials([key], 32_004)[0].double().log()
    assert found[list(tokens)].tolist() == pytest.approx([gumbel(key, token) for token in tokens], abs=1e-5)
    assert bool(found.isfinite().all())


def test_a_row_has_the_numbers_of_its_own_key_in_every_batch() -> None:
    together = exponentials(KEYS[:3], 500)
    for row, key in enumerate(KEYS[:3]):
        assert torch.equal(together[row], exponentials([key], 500)[0])
        assert torch.equal(together[row, :20], exponentials([key], 20)[0]), "whatever the vocabulary"


@pytest.mark.parametrize("order", ["keys", "tokens"])
def test_numbers_are_uniform_along_keys_and_along_tokens(order: str) -> None:
    """Each alone, and beside the next one: 16 x 16 boxes, by chi squared. Seeds are fixed, so this cannot flake."""
    uniforms = (-exponentials(KEYS[:500], 1000)).exp()
    boxes = (uniforms * 16).long().clamp(max=15)
    boxes = boxes if order == "keys" else boxes.T
    pairs = torch.bincount((boxes[:-1] * 16 + boxes[1:]).flatten(), minlength=256).double()
    expected = pairs.sum() / 256
    assert float(((pairs - expected) ** 2 / expected).sum()) < 330.5  # 0.999 quantile for 255 degrees of freedom


@pytest.mark.parametrize("weights", [[1.0, 3.0, 0.5, 0.0, 2.0, 1e-3], [1.0] * 6, [1.0, 1e-4, 1e-4, 1e-4, 0.0, 0.0]])
def test_draws_follow_the_distribution(weights: list[float]) -> None:
    row = torch.tensor(weights)
    drawn = sample_by_gumbel(row.expand(NUM_DRAWS, -1), KEYS)
    counts = torch.bincount(drawn, minlength=len(weights)).double()
    expected = row.double() / row.double().sum() * NUM_DRAWS
    assert not counts[row == 0.0].any()
    large = expected > 5
    chi_squared = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    assert chi_squared < 20.5  # 0.999 quantile for 5 degrees of freedom
    assert float((counts - expected)[~large].abs().sum()) < 10


def test_the_only_token_left_is_drawn_whatever_its_number() -> None:
    weights = torch.zeros(NUM_DRAWS, 40)
    weights[:, 17] = 1e-38
    assert sample_by_gumbel(weights, KEYS).unique().tolist() == [17]


def test_a_rounding_difference_moves_a_draw_only_at_a_near_tie() -> None:
    weights = (2 * torch.randn(NUM_DRAWS, 50, generator=torch.Generator().manual_seed(2))).exp()
    moved = sample_by_gumbel(weights * (1 + 1e-6 * torch.rand_like(weights)), KEYS) != sample_by_gumbel(weights, KEYS)
    assert int(moved.sum()) <= 1


@pytest.mark.parametrize(("spread", "least"), [(0.3, 0.85), (1.0, 0.55)])
def test_drafts_of_another_distribution_are_accepted_as_promised(spread: float, least: float) -> None:
    """At least (1 - d) / (1 + d) of the draws agree, nearly as many as the best coupling gives: 1 - d.

    Adversary: the same draw with another key for the draft, which agrees only as two independent draws do.
    """
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(NUM_DRAWS, 100, generator=generator)
    drafted = logits + spread * torch.randn(NUM_DRAWS, 100, generator=generator)
    target, draft = logits.softmax(-1), drafted.softmax(-1)
    agree = torch.minimum(target, draft).sum(-1)  # 1 - d
    drawn = sample_by_gumbel(target, KEYS)
    accepted = float((drawn == sample_by_gumbel(draft, KEYS)).double().mean())
    assert accepted > float((agree / (2 - agree)).mean()) - 0.02
    assert least < accepted <= float(agree.mean()) + 0.02
    other = float((drawn == sample_by_gumbel(draft, KEYS[1:] + KEYS[:1])).double().mean())
    assert other == pytest.approx(float((target * draft).sum(-1).mean()), abs=0.03)
    assert other < 0.5 * accepted
