"""Identities. Messages between processes carry an `AttemptId` and, where memory is concerned, an `Incarnation`."""

from __future__ import annotations

import secrets
import zlib
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


ATTEMPTS_PER_EPOCH = 1000
"""Far more attempts than one owner of a call makes of one sequence."""

Ballot = tuple[int, int]
"""Ownership of a call: (epoch, owner tag). Totally ordered; the largest one that any process has seen owns the call."""


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt at one sequence. `order` fences: attempts below one already seen are refused.

    `attempt` is 1000 * (epoch - 1) + n, n counting from 1. `owner_tag` is the random number of the router process that
    owns the call, in [0, 2**32). It separates two owners that got one epoch from two histories of the store.
    """

    request_id: RequestId
    attempt: int
    owner_tag: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"

    @property
    def epoch(self) -> int:
        """Epoch of the call's owner, from 1."""
        return (self.attempt - 1) // ATTEMPTS_PER_EPOCH + 1

    @property
    def ballot(self) -> Ballot:
        """Ballot of the call's owner."""
        return self.epoch, self.owner_tag

    @property
    def order(self) -> tuple[int, int, int]:
        """Rank among the attempts of one sequence: (epoch, owner tag, attempt)."""
        return self.epoch, self.owner_tag, self.attempt

    def next(self) -> AttemptId:
        """The same owner's next attempt."""
        return AttemptId(self.request_id, self.attempt + 1, self.owner_tag)


def first_attempt(epoch: int) -> int:
    """First attempt of the owner of a call's `epoch`.

    Each owner has a range of its own. The last attempts of an earlier owner may never have been written, and workers
    must not see one number twice.
    """
    return (epoch - 1) * ATTEMPTS_PER_EPOCH + 1


def owner_tag(owner: OwnerId) -> int:
    """Owner tag of a router process, non-zero: as random as the incarnation in its owner id."""
    return zlib.crc32(owner.encode()) or 1


def new_incarnation() -> Incarnation:
    """A fresh non-zero random incarnation."""
    return Incarnation(secrets.randbits(63) | 1)
