"""Many seeds without a violation, repeatable runs, and faults that really happen."""

from collections import Counter
from dataclasses import asdict
from functools import cache

import pytest

from baton.engine.chunking import ChunkPolicy
from baton.kv.eviction import EvictionPolicy
from baton.kv.growth import GrowthPolicy
from baton.services.prefill.policy import PrefillPolicy
from baton.settings.tiers import TierWrite
from simulation.report import describe
from simulation.run import RunResult, run
from simulation.scenario_generator import generate_scenario
from simulation.scheduling_plan import DEFAULT_SCHEDULING
from simulation.shrink import shrink
from simulation.sweep import SweepResult, sweep

NUM_SEEDS = 200
NUM_SHARDS = 4

EXPECTED_PREFIXES = (
    *("kill", "freeze", "hang", "drain", "cut", "one-way cut", "slow", "kill store", "freeze store", "kill router"),
    *("log attempt_failed", "hangs up", "loses its connection", "comes back", "has left", "Preempted", "ExportExpired"),
    *("wipe store", "roll back store", "the store is rolled back", "log store_reset", "pages rot", "log pages_wrong"),
    *("log link_down", "log link_breaker_opened", "log call_claimed", "log takeover_started", "AskExport"),
    *("budgets", "log budgets_changed", "reads "),
    *("kill encode", "drain encode", "freeze encode", "embeddings rot", "log embedding_not_pulled"),
)
RARE_SEEDS = {"code=integrity_failure": (63, 183), "code=sent_back": (209, 79)}
"""Over calls and over sessions: the pages of a handoff are wrong twice, and rows are sent back."""

FILE_SEEDS = (107, 159)
"""Pages are read back from files: whole ones, and some with window slots."""

EXPECTED_SUBSTRINGS = (
    *("keepalive", "code=worker_lost", "code=link_broken", "code=sent_back", "code=integrity_failure"),
    *("refused overloaded", "refused no_workers"),
    *("PutMedia", "PullEmbedding", "differs from its digest", "write_chains arrives at the store, late"),
)


@cache
def result_for_seed(seed: int) -> RunResult:
    """Runs each seed once for all tests here."""
    return run(generate_scenario(seed))


def test_every_setting_of_scheduling_is_drawn():
    """Each field takes at least two values, choices all of theirs, and priorities differ where workers heed them."""
    scenarios = [generate_scenario(seed) for seed in range(NUM_SEEDS)]
    for name, one in asdict(DEFAULT_SCHEDULING).items():
        drawn = {getattr(scenario.scheduling, name) for scenario in scenarios}
        assert drawn >= set(type(one)) if isinstance(one, ChunkPolicy) else len(drawn) > 1, (name, drawn)
    drawn_writes = {scenario.scheduling.file_write for scenario in scenarios}
    assert drawn_writes == {*TierWrite, None} == {scenario.host_write for scenario in scenarios}
    assert {scenario.prefill_policy for scenario in scenarios} == set(PrefillPolicy)
    assert {scenario.growth for scenario in scenarios} == set(GrowthPolicy)
    assert {scenario.eviction for scenario in scenarios} == set(EvictionPolicy)
    for scenario in scenarios:
        priorities = {client.priority for client in scenario.clients}
        assert scenario.scheduling.by_priority or priorities == {0}
    assert sum(len({client.priority for client in one.clients}) > 1 for one in scenarios) > NUM_SEEDS // 8


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_no_seed_breaks_an_invariant(shard: int):
    for seed in range(shard, NUM_SEEDS, NUM_SHARDS):
        result = result_for_seed(seed)
        if result.violation is not None:
            pytest.fail(describe(shrink(result, run)))


@pytest.mark.parametrize("seed", [3, 7, 16, 35])
def test_a_seed_is_the_same_run_every_time(seed: int):
    first, second = result_for_seed(seed), run(generate_scenario(seed))
    assert first.trace.entries == second.trace.entries
    assert first.trace.digest() == second.trace.digest()
    assert len(first.trace.entries) > 100


def test_limited_answers_and_scores_are_drawn_and_come_to_their_end():
    """The clients check tokens and scores; here, that there are such clients, and that they finish."""
    finished: Counter[str] = Counter()
    for seed in range(0, 50, 10):
        scenario = generate_scenario(seed)
        outcomes = dict(outcome.split(" ", 1) for outcome in run(scenario).outcomes)
        done = [plan for plan in scenario.clients if outcomes[plan.name].strip() == "finished"]
        finished["regex"] += sum(bool(plan.regex) for plan in done)
        finished["allowed"] += sum(bool(plan.allowed) for plan in done)
        finished["scored"] += sum(plan.prompt_logprobs is not None for plan in done)
    assert min(finished[name] for name in ("regex", "allowed", "scored")) >= 2, finished


def test_answers_about_images_are_drawn_and_come_to_their_end():
    """Encoded in prefill, on encode workers only, and on either. The clients check the tokens."""
    finished: Counter[tuple[bool, bool]] = Counter()
    for result in map(result_for_seed, range(1, 60)):
        scenario = result.scenario
        outcomes = dict(outcome.split(" ", 1) for outcome in result.outcomes)
        with_images = [plan.name for plan in scenario.clients if plan.images and outcomes[plan.name] == "finished "]
        finished[bool(scenario.num_encoders), scenario.towers] += len(with_images)
    assert all(finished[kind] >= 5 for kind in ((False, True), (True, True), (True, False))), finished


def test_no_request_fails_without_faults():
    for seed in range(0, 50, 10):
        result = run(generate_scenario(seed).without_faults())
        outcomes = {outcome.split(" ", 1)[1].strip() for outcome in result.outcomes}
        assert outcomes <= {"finished", "hung up"}, result.outcomes


def test_every_simulated_event_happens():
    """Runs without any fault would prove nothing."""
    seeds = (*range(1, 60), *FILE_SEEDS, *(seed for rare in RARE_SEEDS.values() for seed in rare))
    texts = [entry.text for seed in seeds for entry in result_for_seed(seed).trace.entries]
    for begins in EXPECTED_PREFIXES:
        assert any(text.startswith(begins) for text in texts), begins
    for holds in EXPECTED_SUBSTRINGS:
        assert any(holds in text for text in texts), holds


def test_each_rare_seed_shows_what_it_is_named_for():
    for text, seeds in RARE_SEEDS.items():
        drawn = [generate_scenario(seed) for seed in seeds]
        assert {(one.sessions, one.link_sessions) for one in drawn} == {(False, False), (True, True)}, text
        for seed in seeds:
            assert any(text in entry.text for entry in result_for_seed(seed).trace.entries), (text, seed)


def test_some_answers_end_when_their_model_is_replaced():
    """Every worker is upgraded in mid-run: some answers lose the last worker that could have completed them."""
    results = [result_for_seed(seed) for seed in range(6, 230, 10)]
    assert [result.violation for result in results] == [None] * len(results)
    outcomes = Counter(outcome.split(" ", 1)[1].strip() for result in results for outcome in result.outcomes)
    assert outcomes["finished"] > outcomes["failed model_replaced"] > 0


def test_no_request_fails_because_of_a_drain():
    """Workers and routers drain in mid-run and return: no request fails, and none is refused without need."""
    results = [result_for_seed(seed) for seed in range(5, NUM_SEEDS, 10)]
    assert [result.violation for result in results] == [None] * len(results)
    assert all(result.scenario.only_drains and result.scenario.faults for result in results)
    left = [entry.source for result in results for entry in result.trace.entries if entry.text == "has left"]
    assert {place.partition("-")[0] for place in left} == {"router", "prefill", "decode", "encode"}


def test_a_burst_is_admitted_in_part_and_ends():
    """More clients come at once than are admitted: some are refused, all others are answered."""
    result = run(generate_scenario(7).without_faults())
    outcomes = Counter(outcome.split(" ", 1)[1].strip() for outcome in result.outcomes)
    assert result.violation is None
    assert outcomes["refused overloaded"] > 0
    assert set(outcomes) <= {"finished", "hung up", "refused overloaded", "failed deadline_exceeded"}


def test_a_parallel_sweep_runs_the_same_seeds():
    good: list[int] = []
    assert sweep(first=3, num_seeds=14, num_jobs=2, progress=good.append) == SweepResult(14, 17, None)
    assert good[-1] == 14
