"""All ways between the processes of a cluster: proxies in front of every server, a condition for every pair.

`cluster` owns it; faults change it. Names are those of processes, `redis` for the reception book.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from chaos.peers import Address, owner_of
from chaos.proxy import GOOD, Condition, Proxy, Weather

HELD = Condition(held=True)
STRANGER = "stranger"
"""A client that is no process of the cluster."""


class Network:
    """`pids` gives the present process ids by name."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self._pids = pids
        self._proxies: dict[tuple[str, str], Proxy] = {}
        self._weather: defaultdict[tuple[str, str], Weather] = defaultdict(Weather)

    async def serve(self, server: str, upstream: tuple[str, int], client: str = "") -> str:
        """Puts a proxy in front of `server`, or points the one that is there to where it is now; its host:port.

        With a `client` given the proxy is that client's own; otherwise each connection's client is looked up.
        """
        proxy = self._proxies.get((client, server))
        if proxy is None:
            proxy = Proxy(upstream, lambda *ends: self._weather[client or self._client_at(*ends), server])
            self._proxies[client, server] = proxy
            await proxy.start()
        proxy.upstream = upstream
        return f"127.0.0.1:{proxy.port}"

    def change(self, clients: Iterable[str], servers: Iterable[str], condition: Condition) -> None:
        """The ways from each of `clients` to each of `servers`, also of connections that are open."""
        targets = list(servers)
        for client in clients:
            for server in targets:
                self._weather[client, server].change(condition)

    def part(self, these: Iterable[str], those: Iterable[str], condition: Condition = HELD) -> None:
        """The ways in both directions between two groups."""
        left, right = list(these), list(those)
        self.change(left, right, condition)
        self.change(right, left, condition)

    def end(self, condition: Condition) -> None:
        """Ways that are in `condition` are good again; others stay as they are."""
        for weather in self._weather.values():
            if weather.now == condition:
                weather.change(GOOD)

    def page_frames(self) -> Counter[tuple[str, str]]:
        """How many frames with page bytes have gone from each server to each client, by (client, server)."""
        return Counter({pair: weather.num_page_frames for pair, weather in self._weather.items()})

    def heal(self) -> None:
        """Every way is good again."""
        for weather in self._weather.values():
            if weather.now is not GOOD:
                weather.change(GOOD)

    async def close(self) -> None:
        """Ends all proxies."""
        await asyncio.gather(*(proxy.close() for proxy in self._proxies.values()))

    def _client_at(self, caller: Address, called: Address) -> str:
        return owner_of(caller, called, self._pids()) or STRANGER
