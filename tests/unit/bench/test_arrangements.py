"""Split against colocated: the arrangements and the arithmetic of their figures."""

from __future__ import annotations

import pytest

from bench import goodput, interference
from bench.arrangements import MIXED, SPLIT, UNCHUNKED, flags_of
from bench.goodput import Objectives, Outcome, arm_of, facts_of
from bench.load_client import HEAD_TOKENS, gaps_of
from bench.rotations import Block
from services.cli.bench.records import Answer, Delivery, RequestRow
from services.cli.settings import UpSettings

OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.1, gap_s=0.3)
GOOD, UNEVEN, SLOW, LATE = Outcome(0.5, 0.05, 0.2), Outcome(0.5, 0.05, 0.9), Outcome(0.5, 0.2, 0.2), Outcome(2, 0, 0)


def block(arm: str, *values: float, rotation: int = 0) -> Block:
    return Block(rotation, arm, 1.0, 1.0, values)


def flat(*outcomes: Outcome) -> list[float]:
    return [value for outcome in outcomes for value in outcome]


@pytest.mark.parametrize("arrangement", [SPLIT, MIXED, UNCHUNKED])
def test_every_arrangement_has_two_workers_and_somebody_to_prefill(arrangement):
    words = iter(flags_of(arrangement, 64))
    settings = UpSettings.model_validate(
        {flag[2:].replace("-", "_"): value for flag, value in zip(words, words, strict=True)}
    )
    assert settings.prefill + settings.decode == 2
    assert (settings.decode_token_budget > 0) == (arrangement != SPLIT)


def test_gaps_are_a_token_s_and_without_the_head():
    deliveries = [Delivery(float(n), 1) for n in range(HEAD_TOKENS + 2)]
    answer = Answer(0.0, 30.0, (*deliveries, Delivery(HEAD_TOKENS + 5.0, 2)), HEAD_TOKENS + 4)
    assert gaps_of(answer) == [1.0, 2.0, 2.0]


def test_goodput_is_of_those_who_met_all_objectives():
    facts = block("a", 4.0, *flat(GOOD, GOOD, UNEVEN, SLOW, LATE))
    assert goodput.goodput(facts, OBJECTIVES.meets_tpot) == 3 / 4.0
    assert goodput.goodput(facts, OBJECTIVES.meets_gap) == 3 / 4.0
    assert goodput.goodput(block("a", 4.0, *flat(LATE)), OBJECTIVES.meets_gap) == 0.0


def test_a_block_s_facts_are_read_off_its_rows():
    deliveries = (Delivery(0.5, 1), Delivery(0.7, 1), Delivery(1.5, 1))
    row = RequestRow(0, 0.0, 0.0, 2.0, 1.5, 3, 10, 3, deliveries, "length", None)
    wall_s, ttft_s, tpot_s, largest_gap_s = facts_of([row])
    assert (wall_s, ttft_s) == (3.5, 0.5)
    assert tpot_s == pytest.approx(0.5)
    assert largest_gap_s == pytest.approx(0.8)


def test_the_split_system_is_compared_with_the_better_of_the_others_each_at_its_best_rate():
    options = goodput.parse(["--rates", "1", "2"])
    good = {SPLIT: (1, 4), MIXED: (2, 0), UNCHUNKED: (1, 1)}
    blocks = [
        block(arm_of(name, rate), 2.0, *flat(*[GOOD] * num_good, LATE))
        for name, counts in good.items()
        for rate, num_good in zip(options.rates, counts, strict=True)
    ]
    figures = {f.name: f.over_all.median for f in goodput.findings_of(options, OBJECTIVES, blocks)}
    assert figures["split: goodput by TPOT"] == 2.0
    assert figures["mixed chunks: goodput by TPOT"] == 1.0
    assert figures["split / best colocated: goodput by TPOT"] == 2.0


def test_interference_is_a_ratio_of_99th_percentiles():
    blocks = []
    for name in (SPLIT, MIXED, UNCHUNKED):
        blocks.append(block(interference.alone(name), *[0.01] * 100))
        blocks.append(block(interference.beside(name), *[0.01] * 90, *[0.03] * 10))
    figures = {f.name: f.over_all.median for f in interference.findings_of(blocks)}
    assert figures["split: p99 gap beside prompts / alone"] == pytest.approx(3.0)
