"""Rows that outgrow a decode worker go on at a peer, from the pages that they have left; faults cost only work.

The clients check every token, the simulation every invariant.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from baton.domain.ids import RequestId
from simulation.run import RunResult, run
from simulation.scenario import ClientPlan, FaultPlan, Noise, Scenario, SimFaultKind

NUM_CLIENTS, BEGIN_S, SPREAD_S = 4, 2.0, 0.3
GIVES, SENT_BACK = "GivesSentBack", "code=sent_back"


def scenario(seed: int, *faults: FaultPlan) -> Scenario:
    """Four answers of about a pool's length on two decode workers, most of them without host memory for a row."""
    rng = Random(f"send back {seed}")
    clients = tuple(
        ClientPlan(
            RequestId(f"r{number}"),
            BEGIN_S + SPREAD_S * rng.random(),
            tuple(rng.randrange(2) for _ in range(rng.randint(2, 4))),
            rng.randint(12, 20),
            number,
        )
        for number in range(NUM_CLIENTS)
    )
    return Scenario(
        seed=seed,
        num_routers=1,
        num_prefills=1,
        num_decodes=2,
        digests=True,
        num_host_pages=seed % 4,
        mean_step_s=0.01,
        deadline_s=60.0,
        noise=Noise(),
        clients=clients,
        faults=faults,
        gives_pages=True,
        sessions=bool(seed % 2),
    )


def counts(results: list[RunResult]) -> Counter[str]:
    """Attempts that failed with `SENT_BACK`, and those whose successors were given pages."""
    texts: Counter[str] = Counter()
    for result in results:
        assert result.violation is None, result.violation
        for entry in result.trace.entries:
            texts[GIVES] += entry.text == GIVES
            texts[SENT_BACK] += entry.text.startswith("log attempt_failed") and SENT_BACK in entry.text
    return texts


def test_most_rows_that_are_sent_back_go_on_from_their_pages():
    results = [run(scenario(seed)) for seed in range(12)]
    texts = counts(results)
    assert all(outcome.endswith("finished ") for result in results for outcome in result.outcomes)
    assert texts[SENT_BACK] >= 8
    assert texts[GIVES] >= texts[SENT_BACK] / 2, texts


def test_the_death_of_any_worker_in_the_middle_costs_only_work():
    results = []
    for seed in range(12):
        rng = Random(f"deaths {seed}")
        target = rng.choice(["decode-0", "decode-1", "prefill-0"])
        kill = FaultPlan(SimFaultKind.KILL, BEGIN_S + 0.6 * rng.random(), 0.5, target)
        results.append(run(scenario(seed, kill)))
    texts = counts(results)
    assert all(outcome.endswith("finished ") for result in results for outcome in result.outcomes)
    assert texts[SENT_BACK] >= 4
    assert texts[GIVES] >= 2, texts
