"""The reads of a simulated prefill worker from other workers' caches, wired as in `baton.services.prefill.peer_reader`.

Real: links, client. Simulated: transfer thread, sockets.
"""

from __future__ import annotations

from typing import cast

from baton.domain.fingerprint import Fingerprint
from baton.domain.ids import PageId, WorkerId
from baton.domain.worker import WorkerRole
from baton.kv.windows.memory import WindowedMemory
from baton.services.prefill.commands import PrefillCommand
from baton.transfer.base import Pull
from baton.transfer.puller import ThreadedPuller
from baton.transfer.puller_set import PullerSet
from baton.worker.handoff.export_client import ExportClient
from baton.worker.handoff.links import LINK_GRACE_TTLS, LinkIdentity, PeerLinks
from baton.worker.handoff.session_or_call import PeerClients
from baton.worker.registration import Registration
from simulation.nodes.engine import SimMailbox
from simulation.nodes.environment import SimEnvironment
from simulation.nodes.link_sessions import sim_link_sessions
from simulation.nodes.state_store import SimStore
from simulation.policies import CONFIG, MODEL
from simulation.runtime.grpc_calls import SimChannels
from simulation.runtime.page_memory import SimPages, leading_parts
from simulation.runtime.page_reads import SimPuller
from simulation.runtime.process import SimProcess


class SimPeerReader:
    """Created inside its own process; `begin` starts the tasks."""

    def __init__(
        self,
        process: SimProcess,
        environment: SimEnvironment,
        memory: SimPages,
        fingerprint: Fingerprint,
        mailbox: SimMailbox[PrefillCommand],
        registration: Registration,
    ) -> None:
        network = environment.network
        sim_store = SimStore(environment.store_server, network, process, CONFIG.heartbeat_s)
        self._process = process
        self._puller = SimPuller(process, environment.page_network.add_reader(process), memory, mailbox.put)
        identity = LinkIdentity(
            WorkerId(process.name), process.incarnation, MODEL, fingerprint, memory.page_bytes,
            LINK_GRACE_TTLS * CONFIG.worker_ttl_s, frozenset({WorkerRole.PREFILL, WorkerRole.DECODE}),
            num_leading_parts=leading_parts(memory), has_window_slots=isinstance(memory, WindowedMemory),
        )  # fmt: skip
        pullers = PullerSet([cast(ThreadedPuller, self._puller)])
        self._sessions = sim_link_sessions(environment, process)
        self.links = PeerLinks(
            identity, sim_store, PeerClients(SimChannels(network, process), self._sessions), pullers, mailbox,
            registration.announce_soon,
        )  # fmt: skip
        self.client = ExportClient(self.links, mailbox, CONFIG.renew_s, len(memory.part_ends))

    def begin(self) -> None:
        """Starts what runs as long as the process."""
        for work in (self.links.run(), self.client.renew_forever()):
            self._process.spawn(work, "background")

    def submit(self, pull: Pull) -> None:
        """Starts a read."""
        self._puller.submit(pull)

    def pages_in_flight(self) -> list[PageId]:
        """Pages of this worker that reads in flight may still write."""
        return self._puller.pages_in_flight()

    async def close(self) -> None:
        """See `baton.services.prefill.peer_reader.PeerReader.close`."""
        await self.client.close()
        self.links.close()
        if self._sessions is not None:
            await self._sessions.close()
