"""Records and interfaces of the state store. `RedisStore` and `MemoryStore` implement them, under one contract suite.

Called by the router (sequences, calls, list of workers) and by the workers' heartbeats, never inside an engine step.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId, Ballot, Incarnation, OwnerId, RequestId, WorkerId
from baton.domain.lifecycle import RequestEvent, RequestState
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.domain.values.quick_init import quick_init
from baton.domain.worker import WorkerRecord

if TYPE_CHECKING:
    from baton.store.write_chain import ChainedWrite, WriteResult


class StoreUnavailable(BatonError):
    """The store did not answer, or not in time. Requests continue without it."""

    code = "store_unavailable"


class RecordLost(BatonError):
    """The store has lost a record, or its newest attempts: put it again (`SequenceStore.put_request`)."""

    code = "record_lost"


class LiveSequence(RecordLost):
    """A call cannot end: the store has its sequence `sequence_id` as live, which was ended."""

    def __init__(self, call_id: RequestId, sequence_id: RequestId) -> None:
        super().__init__(f"call {call_id} cannot end: its sequence {sequence_id} is live in the store")
        self.sequence_id = sequence_id


class WorkerIdInUse(BatonError):
    """Another live process holds this worker id."""

    code = "worker_id_taken"


@quick_init
@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """Stored state of one sequence. Its attempt fences: a write under a lower one raises `Superseded`.

    `attempt` and `owner_tag` are those of `AttemptId`. `fingerprint` identifies the model of the workers that got the
    newest placed attempt; "" before the first.
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
    owner_tag: int = 0

    @property
    def attempt_id(self) -> AttemptId:
        """The newest attempt."""
        return AttemptId(self.id, self.attempt, self.owner_tag)


MAX_TRACE_BYTES = 8 * 1024
"""Largest trace that is stored with a call."""


class CallStatus(enum.Enum):
    """OPEN: its owner answers the call. ABANDONED: the client has gone. ENDED: the answer is complete or has failed."""

    OPEN = "open"
    ABANDONED = "abandoned"
    ENDED = "ended"


@quick_init
@dataclass(frozen=True, slots=True)
class CallRecord:
    """One client call: everything that any router needs to continue its answer.

    `owner` answers the call while it is OPEN. `epoch` counts owners from 1, `owner_tag` is a random number of the
    owner's process; both together are the ballot, which fences. `body` is the client's JSON, posted to `endpoint`.
    `seed` applies where the client gave none. `sequence_ids` are in the order of the choices. `tenant` is "" without
    API keys. `trace` is the encoded `RequestTrace` of the last end, of at most `MAX_TRACE_BYTES`.
    A `private` call is kept by `PrivateStore` only.
    `text_digest` identifies tokenizer and chat template of the first owner's model, `prompt_digest` its prompts' token
    ids ("": unknown).
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
    owner_tag: int = 0
    private: bool = False
    text_digest: str = ""
    prompt_digest: str = ""

    @property
    def ballot(self) -> Ballot:
        """Ballot of the owner."""
        return self.epoch, self.owner_tag


NO_BALLOT: Ballot = (0, 0)
"""Ballot of a call that the store does not have: below every other one."""


@dataclass(frozen=True, slots=True)
class CallOwner:
    """Owner of a stored call, with the call's ballot and status."""

    owner: OwnerId
    ballot: Ballot
    status: CallStatus


@dataclass(frozen=True, slots=True)
class LeaseState:
    """State of the store and of an owner's lease, found by a renewal.

    `generation` is a random value that a store without data draws once: another one means that it was emptied.
    `number` is that of the last renewal, before this one; 0 when the lease had ended. One below the last acknowledged
    number means that an older state of the store was restored. `server` is the server process that answered, "" when it
    does not tell: another one may have older data, although the number fits (a replica that lagged).
    """

    generation: str
    number: int
    server: str = ""


@quick_init
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
    """Result of writing a journal entry.

    SUPERSEDED: the store has a newer attempt. GAP: the sequence or earlier tokens are missing; write again from token
    0.
    """

    DONE = "done"
    SUPERSEDED = "superseded"
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class JournalPart:
    """A journal from a given index on, in order. The end, if stored, comes with the last token.

    `writers`: the attempts that wrote it, in order. A store that has lost a journal may get another one of the same
    sequence, of a later attempt and perhaps another model: who has read a part of the first compares that.
    """

    tokens: tuple[OutputToken, ...]
    num_cached_tokens: int
    finish: FinishReason | None
    failure_code: str
    writers: tuple[AttemptId, ...] = field(default=(), compare=False)

    @property
    def ended(self) -> bool:
        """True if it contains the end of the journal."""
        return self.finish is not None or self.failure_code != ""


class Durability(enum.Enum):
    """What an acknowledged write survives.

    NONE: nothing; the store is in the router's memory. ROUTER: the loss of a router. RESTART: also a killed and
    restarted store. HOST: also the loss of the store's machine.
    """

    NONE = "none"
    ROUTER = "router"
    RESTART = "restart"
    HOST = "host"

    @property
    def survives_restart(self) -> bool:
        """True if a killed store has the write when it is back."""
        return self in (Durability.RESTART, Durability.HOST)


class SequenceStore(Protocol):
    """Sequence records with compare-and-set along `baton.domain.lifecycle.TABLE`.

    Attempts are compared by `AttemptId.order`.
    """

    async def create(self, record: SequenceRecord) -> bool:
        """Creates a record in state RECEIVED; False, without effect, if the id is taken."""
        ...

    async def advance(
        self,
        id: AttemptId,
        *events: RequestEvent,
        num_emitted: int = 0,
        failure_code: str = "",
        fingerprint: str = "",
    ) -> RequestState:
        """Applies one or several events in one step, and returns the new state.

        `id` carries the attempt of the first event. RETRY and RESUME open the next attempt (stored attempt + 1); other
        events carry the stored one. `num_emitted` never decreases; `failure_code` is that of the last event;
        `fingerprint` replaces the stored one unless it is "". Raises `Superseded` (with `seen`) for a lower attempt,
        `RecordLost` for a higher one or an unknown id, and `Broken` for an event that the table lacks; nothing changes
        then.
        """
        ...

    async def put_request(self, record: SequenceRecord) -> SequenceRecord:
        """Enters a record again, in any state, after the store has lost it or some of its changes.

        Replaces a stored record of a lower attempt, or of the same attempt unless it has ended; `num_emitted` never
        decreases then. Attempts without an owner tag are the same only under the same router's name. Returns the record
        that the store has afterwards: it is another owner's if its attempt is higher.
        """
        ...

    async def get(self, id: RequestId) -> SequenceRecord | None:
        """Returns the record, or None when it is unknown or past its retention."""
        ...


class CallStore(Protocol):
    """Calls, their owners and the journals of their tokens: the basis of resume and takeover.

    An owner renews a lease. An OPEN call whose owner has no lease is an orphan; the first owner that claims it
    continues it. Every record expires one retention after its last change.
    """

    async def put_call(self, record: CallRecord) -> CallOwner:
        """Enters an OPEN call under the ballot of `record`, and starts a lease for an owner without one.

        Replaces a stored call with a lower ballot, of any status. Has no effect on one with the same ballot or a higher
        one. Returns what the store has afterwards. The call is the owner's if owner and ballot are those of `record`;
        it may have ended.
        """
        ...

    async def end_call(
        self,
        id: RequestId,
        ballot: Ballot,
        status: CallStatus,
        trace: bytes = b"",
        ended_sequences: Sequence[RequestId] = (),
    ) -> bool:
        """Marks a call ENDED or ABANDONED and stores its trace; an empty one leaves the stored trace.

        False, without effect, when the store has a higher ballot. An end with a higher one takes its ballot along: the
        store has been rolled back to before the claim. A call that the store has lost cannot be ABANDONED
        (False); ENDED, it is entered without body, owner or sequences for `StoreOptions.tombstone_s`, so that readers
        learn its end. Raises `Broken` for a trace of more than `MAX_TRACE_BYTES`, and `LiveSequence`, without
        effect, when the store has one of `ended_sequences` as live: it was rolled back after their ends.
        """
        ...

    async def get_call(self, id: RequestId) -> CallRecord | None:
        """Returns the call, or None when it is unknown or past its retention."""
        ...

    async def claim_call(
        self,
        id: RequestId,
        ballot: Ballot,
        owner: OwnerId,
        *,
        floor: int = 0,
        seed: CallRecord | None = None,
    ) -> CallRecord | None:
        """Compare-and-set on `ballot`: gives the call to `owner` under a higher epoch, OPEN, and returns it.

        The owner tag is that of `owner`. The epoch is one above that of the call, of its sequences and `floor`, the
        highest that the claimant has seen. With `seed` and `NO_BALLOT`, enters a call that the store lacks. Resumes in
        the same step every sequence that the table allows, under the first attempt of the new epoch
        (`baton.domain.ids.first_attempt`). That fences off all attempts of earlier owners. Returns None, without
        effect, when the ballot differs, or the call has ENDED, or is unknown and there is no seed.
        """
        ...

    async def hold_lease(self, owner: OwnerId, number: int) -> LeaseState:
        """Renews the owner's lease, or starts it. `number` counts the owner's renewals from 1.

        Returns what it found before: see `LeaseState`.
        """
        ...

    async def release_lease(self, owner: OwnerId) -> None:
        """Ends the owner's lease now; idempotent."""
        ...

    async def list_orphans(self) -> list[CallRecord]:
        """Returns OPEN calls whose owner has no lease, oldest first, a bounded number."""
        ...

    async def write_journal(self, entries: Sequence[JournalEntry]) -> list[WriteOutcome]:
        """Appends to journals in one round trip; returns the outcome of each entry.

        The attempt fences: a lower one than the stored is refused, a higher one becomes the stored one. A higher ballot
        also resumes the sequence, as the claim did that the store has lost.
        """
        ...

    async def read_journal(self, id: RequestId, start: int, wait_s: float) -> JournalPart:
        """Returns the journal of a sequence from token `start` on.

        Without new tokens, waits up to `wait_s` for some, then returns an empty part. The journal of an unknown
        sequence is empty.
        """
        ...


class WorkerRegistry(Protocol):
    """Live workers. A record disappears when it is not announced again within its TTL."""

    async def announce(self, record: WorkerRecord) -> bool:
        """Creates or refreshes a record; False, without effect, from a replaced incarnation, which should exit.

        A live record is never displaced: raises `WorkerIdInUse` for another incarnation until it is withdrawn or
        expires. The next incarnation that is announced then replaces it for good.
        """
        ...

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        """Removes the record if it is this incarnation's; idempotent."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """Returns all live records, ordered by id."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields at once, then when a worker joins, leaves, or changes its status, links or budgets, and at least every
        heartbeat interval.

        The heartbeat covers missed messages and expired TTLs. The iterator survives an outage of the store.
        """
        ...


class StateStore(SequenceStore, CallStore, WorkerRegistry, Protocol):
    """All three interfaces over one connection."""

    async def write_chains(self, chains: Sequence[Sequence[ChainedWrite]]) -> list[list[WriteResult]]:
        """Runs chains of writes in one round trip, one after another. Returns the results of the writes that ran.

        A chain ends with its first refused write, which has no effect; those before it have. Raises `StoreUnavailable`:
        any part may have taken effect.
        """
        ...

    async def ping(self) -> None:
        """Raises `StoreUnavailable` when the store does not answer."""
        ...

    async def durability(self) -> Durability:
        """Reads what acknowledged writes survive now. Raises `StoreUnavailable`."""
        ...

    async def close(self) -> None:
        """Releases connections; idempotent."""
        ...
