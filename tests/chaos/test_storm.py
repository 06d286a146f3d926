"""Kills at a rate, on a cluster that only notes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.store.memory_store import MemoryStore
from chaos.storm import run_storm
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


@pytest.mark.parametrize("late", [False, True])
async def test_every_kill_is_recovered_counted_and_checked(late: bool):
    cluster = NotedCluster(late=late)
    harness: Any = SimpleNamespace(cluster=cluster, client=None, oracle=None)
    report = await run_storm(harness, 3, 0, minutes=0.002, kills_per_minute=6000, rest_s=0.0)
    kills = [entry for entry in cluster.log if entry.startswith("kill")]
    assert len(kills) == sum(report.kills.values()) > 1
    assert cluster.log.count("recover") == len(kills)
    assert cluster.log[-1] == "idle"
    assert {f"kill {role}" for role in report.kills} == set(kills)
    assert bool(report.problems) is late
    assert f"{len(kills)} kills" in report.summary()
