"""What the reception book promises. `redis_book` and `memory` keep it, under one contract suite.

Callers: the router (requests, list of workers) and the workers' heartbeats. Never called from inside an engine step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.worker import WorkerRecord


class StateUnavailable(BatonError):
    """The reception book cannot be reached or did not answer in time. Requests go on without it."""

    code = "state_unavailable"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What the book knows of a request. `attempt` fences: a write under a lower one is refused (`Superseded`)."""

    id: RequestId
    attempt: int
    state: RequestState
    router_id: str
    model: str
    num_prompt_tokens: int
    num_emitted: int = 0
    failure_code: str = ""


class RequestStore(Protocol):
    """Request records with compare-and-set along `baton.domain.lifecycle.TABLE`."""

    async def create(self, record: RequestRecord) -> bool:
        """Enters a record in state RECEIVED; False if the id is taken (nothing is changed)."""
        ...

    async def advance(
        self, id: AttemptId, event: RequestEvent, *, num_emitted: int = 0, failure_code: str = ""
    ) -> RequestState:
        """Moves a record along the table and returns its new state.

        RETRY must come with the next attempt (stored attempt + 1) and raises the stored one; every other event must
        carry the stored attempt. `num_emitted` never goes down. Raises `Superseded` for a lower attempt, `Broken` for
        an event the table does not have, or an unknown id.
        """
        ...

    async def get(self, id: RequestId) -> RequestRecord | None:
        """The record, or None when unknown or past its retention."""
        ...


class WorkerRegistry(Protocol):
    """Live workers; a record not announced again within its TTL is gone."""

    async def announce(self, record: WorkerRecord) -> bool:
        """Enters or refreshes a record. A new incarnation replaces an older one; the older one's later calls return
        False and change nothing (it has been replaced and should exit)."""
        ...

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        """Removes the record if it is this incarnation's; idempotent."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """All live records, ordered by id."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields once at once, then whenever a worker joined, left or changed its status, and at the latest every
        heartbeat interval (so that a missed message or an expired TTL is seen too). Survives an outage of the book."""
        ...


class StateBook(RequestStore, WorkerRegistry, Protocol):
    """Both halves, as one connection gives them."""

    async def ping(self) -> None:
        """Raises `StateUnavailable` when the book cannot be reached."""
        ...

    async def close(self) -> None:
        """Releases connections; idempotent."""
        ...
