"""Copies of a store's data, of Redis's scripts or in memory, to give it back later. Used by `state_store`."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

from baton.store.store import StateStore

Snapshot = Any
"""Data of one kind of store; opaque."""

_TABLES = ("_sequences._stored", "_workers", "_calls._calls", "_calls._open", "_calls._leases", "_calls._journals")
"""Tables of a `MemoryStore`. Its waiting readers stay."""


def take_snapshot(store: StateStore) -> Snapshot:
    """Returns a copy of all data."""
    if server := _server(store):
        return server.snapshot()
    return attrgetter("_calls._generation")(store), [copy.deepcopy(attrgetter(name)(store)) for name in _TABLES]


def restore(store: StateStore, snapshot: Snapshot) -> None:
    """Replaces all data by those of `snapshot`, which stays as it is. What has expired since stays expired."""
    if server := _server(store):
        server.restore(snapshot)
        return
    generation, tables = snapshot
    attrgetter("_calls")(store)._generation = generation
    attrgetter("_calls")(store)._server += "+"  # another process
    for name, kept in zip(_TABLES, tables, strict=True):
        table = attrgetter(name)(store)
        table.clear()
        table.update(copy.deepcopy(kept))


def _server(store: StateStore) -> Any:
    return getattr(store, "server", None)
