"""What the state store promises. `redis_store` and `memory` keep it, under one contract suite.

Callers: the router (requests, list of workers) and the workers' heartbeats. Never called from inside an engine step.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.domain.worker import WorkerRecord


class StoreUnavailable(BatonError):
    """The state store cannot be reached or did not answer in time. Requests go on without it."""

    code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """What the store knows of a request. `attempt` fences: a write under a lower one is refused (`Superseded`).

    `fingerprint` is that of the workers which its newest placed attempt was given to; "" before the first, and in
    records of a version that did not write it.
    """

    id: RequestId
    attempt: int
    state: RequestState
    router_id: str
    model: str
    num_prompt_tokens: int
    num_emitted: int = 0
    failure_code: str = ""
    fingerprint: str = ""


MAX_TRACE_BYTES = 8 * 1024
"""Largest trace that is stored with a call."""


class CallStatus(enum.Enum):
    """Whether somebody answers a call: its owner does; nobody, since its client went away; nobody needs to any more."""

    OPEN = "open"
    ABANDONED = "abandoned"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One client call: all that any router needs to carry its answer on.

    `owner` answers it, while it is OPEN; `epoch` counts owners from 1 and fences them. `body` is the client's JSON and
    `endpoint` what it was posted to, so that it is parsed again as it was; `seed` stands in where the client gave none.
    `sequence_ids` are in the order of the choices. `tenant` is whose call it is ("" without API keys).
    `trace` is the encoded `RequestTrace` of an ended call, at most `MAX_TRACE_BYTES`; empty before the end.
    """

    id: RequestId
    owner: OwnerId
    epoch: int
    status: CallStatus
    endpoint: str
    body: bytes
    tenant: str
    created_s: int
    seed: int
    sequence_ids: tuple[RequestId, ...]
    trace: bytes = b""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Output tokens of one sequence, to append to its journal. `finish` or `failure_code` end the journal.

    `tokens` are consecutive ids, the first with output index `first`. `logprobs` is empty when no token has any. A
    journal keeps the tokens that it has: a later attempt computes the same ones again.
    """

    id: AttemptId
    first: int
    tokens: tuple[int, ...]
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    failure_code: str = ""
    logprobs: tuple[TokenLogprobs | None, ...] = ()


class WriteOutcome(enum.Enum):
    """What became of a journal entry: written; refused, a newer attempt being in the store; or not in order, the
    request or its journal having been lost, or ending before the entry begins (write it again from token 0)."""

    DONE = "done"
    SUPERSEDED = "superseded"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class JournalPart:
    """What a journal holds from a given index on, in order; the end, if it is there, with its last token."""

    tokens: tuple[OutputToken, ...]
    num_cached_tokens: int
    finish: FinishReason | None
    failure_code: str


class SequenceStore(Protocol):
    """Request records with compare-and-set along `baton.domain.lifecycle.TABLE`."""

    async def create(self, record: SequenceRecord) -> bool:
        """Enters a record in state RECEIVED; False if the id is taken (nothing is changed)."""
        ...

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        """Moves a record along the table, by one event or by several in one step, and returns its new state.

        RETRY and RESUME must come with the next attempt (stored attempt + 1) and raise the stored one; every other
        event must carry the stored attempt. `id` is that of the first event; of those that follow, each that opens an
        attempt opens the next one. `num_emitted` never goes down; `failure_code` is that of the last event;
        `fingerprint` replaces the stored one unless it is "". Raises `Superseded` for a lower attempt, `Broken` for an
        event the table does not have, or an unknown id; nothing is changed then.
        """
        ...

    async def get(self, id: RequestId) -> SequenceRecord | None:
        """The record, or None when unknown or past its retention."""
        ...


class CallStore(Protocol):
    """Calls, who owns them, and the journal of their tokens: what resume and takeover stand on.

    An owner holds a lease that it renews; a call whose owner has let its lease end is an orphan, and whoever claims it
    first carries it on. All is forgotten some time (the store's retention) after it was last touched.
    """

    async def open_call(self, record: CallRecord) -> bool:
        """Enters an OPEN call; False if the id is taken (nothing is changed). An owner without a lease gets one."""
        ...

    async def end_call(self, id: RequestId, epoch: int, status: CallStatus, trace: bytes = b"") -> bool:
        """Marks a call ENDED or ABANDONED and stores its trace; an empty one leaves the stored trace.

        False, without effect, when the call is unknown or has a newer epoch. Raises `Broken` for a trace of more than
        `MAX_TRACE_BYTES`.
        """
        ...

    async def get_call(self, id: RequestId) -> CallRecord | None:
        """The call, or None when unknown or past its retention."""
        ...

    async def claim_call(self, id: RequestId, epoch: int, owner: OwnerId) -> CallRecord | None:
        """Compare-and-set on `epoch`: the call as it is now, OPEN, owned by `owner`, with the next epoch.

        None, without effect, when the epoch is another, or the call has ENDED or is unknown. In the same step every
        sequence that may be RESUMEd (see `baton.domain.lifecycle.TABLE`) is, under the first attempt of the new epoch
        (`transitions.first_attempt`), so that all attempts of earlier owners are fenced off.
        """
        ...

    async def renew_lease(self, owner: OwnerId) -> None:
        """Renews the owner's lease."""
        ...

    async def release_lease(self, owner: OwnerId) -> None:
        """Ends the owner's lease now; idempotent."""
        ...

    async def list_orphans(self) -> list[CallRecord]:
        """OPEN calls whose owner holds no lease: the oldest first, a bounded number."""
        ...

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        """Appends to journals, in one round trip; what became of each entry. The attempt fences."""
        ...

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        """What the sequence's journal holds from token `start` on. With nothing new there, waits for it up to `wait_s`,
        then returns an empty part. An unknown sequence's journal is empty."""
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
        heartbeat interval (so that a missed message or an expired TTL is seen too). Survives an outage of the store."""
        ...


class StateStore(SequenceStore, CallStore, WorkerRegistry, Protocol):
    """All of it, as one connection gives it."""

    async def ping(self) -> None:
        """Raises `StoreUnavailable` when the store cannot be reached."""
        ...

    async def close(self) -> None:
        """Releases connections; idempotent."""
        ...
