"""Transfer by one-sided reads over NIXL/UCX: kernel copies (CMA) on one host, TCP or RDMA between hosts.

A `NixlSource` gives pages, a `NixlPuller` reads them. `nixl_mover` has the life of a read.
"""

from __future__ import annotations

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import PoolMemory
from baton.transfer.base import OnPullEvent, region_of, window_region_of
from baton.transfer.nixl_agent import NixlAgent
from baton.transfer.nixl_metadata import agent_name, encode_metadata
from baton.transfer.nixl_mover import UNKNOWN_PATH, NixlMover
from baton.transfer.puller import Mover, ThreadedPuller

TRANSPORT = "nixl"


class NixlSource:
    """The giving side: registers the pool. A progress thread serves reads while the engine computes."""

    transport = TRANSPORT

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        memory: PoolMemory,
        trust: ClusterTrust = OPEN_CLUSTER,
    ) -> None:
        """Raises `ImportError` without NIXL and `LinkBroken` if UCX cannot start."""
        region = region_of(memory)
        self._memory = memory  # peers hold its address: keep it as long as the agent
        self._agent: NixlAgent | None = NixlAgent(agent_name("source", worker_id, incarnation), progress_thread=True)
        self._agent.register(region)
        if (windows := window_region_of(memory)) is not None:
            self._agent.register(windows)
        self._metadata = encode_metadata(self._agent.metadata(), region, trust)

    def metadata(self) -> bytes:
        """Opaque bytes that a puller needs to connect."""
        return self._metadata

    def close(self) -> None:
        """Stops serving reads; idempotent."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None


class NixlPuller(ThreadedPuller):
    """The reading side."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        memory: PoolMemory,
        on_event: OnPullEvent,
        trust: ClusterTrust = OPEN_CLUSTER,
    ) -> None:
        """Raises `ImportError` without NIXL and `LinkBroken` if UCX cannot start."""
        self._paths: dict[WorkerId, str] = {}
        name = agent_name("puller", worker_id, incarnation)

        def make_mover(_: object) -> Mover:
            return NixlMover(NixlAgent(name, progress_thread=False), memory, self._paths, trust)

        super().__init__(TRANSPORT, memory.part_ends, make_mover, on_event)

    def path(self, source: WorkerId) -> str:
        """`nixl/ucx (cma)`, `nixl/ucx (tcp)` and so on, from UCX's report after the first read.

        `nixl/ucx (unknown)` before it, and where the report names several transports.
        """
        return self._paths.get(source, UNKNOWN_PATH)
