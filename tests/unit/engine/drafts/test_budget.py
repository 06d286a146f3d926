"""Drafts are taken where they raise the tokens a second, by costs that the test sets; acceptance is learned."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.domain.timing.step_time import StepShape, StepTimeModel
from baton.engine.drafts.acceptance import PRIOR, AcceptanceModel
from baton.engine.drafts.budget import MAX_UNKNOWN_ROWS, MAX_UNKNOWN_TOKENS, DraftBudget, DraftOption

ID, OTHER = (AttemptId(RequestId(name), 1) for name in "ab")


class KnownStepTime(StepTimeModel):
    """A model whose step of n tokens takes `seconds(n)`."""

    def __init__(self, seconds: Callable[[int], float], reliable: bool = True) -> None:
        super().__init__()
        self._seconds, self._reliable = seconds, reliable

    @property
    def reliable(self) -> bool:
        return self._reliable

    def predict(self, shape: StepShape) -> float:
        return self._seconds(shape.num_tokens)


def memory_bound(num_tokens: int) -> float:
    """Weights are read once; tokens are nearly free up to 6, then each costs a sixth."""
    return 1.0 + 0.01 * num_tokens + max(0, num_tokens - 6) / 6


def lengths(seconds: Callable[[int], float], candidates: list[DraftOption], reliable: bool = True) -> list[int]:
    shape = StepShape.of((1, one.start) for one in candidates)
    return DraftBudget(KnownStepTime(seconds, reliable)).lengths(candidates, shape)


def goodput(seconds: Callable[[int], float], candidates: list[DraftOption], chosen: tuple[int, ...]) -> float:
    tokens = sum(
        1 + sum(one.acceptance**n for n in range(1, num + 1)) for one, num in zip(candidates, chosen, strict=True)
    )
    return tokens / seconds(len(candidates) + sum(chosen))


@pytest.mark.parametrize("acceptances", [(0.9,), (0.3,), (0.9, 0.2), (0.8, 0.6, 0.4)])
def test_the_lengths_are_the_best_of_all(acceptances: tuple[float, ...]):
    candidates = [DraftOption(100, 5, acceptance) for acceptance in acceptances]
    best = max(itertools.product(range(6), repeat=len(candidates)), key=lambda n: goodput(memory_bound, candidates, n))
    chosen = lengths(memory_bound, candidates)
    assert goodput(memory_bound, candidates, tuple(chosen)) == pytest.approx(
        goodput(memory_bound, candidates, best), rel=0.01
    )


def test_nobody_gets_drafts_where_a_token_costs_its_share():
    candidates = [DraftOption(100, 7, 0.95)] * 32
    assert lengths(lambda num_tokens: float(num_tokens), candidates) == [0] * 32
    budget = DraftBudget(KnownStepTime(lambda num_tokens: float(num_tokens)))
    assert not budget.worth_asking(StepShape.of([(1, 100)] * 32), 32)
    assert DraftBudget(KnownStepTime(memory_bound)).worth_asking(StepShape.of([(1, 100)]), 1)


def costly(num_tokens: int) -> float:
    """A draft costs a quarter of a step of two rows."""
    return 1.0 + 0.25 * max(0, num_tokens - 2)


def test_the_drafter_is_left_alone_while_nothing_pays():
    """Asked in every second step, then every fourth, then every eighth; at once again when something paid."""
    budget, shape = DraftBudget(KnownStepTime(costly)), StepShape.of([(1, 40)] * 2)
    poor, good = ([DraftOption(40, 3, chance)] * 2 for chance in (0.3, 0.9))

    def asks(options: list[DraftOption], num_steps: int) -> list[int]:
        asked = []
        for step in range(num_steps):
            if budget.worth_asking(shape, 2):
                asked.append(step)
                budget.lengths(options, shape)
        return asked

    assert asks(poor, 23) == [0, 2, 6, 14, 22]
    assert asks(good, 10) == [7, 8, 9], "the pause of 7 steps ends"
    assert asks(poor, 4) == [0, 2]
    budget.add_row()
    assert asks(poor, 8) == [0], "a row ended and another one joined; the pause is a long one again"
    assert budget.worth_asking(StepShape.of([(1, 40)]), 1), "another number of rows"


def test_no_drafter_is_asked_whose_best_draft_does_not_pay():
    shape = StepShape.of([(1, 40)] * 2)
    assert not DraftBudget(KnownStepTime(costly)).worth_asking(shape, 2, lambda: 0.49)
    assert DraftBudget(KnownStepTime(costly)).worth_asking(shape, 2, lambda: 0.51)


def test_no_estimate_is_above_the_highest():
    model = AcceptanceModel()
    assert model.highest() == PRIOR
    for id, grade, accepted in ((ID, 3, 4), (OTHER, 3, 0), (OTHER, 5, 2), (ID, 7, 0)):
        model.begin_step()
        model.observe(id, grade, num_drafts=4, num_accepted=accepted)
        estimates = [model.estimate(id, grade) for id in (ID, OTHER) for grade in (3, 5, 7, 9)]
        assert max(estimates) <= model.highest() < 1.0
    assert model.highest() > PRIOR


def test_no_row_gets_more_than_it_proposes():
    assert lengths(lambda _: 1.0, [DraftOption(9, 3, 0.9), DraftOption(9, 0, 0.9)]) == [3, 0]


def test_a_first_draft_that_is_hardly_right_is_not_taken():
    assert lengths(lambda _: 1.0, [DraftOption(9, 3, 0.07)]) == [0]
    rows = [DraftOption(9, 3, 0.25), DraftOption(9, 3, 0.07), DraftOption(9, 0, 0.9)]
    assert lengths(lambda _: 1.0, rows[:1]) == [2], "one of 0.06 behind one of 0.25, and none of 0.02"
    assert lengths(lambda _: 1.0, rows) == [1, 0, 0], "three rows: 0.06 is not enough for a draft of 3 %"


def test_while_costs_are_unknown_only_few_rows_get_few():
    one = DraftOption(100, 7, 0.9)
    assert lengths(memory_bound, [one], reliable=False) == [MAX_UNKNOWN_TOKENS]
    assert lengths(memory_bound, [one] * (MAX_UNKNOWN_ROWS + 1), reliable=False) == [0] * (MAX_UNKNOWN_ROWS + 1)


def test_a_row_of_several_tokens_is_predicted_as_it_will_be_observed():
    seen: list[StepShape] = []

    class Watched(KnownStepTime):
        def predict(self, shape: StepShape) -> float:
            seen.append(shape)
            return 1.0

    shape = StepShape.of([(1, 40), (1, 70)])
    DraftBudget(Watched(memory_bound)).lengths([DraftOption(40, 2, 0.5), DraftOption(70, 0, 0.5)], shape)
    assert seen == [shape, StepShape.of([(2, 40), (1, 70)]), StepShape.of([(3, 40), (1, 70)])]


def test_acceptance_follows_the_row_and_its_grade():
    model = AcceptanceModel()
    assert model.estimate(ID, 3) == PRIOR
    for _ in range(30):
        model.begin_step()
        model.observe(ID, 3, num_drafts=4, num_accepted=0)
        model.observe(OTHER, 9, num_drafts=4, num_accepted=4)
    assert model.estimate(ID, 3) < 0.15
    assert model.estimate(OTHER, 9) > 0.9
    assert model.estimate(ID, 9) < model.estimate(OTHER, 9), "the row's own counts weigh"
    model.end(ID)
    assert model.estimate(ID, 9) > 0.8


def test_a_row_that_was_stopped_is_tried_again():
    model = AcceptanceModel()
    for _ in range(30):
        model.begin_step()
        model.observe(ID, 3, num_drafts=4, num_accepted=0)
    low = model.estimate(ID, 3)
    for _ in range(800):
        model.begin_step()
    assert low < 0.15 < 0.5 < model.estimate(ID, 3)


def test_what_lies_behind_a_rejected_draft_tells_nothing():
    short, long = AcceptanceModel(), AcceptanceModel()
    short.observe(ID, 3, num_drafts=2, num_accepted=1)
    long.observe(ID, 3, num_drafts=9, num_accepted=1)
    assert short.estimate(ID, 3) == long.estimate(ID, 3)
