"""The counts of the comparison of draws: equal distributions agree always, disjoint ones never, in every way."""

from __future__ import annotations

import pytest
import torch

from baton.model.sampling.gumbel import draw_key
from bench.speculation.acceptance import counts

KEYS = [draw_key(1, position) for position in range(2000)]


def shares(target: list[float], draft: list[float]) -> list[float]:
    rows = [torch.tensor(row).expand(len(KEYS), -1) for row in (target, draft)]
    total = counts(rows[0], rows[1], KEYS)
    assert total[0] == len(KEYS)
    return [float(share) for share in total[1:] / total[0]]


def test_equal_distributions_agree_and_disjoint_ones_do_not() -> None:
    best, keyed, sharpened, inverse, greedy = shares([0.5, 0.3, 0.2], [0.5, 0.3, 0.2])
    assert (best, keyed, inverse, greedy) == pytest.approx((1.0, 1.0, 1.0, 0.5))
    assert 0.5 < sharpened < 1.0, "a target that is not surer than its drafter agrees less"
    assert shares([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]) == [0.0] * 5


def test_mass_that_moves_far_shifts_the_old_draw_only() -> None:
    """A tenth goes from the first of ten tokens to the last: at best nine tenths agree."""
    best, keyed, _, inverse, greedy = shares([0.19, *[0.09] * 9], [0.09, *[0.09] * 8, 0.19])
    assert best == pytest.approx(0.9)
    assert keyed > 0.818, "(1 - d) / (1 + d)"
    assert inverse < 0.3
    assert greedy == pytest.approx(0.09)
