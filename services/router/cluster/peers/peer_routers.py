"""The other routers as this one knows them: who answers, what it shares, and what is new. Pure; owned by `view`.

unread -(a share)-> ready or draining -(no newer share for SILENT_S)-> silent -(not listed)-> forgotten
`unreadable`: there is a share, and it must not be used

A share counts as news only if its number has grown, so neither a hung router nor an old share, played again, is shown
as live.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.domain.ids import OwnerId
from baton.services.router.cluster.peers.share import RouterShare, SharedEnd, ShareUnreadable, decode_share
from baton.services.router.cluster.snapshot import UNREAD, ClusterEvent, RouterRow
from baton.store.transitions import router_of
from baton.store.views.view_store import MAX_LISTED, StoredView

MAX_GONE = 64
SILENT_S = 4.0
"""Longest time without a newer share; routers share once a second."""


@dataclass(slots=True)
class _Peer:
    owner: OwnerId
    asked_s: float  # when this router began to watch
    heard_s: float  # its last call to the store
    share: RouterShare | None = None
    fresh_s: float = 0.0  # when the share was new
    number: int = 0  # of the latest share
    fault: str = ""
    seen_event: int = 0
    seen_end: int = 0

    @property
    def name(self) -> str:
        return router_of(self.owner)

    def status(self, now: float) -> str:
        if self.fault:
            return "unreadable"
        if self.share is None:
            return UNREAD if now - min(self.asked_s, self.heard_s) < SILENT_S else "silent"
        return self.share.row.status if now - self.fresh_s < SILENT_S else "silent"


@dataclass(frozen=True, slots=True)
class RouterNews:
    """What one share of `router` tells for the first time, oldest first."""

    router: str
    events: tuple[ClusterEvent, ...]
    ends: tuple[SharedEnd, ...]


@dataclass(slots=True)
class PeerRouters:
    """`own`: the id of this router. `num_itl_buckets`: of the ITL histogram."""

    own: str
    num_itl_buckets: int
    _peers: dict[OwnerId, _Peer] = field(default_factory=dict)
    _gone: OrderedDict[OwnerId, _Peer] = field(default_factory=OrderedDict)  # what one told before is no news later

    def observe(self, views: Sequence[StoredView], now: float, *, watching: bool = True) -> list[RouterNews]:
        """One reading of the store; returns what is new. Without `watching` it lists routers only."""
        news: list[RouterNews] = []
        before, self._peers = self._peers, {}
        for view in views[:MAX_LISTED]:
            peer = before.pop(view.owner, None) or self._back(view.owner, now)
            self._peers[view.owner] = peer
            peer.heard_s = now - view.age_s
            if not watching:
                peer.share, peer.asked_s, peer.fault = None, now, ""
                continue
            found = self._read(peer, view, now)
            if found is not None:
                news.append(found)
        self._forget(before.values())
        return news

    def shares(self, now: float) -> list[RouterShare]:
        """Those of the routers that answer, by name."""
        live = [peer.share for peer in self._shown(now) if peer.status(now) in ("ready", "draining")]
        return [share for share in live if share is not None]

    def rows(self, now: float) -> list[RouterRow]:
        """All other routers, by name. One that was started again is not shown twice."""
        rows: list[RouterRow] = []
        for peer in self._shown(now):
            status = peer.status(now)
            answers = status in ("ready", "draining") and peer.share is not None
            rows.append(peer.share.row if answers and peer.share is not None else RouterRow(peer.name, status))
        return rows

    def router_of(self, id: str, tenant: str | None, now: float) -> str | None:
        """The router that answers and has this request, or one of its choices, open. `tenant`: as it must be."""
        for share in self.shares(now):
            for shared in share.rows:
                is_choice = shared.row.id.startswith(f"{id}-") and "-" in id
                if (shared.row.id == id or is_choice) and tenant in (None, shared.tenant):
                    return shared.row.router
        return None

    def _back(self, owner: OwnerId, now: float) -> _Peer:
        peer = self._gone.pop(owner, None) or _Peer(owner, now, now)
        peer.asked_s = now
        return peer

    def _forget(self, peers: Iterable[_Peer]) -> None:
        """Keeps of routers that are not listed, perhaps as the store was away, which share and which news were last."""
        for peer in peers:
            peer.share, peer.fault = None, ""
            self._gone[peer.owner] = peer
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _shown(self, now: float) -> list[_Peer]:
        heard = {peer.name for peer in self._peers.values() if peer.status(now) != "silent"} | {self.own}
        peers = [peer for peer in self._peers.values() if peer.status(now) != "silent" or peer.name not in heard]
        return sorted(peers, key=lambda peer: peer.owner)

    def _read(self, peer: _Peer, view: StoredView, now: float) -> RouterNews | None:
        if view.fault or not view.payload:
            peer.fault = view.fault
            return None
        try:
            share = decode_share(view.payload, peer.name, self.num_itl_buckets)
        except ShareUnreadable as error:
            peer.fault = str(error)
            return None
        peer.fault = ""
        if share.number <= peer.number:
            return None
        peer.share, peer.number, peer.fresh_s = share, share.number, now - view.age_s
        events = [event for event in share.events if event.seq > peer.seen_event]
        ends = [end for end in share.ends if end.number > peer.seen_end]
        peer.seen_event = max([event.seq for event in events], default=peer.seen_event)
        peer.seen_end = max([end.number for end in ends], default=peer.seen_end)
        return RouterNews(peer.name, tuple(events), tuple(ends))
