"""Kills at a rate, on a cluster that only notes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.store.memory_store import MemoryStore
from chaos.storm import StormSettings, run_storm
from chaos.testbed.cluster import WaitTimeout

ROLES = {"prefill-0": "prefill", "decode-0": "decode", "router-0": "router"}


class NotedCluster:
    """Notes kills and recoveries. `late`: no process comes back in time."""

    def __init__(self, *, late: bool) -> None:
        self.shape = SimpleNamespace(names=ROLES)
        self.processes: dict[str, Any] = {}
        self.store = MemoryStore()
        self.log: list[str] = []
        self._late = late

    def names(self, *roles: str) -> list[str]:
        return [name for name, role in ROLES.items() if not roles or role in roles]

    async def kill(self, name: str) -> None:
        self.log.append(f"kill {ROLES[name]}")

    async def recover(self) -> None:
        self.log.append("recover")

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
