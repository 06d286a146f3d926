"""Split against colocated: the deployments and the arithmetic of their figures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.engine.chunking import cut
from baton.services.cli.bench.results.records import Delivery, MeasuredAnswer, PlannedRequest, RequestRow
from baton.services.cli.settings import UpSettings
from bench.harness.rotations import Block
from bench.system import goodput, interference
from bench.system.deployments import MIXED, OWN_CORES, SPLIT, UNCHUNKED
from bench.system.goodput import Capacity, GoodputObjectives, RequestLatency, arm_of, values_of
from bench.system.interference import COLOCATED, LENT, alone, beside, mixed
from bench.system.load_client import HEAD_TOKENS, TokenTimes, gaps_of

CAPACITY = Capacity(mean_prompt_s=0.5, longest_prompt_s=0.8, gap_s=0.01)
OBJECTIVES = GoodputObjectives(ttft_s=1.0, tpot_s=0.1, gap_s=0.3)
GOOD, UNEVEN, SLOW, LATE = (
    RequestLatency(0.5, 0.05, 0.2),
    RequestLatency(0.5, 0.05, 0.9),
    RequestLatency(0.5, 0.2, 0.2),
    RequestLatency(2, 0, 0),
)


def block(arm: str, *values: float, rotation: int = 0) -> Block:
    return Block(rotation, arm, 1.0, 1.0, values)


def flat(*outcomes: RequestLatency) -> list[float]:
    return [value for outcome in outcomes for value in outcome]


SYSTEMS = interference.parse(["--streams", "4", "--budgets", "16", "64"]).systems


@pytest.mark.parametrize("deployment", SYSTEMS)
def test_every_deployment_has_two_workers_and_prefills(deployment):
    lends = OWN_CORES not in SYSTEMS[deployment]
    words = iter([word for word in SYSTEMS[deployment] if word != OWN_CORES])
    values = {flag[2:].replace("-", "_"): value for flag, value in zip(words, words, strict=True)}
    settings = UpSettings.model_validate(values | {"lend_cores": lends})
    assert settings.prefill + settings.decode == 2
    assert (settings.decode_token_budget > 0) == (deployment not in (SPLIT, LENT))
    assert lends == (deployment == LENT)


def test_a_budget_of_prompt_tokens_does_not_shrink_with_rows():
    flags = SYSTEMS[mixed(64)]
    budget = int(flags[flags.index("--decode-token-budget") + 1])
    for num_rows in range(5):
        assert cut(0, 2048, budget - num_rows, 16) == 64


def test_gaps_are_per_token_and_exclude_the_head():
    deliveries = [Delivery(float(n), 1) for n in range(HEAD_TOKENS + 2)]
    answer = MeasuredAnswer(0.0, 30.0, (*deliveries, Delivery(HEAD_TOKENS + 5.0, 2)), HEAD_TOKENS + 4)
    assert gaps_of(answer) == [1.0, 2.0, 2.0]


def test_goodput_counts_requests_that_met_all_objectives():
    facts = block("a", 4.0, *flat(GOOD, GOOD, UNEVEN, SLOW, LATE))
    assert goodput.goodput(facts, OBJECTIVES.meets_tpot) == 3 / 4.0
    assert goodput.goodput(facts, OBJECTIVES.meets_gap) == 3 / 4.0
    assert goodput.goodput(block("a", 4.0, *flat(LATE)), OBJECTIVES.meets_gap) == 0.0


def test_a_blocks_values_come_from_its_rows():
    deliveries = (Delivery(0.5, 1), Delivery(0.7, 1), Delivery(1.5, 1))
    row = RequestRow(0, 0.0, 0.0, 2.0, 1.5, 3, 10, 3, deliveries, "length", None)
    wall_s, ttft_s, tpot_s, largest_gap_s = values_of([row])
    assert (wall_s, ttft_s) == (3.5, 0.5)
    assert tpot_s == pytest.approx(0.5)
    assert largest_gap_s == pytest.approx(0.8)


def test_split_is_compared_with_the_best_colocated_at_best_loads():
    options = goodput.parse(["--loads", "1", "2"])
    good = {SPLIT: (1, 4), MIXED: (2, 0), UNCHUNKED: (1, 1)}
    blocks = [
        block(arm_of(name, load), 2.0, *flat(*[GOOD] * num_good, LATE))
        for name, counts in good.items()
        for load, num_good in zip(options.loads, counts, strict=True)
    ]
    figures = {f.name: f.overall.median for f in goodput.findings_of(options, OBJECTIVES, blocks)}
    assert figures["split: goodput by TPOT"] == 2.0
    assert figures["mixed chunks: goodput by TPOT"] == 1.0
    assert figures["split / best colocated: goodput by TPOT"] == 2.0
    assert figures["mixed chunks: answers, good or not"] == 1.5


def test_deployments_get_equal_lengths_at_equal_times():
    lots = goodput.parse(["--seed", "7"])
    few = interference.parse(["--seed", "7"])

    def seen(plan: Sequence[PlannedRequest]) -> list[tuple[float, int, int]]:
        return [(request.arrival_s, len(request.prompt), request.max_tokens) for request in plan]

    def zeros(num_tokens: int) -> tuple[int, ...]:
        return (0,) * num_tokens

    def ones(num_tokens: int) -> tuple[int, ...]:
        return (1,) * num_tokens

    here = [goodput.plan_block(lots, CAPACITY, zeros, 0.9, turn) for turn in range(2)]
    there = [goodput.plan_block(lots, CAPACITY, ones, 0.9, turn) for turn in range(2)]
    assert [seen(plan) for plan in here] == [seen(plan) for plan in there]
    assert seen(here[0]) != seen(here[1])
    assert here[0][0].prompt != there[0][0].prompt
    some = interference.plan_block(few, 0.5, zeros, 3)
    assert seen(some) == seen(interference.plan_block(few, 0.5, ones, 3))
    assert [request.arrival_s for request in some] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert all(1024 <= len(request.prompt) <= 2048 for request in some)


def test_loads_and_objectives_are_multiples_of_measured_times():
    options = goodput.parse(["--tpot-factor", "2", "--gap-factor", "5", "--ttft-factor", "6"])
    objectives = CAPACITY.objectives(options)
    assert (objectives.ttft_s, objectives.tpot_s, objectives.gap_s) == pytest.approx((4.8, 0.02, 0.05))
    assert CAPACITY.rate(0.9) == pytest.approx(1.8)
    assert goodput.plan_block(options, CAPACITY, lambda num: (0,) * num, 0.9, 0)[-1].arrival_s == pytest.approx(
        24 / 1.8
    )


def test_interference_is_a_ratio_of_99th_percentiles():
    options = interference.parse(["--prompts", "2", "--budgets", "16"])
    blocks = [
        block(alone(SPLIT), *[0.01] * 100),
        block(alone(LENT), *[0.005] * 100),
        block(alone(COLOCATED), *[0.02] * 100),
        block(beside(LENT), 3.0, 5.0, *[0.01] * 90, *[0.03] * 10),
        block(beside(SPLIT), 3.0, 5.0, *[0.01] * 90, *[0.03] * 10),
        block(beside(UNCHUNKED), 1.0, 2.0, *[0.02] * 90, *[0.9] * 10),
        block(beside(mixed(16)), 2.0, 4.0, *[0.05] * 100),
    ]
    figures = {f.name: f.overall.median for f in interference.findings_of(options, blocks)}
    assert figures["split: p99 gap beside prompts / alone"] == pytest.approx(3.0)
    assert figures["split, lent cores: p99 gap beside prompts / alone"] == pytest.approx(6.0)
    assert figures["unchunked: p99 gap beside prompts / alone"] == pytest.approx(45.0)
    assert figures["mixed chunks of 16: p99 gap beside prompts / alone"] == pytest.approx(2.5)
    assert figures["mixed chunks of 16: p50 first token of a prompt"] == pytest.approx(3000.0)
    assert figures["mixed chunks of 16: p50 first token of a prompt / unchunked"] == pytest.approx(2.0)
    assert figures["split: beside prompts: gaps"] == 100


def test_gaps_count_where_they_end():
    clock = iter((0.0, 1.0, 5.0, 5.5, 9.0))
    times = TokenTimes(lambda: next(clock))
    for num_tokens in (1, HEAD_TOKENS - 2, 1, 2, 1):
        assert times.past_head.is_set() == (times.num_tokens >= HEAD_TOKENS)
        times(num_tokens)
    assert times.gaps(2.0, 6.0) == [4.0, 0.25, 0.25]
