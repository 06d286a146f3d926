"""Proof that the simulation can fail: each bug here is planted in every worker, and a few seeds must find it."""

from dataclasses import replace

import pytest

from simulation.draw import scenario_of
from simulation.parts import Parts
from simulation.report import describe
from simulation.scenario import BEGIN_S, FaultKind, FaultPlan, Noise, Scenario
from simulation.shrink import shrink
from simulation.world import Verdict, run
from tests.simulation import planted

MAX_SEEDS = 100


@pytest.mark.parametrize(
    ("parts", "rules"),
    [
        pytest.param(Parts(offer_book=planted.UnpinsBeforeTheCommit), {"crash", "I2"}, id="late unpin"),
        pytest.param(Parts(offer_book=planted.NeverUnpins), {"I5", "I8"}, id="never unpin"),
        pytest.param(Parts(offer_book=planted.TakesOlderAttempts), {"I3", "I4"}, id="missing fence"),
        pytest.param(
            Parts(landing_book=planted.CommitsBeforeTheReadsAreOver), {"crash", "I1", "I2", "I8"}, id="no drain"
        ),
        pytest.param(Parts(landing_book=planted.CommitsBeforeAllIsAnnounced), {"crash", "I2"}, id="pages missing"),
        pytest.param(Parts(landing_book=planted.FreesBeforeTheReadsAreOver), {"crash", "I1"}, id="freed under a read"),
        pytest.param(Parts(landing_book=planted.PromisesTheSamePagesTwice), {"crash", "I6", "I8"}, id="promised twice"),
        pytest.param(Parts(decode_scheduler=planted.EmitsTwice), {"I4"}, id="double emit"),
        pytest.param(Parts(book=planted.JournalsWithoutFencing), {"I3"}, id="unfenced journal"),
        pytest.param(
            Parts(book=planted.ReadsOneTooFar), {"I2", "I4", "I9", "drain"}, id="resumed from the wrong index"
        ),
        pytest.param(Parts(book=planted.ForgetsToEndCalls), {"I9"}, id="calls never end"),
        pytest.param(Parts(ownership=planted.NeverRenewsItsLease), {"I3", "I4", "I8", "I9"}, id="lease never renewed"),
    ],
)
def test_a_planted_bug_is_found(parts: Parts, rules: set[str]):
    violations = (run(scenario_of(seed), parts).violation for seed in range(1, MAX_SEEDS))
    found = next((violation for violation in violations if violation is not None), None)
    assert found is not None, f"not found in {MAX_SEEDS} seeds"
    assert found.rule in rules, str(found)


def crowd(seed: int) -> Scenario:
    """Many come at once, and their only router is told to leave while most of them wait."""
    leaves = FaultPlan(FaultKind.DRAIN, BEGIN_S + 0.1, 0.5, "router-0")
    clients = tuple(replace(client, router="router-0") for client in scenario_of(seed).clients)
    return replace(scenario_of(seed).without_faults(), num_routers=1, clients=clients, faults=(leaves,))


def test_a_drain_that_drops_who_waits_is_found():
    assert run(crowd(7)).violation is None
    violation = run(crowd(7), Parts(dispatcher=planted.DropsWhoWaits)).violation
    assert violation is not None
    assert violation.rule == "drain"


def heirs(seed: int) -> Scenario:
    """Three routers; one dies with many calls open, which the two others want."""
    lost = scenario_of(seed).without_faults()
    clients = tuple(replace(client, router="router-0", patience_s=None) for client in lost.clients)
    dies = FaultPlan(FaultKind.KILL, BEGIN_S + 0.5, 3.0, "router-0")
    return replace(lost, num_routers=3, clients=clients, faults=(dies,), mean_step_s=0.2, deadline_s=8.0)


def test_a_claim_without_compare_and_set_is_found():
    seeds = range(7, 207, 10)
    assert run(heirs(7)).violation is None
    violations = (run(heirs(seed), Parts(book=planted.ClaimsWithoutComparing)).violation for seed in seeds)
    found = next((violation for violation in violations if violation is not None), None)
    assert found is not None
    assert found.rule == "I3"


@pytest.mark.parametrize("parts", [Parts(dispatcher=planted.ForgetsThePin)], ids=["replay"])
def test_an_answer_of_two_models_is_found(parts: Parts):
    rollouts = range(6, 406, 10)
    found = next((v for v in (run(scenario_of(seed), parts) for seed in rollouts) if v.violation is not None), None)
    assert found is not None
    assert found.violation is not None
    assert found.violation.rule == "I10"
    assert run(found.scenario).violation is None


def taken_over(seed: int) -> Scenario:
    """A router dies with its calls under way, and by then every worker is about to get the next model."""
    quiet = scenario_of(seed).without_faults()
    workers = (*quiet.prefills, *quiet.decodes)
    clients = tuple(
        replace(client, router="router-0", patience_s=None, returns=True, max_tokens=12, stop_token=None)
        for client in quiet.clients
    )
    rollout = [FaultPlan(FaultKind.UPGRADE, BEGIN_S + 0.6, 0.1, worker) for worker in workers]
    dies = FaultPlan(FaultKind.KILL, BEGIN_S + 0.5, 9.0, "router-0")
    return replace(quiet, num_routers=2, clients=clients, faults=(dies, *rollout), mean_step_s=0.2, deadline_s=8.0)


def test_a_takeover_that_does_not_learn_the_pin_is_found():
    seeds, parts = range(7, 107, 10), Parts(book=planted.KeepsNoFingerprint)
    found = next((v for v in (run(taken_over(seed), parts) for seed in seeds) if v.violation is not None), None)
    assert found is not None
    assert found.violation is not None
    assert found.violation.rule == "I10"
    assert run(found.scenario).violation is None


def shaky(seed: int) -> Scenario:
    """No digests; prefill and decode hear each other late or not at all, while reads take long."""
    quiet = scenario_of(seed)
    pairs = [(prefill, decode) for prefill in quiet.prefills for decode in quiet.decodes]
    slow = tuple(FaultPlan(FaultKind.SLOW, BEGIN_S, 4.0, prefill, decode) for prefill, decode in pairs)
    noise = Noise(mean_delay_s=0.02, loss=0.1, slow=0.2, read_lateness=0.6)
    return replace(quiet, digests=False, noise=noise, faults=slow)


def test_a_lease_that_is_measured_from_the_reply_is_found():
    seeds, parts = range(1, MAX_SEEDS), Parts(handoffs=planted.MeasuresFromTheReply)
    found = next((seed for seed in seeds if run(shaky(seed), parts).violation is not None), None)
    assert found is not None
    assert run(shaky(found)).violation is None


def test_a_failure_is_made_small_and_shown():
    parts = Parts(landing_book=planted.CommitsBeforeTheReadsAreOver)

    def run_planted(scenario: Scenario) -> Verdict:
        return run(scenario, parts)

    failing = next(v for v in (run_planted(scenario_of(seed)) for seed in range(1, MAX_SEEDS)) if v.violation)
    smallest = shrink(failing, run_planted)
    assert len(smallest.scenario.clients) + len(smallest.scenario.faults) < (
        len(failing.scenario.clients) + len(failing.scenario.faults)
    )
    assert failing.violation is not None
    assert smallest.violation is not None
    assert smallest.violation.rule == failing.violation.rule
    assert "VIOLATION" in describe(smallest)
