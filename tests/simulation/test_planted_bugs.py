"""Checks the simulation itself: each bug is planted in every worker, and a few seeds must find it."""

from dataclasses import replace

import pytest

from baton.services.decode.scheduler import DecodeScheduler
from simulation.policies import PolicyClasses
from simulation.report import describe
from simulation.run import RunResult, run
from simulation.scenario import BEGIN_S, FaultPlan, Scenario, SimFaultKind
from simulation.scenario_generator import generate_scenario
from simulation.shrink import shrink
from tests.simulation import planted_bugs

MAX_SEEDS = 100


@pytest.mark.parametrize(
    ("policies", "rules", "first"),
    [
        pytest.param(PolicyClasses(export_table=planted_bugs.UnpinsBeforeCommit), {"crash", "I2"}, 6, id="late unpin"),
        pytest.param(PolicyClasses(export_table=planted_bugs.NeverUnpins), {"I5", "I8"}, 1, id="never unpin"),
        pytest.param(
            PolicyClasses(export_table=planted_bugs.AcceptsOlderAttempts), {"I3", "I4"}, 17, id="missing fencing"
        ),
        pytest.param(
            PolicyClasses(import_table=planted_bugs.CommitsDuringReads),
            {"crash", "I1", "I2", "I8"},
            1,
            id="no drain",
        ),
        pytest.param(
            PolicyClasses(import_table=planted_bugs.CommitsUnannouncedPages), {"crash", "I2"}, 1, id="pages missing"
        ),
        pytest.param(
            PolicyClasses(import_table=planted_bugs.FreesDuringReads),
            {"crash", "I1"},
            1,
            id="freed under a read",
        ),
        pytest.param(
            PolicyClasses(import_table=planted_bugs.ReservesPagesTwice),
            {"crash", "I6", "I8"},
            3,
            id="reserved twice",
        ),
        pytest.param(PolicyClasses(decode_scheduler=planted_bugs.EmitsTwice), {"I4"}, 1, id="double emit"),
        pytest.param(PolicyClasses(decode_scheduler=planted_bugs.ForgetsConstraints), {"I2"}, 1, id="constraint lost"),
        pytest.param(
            PolicyClasses(prefill_scheduler=planted_bugs.ScoresCachedPages),
            {"drain", "I8", "I9", "probe"},
            12,
            id="cached pages scored",
        ),
        pytest.param(
            PolicyClasses(decode_scheduler=planted_bugs.SettlesBeforeTheWalk), {"I2"}, 18, id="settled before the walk"
        ),
        pytest.param(
            PolicyClasses(decode_scheduler=planted_bugs.AcceptsBehindAFinish),
            {"crash", "I2", "I4"},
            1,
            id="behind a finish",
        ),
        pytest.param(
            PolicyClasses(decode_scheduler=planted_bugs.KeepsProposalAtPreemption),
            {"crash", "I2", "I4"},
            177,
            id="proposal kept at preemption",
        ),
        pytest.param(
            PolicyClasses(store=planted_bugs.ReadsOneTooFar),
            {"I2", "I4", "I9", "I10", "drain"},
            1,
            id="resumed from the wrong index",
        ),
        pytest.param(PolicyClasses(store=planted_bugs.ForgetsToEndCalls), {"I9"}, 1, id="calls never end"),
        pytest.param(
            PolicyClasses(ownership=planted_bugs.NeverRenewsLease),
            {"I3", "I4", "I7", "I8", "I9"},
            4,
            id="lease never renewed",
        ),
    ],
)
def test_a_planted_bug_is_found(policies: PolicyClasses, rules: set[str], first: int):
    """`first`: the seed to begin with, one that has found it."""
    seeds = range(first, first + MAX_SEEDS)
    violations = (run(generate_scenario(seed), policies).violation for seed in seeds)
    found = next((violation for violation in violations if violation is not None), None)
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    assert found.rule in rules, str(found)


@pytest.mark.parametrize(
    ("scheduler", "first", "rules"),
    [
        pytest.param(planted_bugs.SettlesTreesBeforeTheWalk, 574, {"I2"}, id="settled before the walk"),
        pytest.param(planted_bugs.AcceptsTreesBehindAFinish, 4, {"crash", "I2", "I4"}, id="behind a finish"),
    ],
)
def test_a_planted_bug_of_trees_is_found(scheduler: type[DecodeScheduler], first: int, rules: set[str]):
    """`first`: the seed to begin with; few seeds cache a page that a rejected node has filled."""
    drawn = map(generate_scenario, range(first, first + MAX_SEEDS))
    policies = PolicyClasses(decode_scheduler=scheduler)
    results = (run(scenario, policies) for scenario in drawn if scenario.draft_trees)
    found = next((result for result in results if result.violation is not None), None)
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    assert found.violation is not None
    assert found.violation.rule in rules, str(found.violation)
    assert run(found.scenario).violation is None


def preempting_scenario(seed: int) -> Scenario:
    """Answers that together exceed the pages of one decode worker with trees, and nothing else that goes wrong."""
    quiet = generate_scenario(seed).without_faults()
    clients = tuple(
        replace(client, at_s=BEGIN_S, patience_s=None, max_tokens=12, stop_token=None, regex="", prompt_logprobs=None)
        for client in quiet.clients
    )
    return replace(
        quiet,
        num_decodes=1,
        num_host_pages=8,
        clients=clients,
        deadline_s=8.0,
        drafts=True,
        draft_trees=True,
        num_window_slots=None,
    )


def test_a_tree_that_is_kept_at_preemption_is_found():
    policies = PolicyClasses(decode_scheduler=planted_bugs.KeepsTreeAtPreemption)
    seeds = range(29, 29 + MAX_SEEDS)
    found = next((r for r in (run(preempting_scenario(seed), policies) for seed in seeds) if r.violation), None)
    assert found is not None
    assert found.violation is not None
    assert found.violation.rule in {"crash", "I2", "I4"}, str(found.violation)
    assert run(found.scenario).violation is None


def burst_scenario(seed: int) -> Scenario:
    """Many clients come at once, and their only router drains while most of them wait."""
    leaves = FaultPlan(SimFaultKind.DRAIN, BEGIN_S + 0.1, 0.5, "router-0")
    clients = tuple(replace(client, router="router-0") for client in generate_scenario(seed).clients)
    return replace(generate_scenario(seed).without_faults(), num_routers=1, clients=clients, faults=(leaves,))


def test_a_drain_that_drops_waiting_requests_is_found():
    assert run(burst_scenario(7)).violation is None
    violation = run(burst_scenario(7), PolicyClasses(dispatcher=planted_bugs.DropsWaitingRequests)).violation
    assert violation is not None
    assert violation.rule == "drain"


def takeover_race_scenario(seed: int) -> Scenario:
    """Three routers. One dies with many open calls, which both others claim."""
    lost = generate_scenario(seed).without_faults()
    clients = tuple(replace(client, router="router-0", patience_s=None) for client in lost.clients)
    dies = FaultPlan(SimFaultKind.KILL, BEGIN_S + 0.5, 3.0, "router-0")
    return replace(lost, num_routers=3, clients=clients, faults=(dies,), mean_step_s=0.2, deadline_s=8.0)


def test_a_claim_without_compare_and_set_is_found():
    seeds = range(7, 207, 10)
    assert run(takeover_race_scenario(7)).violation is None
    violations = (
        run(takeover_race_scenario(seed), PolicyClasses(store=planted_bugs.ClaimsWithoutComparing)).violation
        for seed in seeds
    )
    found = next((violation for violation in violations if violation is not None), None)
    assert found is not None
    assert found.rule == "I3"


def late_journal_scenario(seed: int) -> Scenario:
    """What a router writes during long answers arrives after its lease, when the other one has claimed its calls."""
    long = generate_scenario(seed).without_faults()
    clients = tuple(
        replace(client, router="router-0", patience_s=None, max_tokens=12, stop_token=None) for client in long.clients
    )
    cut = FaultPlan(SimFaultKind.CUT_ONE_WAY, BEGIN_S + 0.5, 2.4, "router-0", "store")
    return replace(
        long, num_routers=2, clients=clients, faults=(cut,), mean_step_s=0.2, deadline_s=8.0, draft_trees=False
    )


def test_a_journal_without_fencing_is_found():
    policies = PolicyClasses(store=planted_bugs.JournalsWithoutFencing)
    violations = ((seed, run(late_journal_scenario(seed), policies).violation) for seed in range(7, 307, 10))
    seed, found = next(((seed, violation) for seed, violation in violations if violation is not None), (0, None))
    assert found is not None
    assert found.rule == "I3"
    assert run(late_journal_scenario(seed)).violation is None


@pytest.mark.parametrize("policies", [PolicyClasses(dispatcher=planted_bugs.ForgetsPinnedModel)], ids=["replay"])
def test_an_answer_of_two_models_is_found(policies: PolicyClasses):
    rollouts = range(116, 516, 10)
    found = next(
        (v for v in (run(generate_scenario(seed), policies) for seed in rollouts) if v.violation is not None), None
    )
    assert found is not None
    assert found.violation is not None
    assert found.violation.rule == "I10"
    assert run(found.scenario).violation is None


def rollout_takeover_scenario(seed: int) -> Scenario:
    """A router dies with open calls, shortly before all workers are upgraded."""
    quiet = generate_scenario(seed).without_faults()
    workers = (*quiet.prefills, *quiet.decodes)
    clients = tuple(
        replace(client, router="router-0", patience_s=None, returns=True, max_tokens=12, stop_token=None)
        for client in quiet.clients
    )
    rollout = [FaultPlan(SimFaultKind.UPGRADE, BEGIN_S + 0.6, 0.1, worker) for worker in workers]
    dies = FaultPlan(SimFaultKind.KILL, BEGIN_S + 0.5, 9.0, "router-0")
    return replace(quiet, num_routers=2, clients=clients, faults=(dies, *rollout), mean_step_s=0.2, deadline_s=8.0)


def test_a_takeover_without_the_pinned_model_is_found():
    seeds, policies = range(7, 107, 10), PolicyClasses(store=planted_bugs.DropsFingerprint)
    found = next(
        (v for v in (run(rollout_takeover_scenario(seed), policies) for seed in seeds) if v.violation is not None), None
    )
    assert found is not None
    assert found.violation is not None
    assert found.violation.rule == "I10"
    assert run(found.scenario).violation is None


def test_a_failure_is_shrunk_and_reported():
    policies = PolicyClasses(import_table=planted_bugs.CommitsDuringReads)

    def run_planted(scenario: Scenario) -> RunResult:
        return run(scenario, policies)

    failing = next(v for v in (run_planted(generate_scenario(seed)) for seed in range(1, MAX_SEEDS)) if v.violation)
    smallest = shrink(failing, run_planted)
    assert len(smallest.scenario.clients) + len(smallest.scenario.faults) < (
        len(failing.scenario.clients) + len(failing.scenario.faults)
    )
    assert failing.violation is not None
    assert smallest.violation is not None
    assert smallest.violation.rule == failing.violation.rule
    assert "VIOLATION" in describe(smallest)
