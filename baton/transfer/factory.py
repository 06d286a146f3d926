"""Choice and construction of transports. Called by the workers' `app` and by the link handshake."""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.kv.memory import PoolMemory
from baton.transfer import nixl, stream
from baton.transfer.base import OnPullEvent
from baton.transfer.nixl_agent import nixl_available
from baton.transfer.puller import ThreadedPuller
from baton.transfer.puller_set import PullerSet
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.source import PageEndpoint, StreamSource


def usable_transports(setting: str) -> tuple[str, ...]:
    """Transports that `setting` ("auto", "nixl" or "stream") allows on this machine, best first.

    "auto" allows both if NIXL can be loaded, so that peers without it stay reachable. Raises `LinkBroken` for "nixl"
    if it cannot be loaded, `ValueError` for an unknown setting.
    """
    if setting not in ("auto", nixl.TRANSPORT, stream.TRANSPORT):
        raise ValueError(f"no transport is called {setting!r}")
    if setting == stream.TRANSPORT:
        return (stream.TRANSPORT,)
    missing = nixl_available()
    if setting == nixl.TRANSPORT and missing is not None:
        raise LinkBroken(f"the transport is set to nixl, but: {missing}")
    if setting == nixl.TRANSPORT:
        return (nixl.TRANSPORT,)
    return (nixl.TRANSPORT, stream.TRANSPORT) if missing is None else (stream.TRANSPORT,)


def choose_transport(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """First of `ours` that is among `theirs`. Raises `LinkBroken` if there is none."""
    for transport in ours:
        if transport in theirs:
            return transport
    raise LinkBroken(f"transports: {', '.join(ours)} here, {', '.join(theirs)} there")


def make_source(
    transport: str,
    worker_id: WorkerId,
    incarnation: Incarnation,
    memory: PoolMemory,
    trust: ClusterTrust = OPEN_CLUSTER,
    endpoint: PageEndpoint = PageEndpoint(),  # noqa: B008  (frozen)
) -> nixl.NixlSource | StreamSource:
    """Makes this process's pool readable. A `StreamSource` serves reads at `endpoint` and through the Handoff service.

    Raises `LinkBroken` if UCX cannot start or the endpoint's port is taken, `ValueError` for an unknown transport.
    """
    if transport == nixl.TRANSPORT:
        return nixl.NixlSource(worker_id, incarnation, memory, trust)
    if transport == stream.TRANSPORT:
        return StreamSource(incarnation, memory, trust, endpoint)
    raise ValueError(f"no transport is called {transport!r}")


def make_puller(
    transport: str,
    worker_id: WorkerId,
    incarnation: Incarnation,
    memory: PoolMemory,
    on_event: OnPullEvent,
    trust: ClusterTrust = OPEN_CLUSTER,
) -> ThreadedPuller:
    """Starts a transfer thread that pulls into `memory`.

    Raises `LinkBroken` if UCX cannot start, `ValueError` for an unknown transport.
    """
    if transport == nixl.TRANSPORT:
        return nixl.NixlPuller(worker_id, incarnation, memory, on_event, trust)
    if transport == stream.TRANSPORT:
        return StreamPuller(memory, on_event, trust)
    raise ValueError(f"no transport is called {transport!r}")


def make_pullers(
    transports: Sequence[str],
    worker_id: WorkerId,
    incarnation: Incarnation,
    memory: PoolMemory,
    on_event: OnPullEvent,
    trust: ClusterTrust = OPEN_CLUSTER,
) -> PullerSet:
    """A puller for each of `transports`, best first. Raises as `make_puller`."""
    pullers: list[ThreadedPuller] = []
    try:
        for transport in transports:
            pullers.append(make_puller(transport, worker_id, incarnation, memory, on_event, trust))
    except Exception:
        for puller in pullers:
            puller.close()
        raise
    return PullerSet(pullers)
