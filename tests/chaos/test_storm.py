"""Kills at a rate, on a cluster that only notes them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from baton.store.memory_store import MemoryStore
from chaos.storm import KilledState, StormSettings, run_storm
from chaos.testbed.cluster import WaitTimeout

ROLES = {"prefill-0": "prefill", "decode-0": "decode", "router-0": "router"}


class NotedCluster:
    """Notes kills and recoveries. `late`: no process comes back in time. `leaves`: a drained process fails at once.

    Restarted routers are in service at once, workers are not.
    """

    def __init__(self, *, late: bool = False, leaves: bool = False) -> None:
        self._leaves = leaves
        self._dead: list[str] = []
        self._drained: set[str] = set()
        self.shape = SimpleNamespace(names=ROLES, tenants=())
        self.processes: dict[str, Any] = {}
        self.store = MemoryStore()
        self.log: list[str] = []
        self._late = late

    def names(self, *roles: str) -> list[str]:
        return [name for name, role in ROLES.items() if not roles or role in roles]

    async def kill(self, name: str) -> bool:
        self.log.append(f"kill {ROLES[name]}")
        self._dead.append(name)
        return name not in self._drained or not self._leaves

    def drain(self, name: str) -> None:
        self._drained.add(name)

    def bad_exits(self, name: str) -> list[str]:
        return [f"{name} left with 1"]

    async def in_service(self, name: str) -> bool:
        return name == "router-0"

    async def recover(self) -> list[str]:
        self.log.append("recover")
        restarted, self._dead = self._dead, []
        self._drained -= {*restarted}
        return restarted

    def unexpected_exits(self) -> list[str]:
        return []

    async def wait_in_service(self, timeout_s: float) -> None:
        if self._late:
            raise WaitTimeout("late")

    async def wait_idle(self, timeout_s: float) -> None:
        self.log.append("idle")


@pytest.mark.parametrize(("late", "max_at_once"), [(False, 1), (True, 1), (False, 3)])
async def test_every_kill_is_recovered_counted_and_checked(late: bool, max_at_once: int):
    cluster = NotedCluster(late=late)
    harness: Any = SimpleNamespace(cluster=cluster, client=None, oracle=None)
    report = await run_storm(harness, 4, 0, StormSettings(0.002, 6000, 0.0, max_at_once))
    kills = [entry for entry in cluster.log if entry.startswith("kill")]
    assert len(kills) == sum(report.kills.values()) >= 1
    num_moments = cluster.log.count("recover")
    assert num_moments == len(kills) if max_at_once == 1 else num_moments < len(kills)
    assert cluster.log[-1] == "idle"
    assert {f"kill {role}" for role in report.kills} == set(kills)
    assert bool(report.problems) is late
    assert f"{len(kills)} kills" in report.summary()


async def test_kills_are_counted_by_what_they_met(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("chaos.storm.LONGEST_DRAIN_S", 0.0)
    monkeypatch.setattr("chaos.storm.LONGEST_START_S", 0.0)
    cluster = NotedCluster()
    harness: Any = SimpleNamespace(cluster=cluster, client=None, oracle=None)
    written: list[str] = []
    settings = StormSettings(1.0, 1e9, 0.0, 3, drain_share=0.5, start_share=0.3, max_kills=60)
    report = await run_storm(harness, 4, 0, settings, lambda report: written.append(report.as_json()))
    assert 60 <= report.kills.total() == report.met.total() < 70
    assert min(report.met[state.value] for state in KilledState) > 5
    assert report.kills.total() == sum(entry.startswith("kill") for entry in cluster.log)
    assert json.loads(written[-1])["met"] == dict(report.met)
    assert report.problems == []


async def test_a_process_that_had_left_is_no_kill(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("chaos.storm.LONGEST_DRAIN_S", 0.0)
    harness: Any = SimpleNamespace(cluster=NotedCluster(leaves=True), client=None, oracle=None)
    report = await run_storm(harness, 4, 0, StormSettings(1.0, 1e9, 0.0, 1, drain_share=0.5, max_kills=9))
    assert report.kills.total() == report.met["in service"] == 9
    assert report.num_left == len(report.problems) > 0
