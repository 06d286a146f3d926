"""The links between the processes of a cluster: proxies in front of every server, a condition for every pair.

`cluster` owns it; faults change it. Names are those of processes, `redis` for the state store.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from chaos.testbed.bit_flipper import PortKind
from chaos.testbed.connection_owner import Address, connection_owner
from chaos.testbed.proxy import HEALTHY, LinkCondition, LinkState, Proxy

PARTITIONED = LinkCondition(partitioned=True)
UNKNOWN_CLIENT = "stranger"
"""Name of a client outside the cluster."""


class ProxyNetwork:
    """`pids` gives the present process ids by name."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._proxies: dict[tuple[str, str, PortKind], Proxy] = {}
        self._link_states: defaultdict[tuple[str, str], LinkState] = defaultdict(LinkState)

    async def serve(
        self, server: str, upstream: tuple[str, int], client: str = "", kind: PortKind = PortKind.CALLS
    ) -> str:
        """Puts a proxy in front of `server`, or redirects the existing one; returns its host:port.

        With a `client` given the proxy is that client's own; otherwise each connection's client is looked up.
        Each kind of port has a proxy; the links of all of them have the same condition.
        """
        proxy = self._proxies.get((client, server, kind))
        if proxy is None:

            def state_of(*ends: Address) -> LinkState:
                return self._link_states[client or self._client_of(*ends), server]

            proxy = self._proxies[client, server, kind] = Proxy(upstream, state_of, kind)
            await proxy.start()
        proxy.upstream = upstream
        return f"127.0.0.1:{proxy.port}"

    def change(self, clients: Iterable[str], servers: Iterable[str], condition: LinkCondition) -> None:
        """Links from each of `clients` to each of `servers`, open connections included."""
        targets = list(servers)
        for client in clients:
            for server in targets:
                self._link_states[client, server].change(condition)

    def partition(self, these: Iterable[str], those: Iterable[str], condition: LinkCondition = PARTITIONED) -> None:
        """Links in both directions between two groups."""
        left, right = list(these), list(those)
        self.change(left, right, condition)
        self.change(right, left, condition)

    def end(self, condition: LinkCondition) -> None:
        """Restores links that are in `condition`; others stay unchanged."""
        for link_state in self._link_states.values():
            if link_state.condition == condition:
                link_state.change(HEALTHY)

    def page_frames(self) -> Counter[tuple[str, str]]:
        """Number of frames with page bytes from each server to each client, by (client, server)."""
        return Counter({pair: link_state.num_page_frames for pair, link_state in self._link_states.items()})

    def session_messages(self) -> Counter[tuple[str, str]]:
        """Number of messages from each server to each client on session connections, by (client, server)."""
        return Counter({pair: link_state.num_session_messages for pair, link_state in self._link_states.items()})

    def passed_bytes(self) -> Counter[tuple[str, str]]:
        """Bytes that have passed between each client and each server, by (client, server)."""
        return Counter({pair: link_state.num_bytes for pair, link_state in self._link_states.items()})

    def heal(self) -> None:
        """Restores every link."""
        for link_state in self._link_states.values():
            if link_state.condition is not HEALTHY:
                link_state.change(HEALTHY)

    async def close(self) -> None:
        """Ends all proxies."""
        await asyncio.gather(*(proxy.close() for proxy in self._proxies.values()))

    def _client_of(self, caller: Address, called: Address) -> str:
        return connection_owner(caller, called, self._pids()) or UNKNOWN_CLIENT
