"""Merges a router's own snapshot with what the others share. Pure functions.

Half of each bounded list stays the own router's while it has as many, whatever the others send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from baton.services.router.cluster.peers.share import RouterShare
from baton.services.router.cluster.snapshot import MAX_REQUESTS, ClusterSnapshot, OpenRequestRow, RouterRow
from baton.services.router.cluster.window import WindowTotals, summarize

Item = TypeVar("Item")


def merged(
    own: ClusterSnapshot,
    window: WindowTotals,
    itl_bounds: Sequence[float],
    shares: Sequence[RouterShare],
    routers: Sequence[RouterRow],
    tenant: str | None,
) -> ClusterSnapshot:
    """`own` with the others' open requests, counts and windows. `tenant`: only its requests; None: all."""
    rows = [[each.row for each in share.rows if tenant in (None, each.tenant)] for share in shares]
    counts = Counter(own.counts)
    for share in shares:
        counts.update(share.counts)
    foreign = sum(len(of_one) for of_one in rows) if tenant is not None else sum(each.num_requests for each in shares)
    return msgspec.structs.replace(
        own,
        window=summarize([window, *(share.window for share in shares)], itl_bounds),
        counts=dict(counts),
        num_requests=own.num_requests + foreign,
        routers=(*own.routers, *routers),
        requests=tuple(merged_rows(own.requests, rows)),
    )


def merged_rows(own: Sequence[OpenRequestRow], others: Sequence[Sequence[OpenRequestRow]]) -> list[OpenRequestRow]:
    """At most `MAX_REQUESTS` rows: half of the places for the own ones, an equal part of the rest for each other."""
    num_foreign = sum(map(len, others))
    kept = list(own[: max(MAX_REQUESTS // 2, MAX_REQUESTS - num_foreign)])
    left = MAX_REQUESTS - len(kept)
    for index, rows in enumerate(sorted(others, key=len)):
        part = rows[: left // (len(others) - index)]
        kept += part
        left -= len(part)
    return kept


def newest(own: Sequence[Item], foreign: Sequence[Item], count: int, at: Callable[[Item], Any]) -> list[Item]:
    """At most `count` items, oldest first by `at`; both sequences are oldest first."""
    ordered = sorted(foreign, key=at)
    num_own = min(len(own), max(count - count // 2, count - len(ordered)))
    num_foreign = min(len(ordered), count - num_own)
    return sorted([*own[len(own) - num_own :], *ordered[len(ordered) - num_foreign :]], key=at)
