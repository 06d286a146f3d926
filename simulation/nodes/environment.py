"""The environment of a simulated worker: networks, store, policies and scenario of its run."""

from __future__ import annotations

from dataclasses import dataclass

from simulation.nodes.file_tier import SimFiles
from simulation.nodes.state_store import StoreServer
from simulation.policies import PolicyClasses
from simulation.runtime.network import SimNetwork
from simulation.runtime.page_reads import PageNetwork
from simulation.runtime.process import OnProcessCrash
from simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class SimEnvironment:
    """Shared parts of a run. `on_crash` receives errors of engines."""

    network: SimNetwork
    page_network: PageNetwork
    store_server: StoreServer
    policies: PolicyClasses
    scenario: Scenario
    on_crash: OnProcessCrash
    disks: dict[tuple[str, str], SimFiles]

    def disk(self, name: str, fingerprint: str) -> SimFiles:
        """What earlier processes of this name and model have left in files."""
        return self.disks.setdefault((name, fingerprint), SimFiles())
