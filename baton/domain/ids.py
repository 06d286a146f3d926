"""Identities. Messages between processes carry an `AttemptId` and, where memory is concerned, an `Incarnation`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
"""Id of one generated sequence. A request with `n > 1` choices has `n` sequences."""

OwnerId = NewType("OwnerId", str)
"""The owner of a call: one router process, `<router id>/<incarnation>`. A restarted router is another owner."""

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker process, e.g. `decode-0`; survives a restart."""

Incarnation = NewType("Incarnation", int)
"""Random 64-bit number of one process run. A restarted worker has another one."""

ReservationId = NewType("ReservationId", str)
PageId = NewType("PageId", int)
"""Index of a page in one worker's pool, in [0, num_pages)."""

PageKey = NewType("PageKey", bytes)
"""Chained digest of all tokens up to the end of a page (see `baton.kv.keys`)."""


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One attempt at one sequence. `attempt` counts from 1 and fences: lower ones are refused."""

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


def new_incarnation() -> Incarnation:
    """A fresh non-zero random incarnation."""
    return Incarnation(secrets.randbits(63) | 1)
