"""A snapshot of a cluster with everything in it, for tests of `baton top`."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.services.router.cluster.snapshot import (
    ClusterEvent,
    ClusterSnapshot,
    LinkRow,
    OpenRequestRow,
    RouterRow,
    ServiceObjectives,
    ServiceWindow,
    WorkerRow,
)

PAGES = {"free": 50, "cached": 25, "live": 20, "pinned": 4, "reserved": 1}


def worker(id: str, role: str, status: str = "ready", **fields: Any) -> WorkerRow:
    known: dict[str, Any] = {
        "rows": 2,
        "total_pages": 100,
        "pages": PAGES,
        "max_rows": 8,
        "prefill_tokens": 0,
        "queue": 3,
        "queue_tokens": 9,
        "tok_s": 5100.0,
        "hit_ratio": 0.62,
        "step_age_ms": 1,
    }
    return WorkerRow(id=id, role=role, incarnation="1", status=status, **(known | fields))


SNAPSHOT = ClusterSnapshot(
    now_ms=1_000_000,
    build="",
    version="0.1.0",
    router="router-0",
    model="m150",
    scope="all",
    demo=False,
    objectives=ServiceObjectives(),
    window=ServiceWindow(60, 100, 0, 2, 1, 0.0, 812.4, 312.0, 42.4),
    degraded=(),
    counts={"queued": 1, "decoding": 2},
    num_requests=3,
    num_workers=3,
    routers=(RouterRow("router-0", "ready", 3, 1, 95, 812.0),),
    workers=(
        worker("prefill-0", "prefill"),
        worker("decode-0", "decode", rows=5, hit_ratio=None),
        worker("decode-1", "decode", "lost", gone_ms=4000, tok_s=None),
    ),
    links=(
        LinkRow("prefill-0", "decode-0", "up", "nixl/ucx (cma)", 9.2, 8.0, 30 << 20),
        LinkRow("prefill-0", "decode-1", "broken", "tcp", None, 0.8, 0, "no route"),
    ),
    requests=(
        OpenRequestRow("chatcmpl-aaaa", "router-0", "decoding", "prefill-0", "decode-0", 812, 512, 57, 2520, 2),
        OpenRequestRow("chatcmpl-bbbb", "router-0", "queued", "", "", 95, 0, 0, 300, 1),
    ),
    recent=(),
    events=(
        ClusterEvent(1, 910_000, "joined", "good", "decode-0 joined"),
        ClusterEvent(2, 996_000, "lost", "bad", "decode-1 is lost\x1b[2J"),
    ),
)
ENCODED = msgspec.json.encode(SNAPSHOT)
