"""In half of all seeds routers and workers talk in sessions; here, that what sessions are for really happens in them.

`test_seeds.py` checks the invariants of all seeds, and that a seed over sessions is the same run every time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from simulation.run import run
from simulation.runtime.session_ports import CLOSED
from simulation.scenario_generator import generate_scenario

FAULTY_SEEDS = (14, 16, 28, 29, 44, 46, 53, 55)
"""Seeds over sessions in which links break, workers are lost or processes leave."""


CALLS = (" Generate ", "Reserve ", "Prefill ")
OPENS = ("reserve ", "prefill ")
"""What the trace names instead: the check of silences finds an attempt's workers by it."""


def test_half_of_the_seeds_are_drawn_with_sessions():
    num = sum(generate_scenario(seed).sessions for seed in range(200))
    assert 80 < num < 120


def test_sessions_carry_all_attempts_and_their_connections_break():
    texts: Counter[str] = Counter()
    for seed in FAULTY_SEEDS:
        scenario = generate_scenario(seed)
        assert scenario.sessions, seed
        result = run(scenario)
        assert result.violation is None
        for entry in result.trace.entries:
            for text in ("Session -x", "log session_opened", "state=lost", "state=closed", *CALLS, *OPENS):
                texts[text] += text in entry.text
    assert texts["log session_opened"] > 2 * len(FAULTY_SEEDS)
    assert texts["Session -x"] > len(FAULTY_SEEDS), "connections break"
    assert texts["state=lost"] > 3, "sessions are lost"
    assert texts["state=closed"] > 3, "processes leave"
    assert all(texts[opened] > 5 * len(FAULTY_SEEDS) for opened in OPENS)
    assert not [call for call in CALLS if texts[call]], "no attempt has a call of its own"


LINK_CALLS = frozenset({"Hello", "Watch", "OpenExport", "Commit", "Renew", "Abort"})
LINK_REQUESTS = ("watch", "commit")
"""What the trace names instead."""
WORKERS = ("decode", "prefill")


def test_half_of_the_seeds_are_drawn_with_sessions_of_links():
    num = sum(generate_scenario(seed).link_sessions for seed in range(200))
    assert 80 < num < 120


def test_sessions_carry_all_handoffs_and_their_connections_break():
    asked: Counter[str] = Counter()
    num_broken = 0
    for seed in FAULTY_SEEDS:
        result = run(replace(generate_scenario(seed), link_sessions=True))
        assert result.violation is None
        for entry in result.trace.entries:
            if entry.source.startswith(WORKERS) and "->" in entry.source:
                asked[entry.text.split()[0]] += 1
            dialler, _, listener = entry.source.partition("<->")
            if dialler.startswith(WORKERS) and listener.startswith(WORKERS):
                num_broken += entry.text.startswith("Session -x")
    assert num_broken >= len(FAULTY_SEEDS), "connections between workers break"
    assert all(asked[kind] > 2 * len(FAULTY_SEEDS) for kind in LINK_REQUESTS)
    assert not LINK_CALLS & asked.keys(), "no handoff has a call of its own"


def test_half_of_the_seeds_are_drawn_with_ports_of_sessions():
    num = sum(generate_scenario(seed).session_ports for seed in range(200))
    assert 80 < num < 120


def test_ports_of_sessions_close_between_all_processes():
    """Diallers go to gRPC meanwhile, open sessions included: a port alone loses none, and ends no request."""
    seen: Counter[tuple[str, str]] = Counter()
    for seed in range(0, 80, 10):
        scenario = replace(
            generate_scenario(seed).without_faults(), sessions=True, link_sessions=True, session_ports=True
        )
        result = run(scenario)
        assert result.violation is None
        outcomes = {outcome.split(" ", 1)[1].strip() for outcome in result.outcomes}
        assert outcomes <= {"finished", "hung up"}, result.outcomes
        for entry in result.trace.entries:
            assert "state=lost" not in entry.text, entry
            for text in (f"Session -x {CLOSED}", CLOSED, "log session_port_not_reached"):
                seen[text, entry.source.partition("-")[0]] += text in entry.text
    for text in (f"Session -x {CLOSED}", CLOSED, "log session_port_not_reached"):
        assert all(seen[text, dialler] >= 2 for dialler in ("router", "decode")), (text, seen)
