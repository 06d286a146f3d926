"""Simulated clusters whose pages' window parts have few slots: every invariant holds, and a slot that is given back
too early is found. Free slots are overwritten after every step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.kv.page_table import PageTable
from baton.kv.windows.slots import WindowSlots
from simulation.run import run
from simulation.scenario import Scenario
from simulation.scenario_generator import generate_scenario

SEEDS = range(300, 310)
MAX_SEEDS = 40


def scenario(seed: int) -> Scenario:
    return replace(generate_scenario(seed), num_window_slots=5 + seed % 4, draft_trees=False)


def test_nothing_reads_a_slot_that_was_given_back(monkeypatch: pytest.MonkeyPatch):
    num_evicted = 0
    evict = WindowSlots._evict

    def counted(slots: WindowSlots) -> None:
        nonlocal num_evicted
        num_evicted += 1
        evict(slots)

    monkeypatch.setattr(WindowSlots, "_evict", counted)
    assert [run(scenario(seed)).violation for seed in SEEDS] == [None] * len(SEEDS)
    assert num_evicted > 0


def test_a_window_part_that_is_given_back_too_early_is_found(monkeypatch: pytest.MonkeyPatch):
    passes = PageTable.pass_windows
    monkeypatch.setattr(PageTable, "pass_windows", lambda table, position: passes(table, position + table._page_size))
    violations = (run(scenario(seed)).violation for seed in range(SEEDS.start, SEEDS.start + MAX_SEEDS))
    violation = next(filter(None, violations), None)
    assert violation is not None
    assert "window" in str(violation)
