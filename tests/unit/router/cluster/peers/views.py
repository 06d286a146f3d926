"""Cluster views over a scripted source and one clock, and what they share."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.domain.ids import OwnerId
from baton.domain.lifecycle import RequestState
from baton.services.router.cluster.peers.share import RouterShare
from baton.services.router.cluster.source import OpenRequest, RouterLoad
from baton.services.router.cluster.view import ClusterView, ViewIdentity
from baton.store.views.view_store import StoredView
from baton.telemetry.request_trace import Outcome, RequestTrace
from baton.telemetry.request_traces import RequestLog, RequestTraces

UNIX_S = 1_700_000_000.0


class ViewWorld:
    """One router. `now` is its clock; `open` its requests."""

    def __init__(self, router: str) -> None:
        self.now = 100.0
        self.open: list[OpenRequest] = []
        self.traces = RequestTraces(router, "m", RequestLog.OFF)
        self.view = ClusterView(
            ViewIdentity(router, "m", "1"), self, self.traces, clock=lambda: self.now, unix_s=lambda: UNIX_S + self.now
        )
        self.owner = OwnerId(f"{router}/1")

    def workers(self):
        return []

    def breakers(self):
        return {}

    def requests(self):
        return self.open

    def load(self) -> RouterLoad:
        return RouterLoad(len(self.open), 0, 0, 0, False)

    def degraded(self) -> tuple[str, ...]:
        return ()

    def end(self, id: str, outcome: Outcome = Outcome.FINISHED, *, tenant: str = "", private: bool = False) -> None:
        """A request ends now."""
        at_us, code = round(1e6 * (UNIX_S + self.now)), "worker_lost" if outcome is Outcome.FAILED else "stop"
        fields: dict[str, Any] = {"tenant": tenant, "code": code, "private": private}
        self.view._on_trace(RequestTrace(id, self.view.identity.router, "m", "chat", at_us, outcome, 0, **fields), b"")

    def stored(self, **changes: Any) -> StoredView:
        """What the store has of this router, with changed fields."""
        data = self.view.share()
        if changes:
            share = msgspec.msgpack.decode(data, type=RouterShare)
            data = msgspec.msgpack.encode(msgspec.structs.replace(share, **changes))
        return StoredView(self.owner, 0.0, data)


def open_request(id: str, tenant: str = "", *, private: bool = False) -> OpenRequest:
    return OpenRequest(id, id, tenant, RequestState.DECODING, "p", "d", 10, 5, 3, 1.5, 1, private)
