"""Transition rules of stored records: pure functions over `baton.domain.lifecycle.TABLE`.

`MemoryStore` and `StoreWriter` call them. `scripts/advance_sequence.lua` applies the same rules inside Redis, and gets
the table from `targets_by_event`. No clock, no I/O.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import AttemptId, Ballot, OwnerId, RequestId, first_attempt
from baton.domain.lifecycle import TABLE, RequestEvent, RequestState, advance
from baton.store.store import MAX_TRACE_BYTES, CallOwner, CallRecord, CallStatus, RecordLost, SequenceRecord

NUM_ATTEMPTS_OPENED = {event: int(event in (RequestEvent.RETRY, RequestEvent.RESUME)) for event in RequestEvent}
"""Attempts that an event opens: RETRY and RESUME come with the next attempt, the others with the stored one."""


def targets_by_event() -> dict[RequestEvent, dict[str, str]]:
    """The table by event: `event -> {state: next state}`, states by their values."""
    return {
        event: {state.value: target.value for (state, step), target in TABLE.items() if step is event}
        for event in RequestEvent
    }


def check_new_sequence(record: SequenceRecord) -> None:
    """Raises `Broken` unless the record is RECEIVED with an attempt of at least 1."""
    if record.state is not RequestState.RECEIVED or record.attempt < 1:
        raise Broken(f"request {record.id} cannot be created in state {record.state.value}, attempt {record.attempt}")


def apply_event(
    record: SequenceRecord,
    id: AttemptId,
    event: RequestEvent,
    *,
    num_emitted: int = 0,
    failure_code: str = "",
    fingerprint: str = "",
) -> SequenceRecord:
    """Returns the record after `event`, with the failure code of this event and its fingerprint, if it has one.

    Raises `Superseded` when `id` is lower than the event requires, `RecordLost` when it is higher, and `Broken` when
    the table lacks the event.
    """
    attempt = record.attempt + NUM_ATTEMPTS_OPENED[event]
    if id.attempt != attempt or id.owner_tag != record.owner_tag:
        expected = AttemptId(record.id, attempt, record.owner_tag)
        if id.order < expected.order:
            raise Superseded(superseded_message(id, event, record.attempt), record.attempt_id)
        if id.order > expected.order:
            raise RecordLost(lost_message(id, event, record.attempt))
    return SequenceRecord(  # not `replace`, which takes as long as all the rest
        record.id, id.attempt, advance(record.state, event), record.router_id, record.model, record.num_prompt_tokens,
        max(record.num_emitted, num_emitted), failure_code, fingerprint or record.fingerprint, record.owner_tag,
    )  # fmt: skip


def apply_events(
    record: SequenceRecord,
    id: AttemptId,
    events: Sequence[RequestEvent],
    *,
    num_emitted: int = 0,
    failure_code: str = "",
    fingerprint: str = "",
) -> SequenceRecord:
    """Returns the record after `events`, the first under `id`, with the failure code of the last.

    Raises as `apply_event`.
    """
    after = record
    for position, event in enumerate(events):
        given = replace(after.attempt_id, attempt=after.attempt + NUM_ATTEMPTS_OPENED[event]) if position else id
        after = apply_event(
            after, given, event, num_emitted=num_emitted, failure_code=failure_code, fingerprint=fingerprint
        )
    return after


def after_put(stored: SequenceRecord | None, record: SequenceRecord) -> SequenceRecord:
    """The stored record after `SequenceStore.put_request`."""
    if stored is None or stored.attempt_id.order < record.attempt_id.order:
        return record
    others = not record.owner_tag and stored.router_id != record.router_id
    if stored.attempt_id != record.attempt_id or others or stored.state.terminal:
        return stored
    return replace(record, num_emitted=max(stored.num_emitted, record.num_emitted))


def claimed_epoch(epochs: Iterable[int], floor: int) -> int:
    """Epoch of a claim. `epochs`: those of the call and of its sequences."""
    return max(floor, *epochs) + 1


def apply_resume(record: SequenceRecord, router_id: str, ballot: Ballot) -> SequenceRecord | None:
    """Returns the record as `router_id`, owner of `ballot`, continues it; None when the table does not allow RESUME."""
    target = TABLE.get((record.state, RequestEvent.RESUME))
    if target is None:
        return None
    first, tag = first_attempt(ballot[0]), ballot[1]
    return replace(record, state=target, attempt=first, owner_tag=tag, failure_code="", router_id=router_id)


def after_journal_write(record: SequenceRecord, id: AttemptId) -> SequenceRecord:
    """Returns the record after a journal write under `id`, which is not lower.

    A higher ballot comes from an owner whose claim the store has lost: its state is resumed as that claim did, since
    what is stored is the earlier owner's. The name of the router is the earlier one's until the record is put.
    """
    after = replace(record, attempt=id.attempt, owner_tag=id.owner_tag)
    target = TABLE.get((record.state, RequestEvent.RESUME))
    if record.attempt_id.ballot == id.ballot or target is None:
        return after
    return replace(after, state=target, failure_code="")


def placeholder(id: RequestId, router_id: str, ballot: Ballot) -> SequenceRecord:
    """Record of a sequence that its first router had not written when its call was claimed.

    It keeps that router from writing the sequence afterwards, and omits what only that router knew.
    """
    epoch, owner_tag = ballot
    queued = RequestState.QUEUED
    return SequenceRecord(
        id, first_attempt(epoch), queued, router_id, model="", num_prompt_tokens=0, owner_tag=owner_tag
    )


def router_of(owner: OwnerId) -> str:
    """The router id in an owner id (see `baton.domain.ids.OwnerId`)."""
    return owner.rpartition("/")[0] or owner


def check_new_call(record: CallRecord) -> None:
    """Raises `Broken` unless the call is OPEN with an epoch of at least 1."""
    if record.status is not CallStatus.OPEN or record.epoch < 1:
        raise Broken(f"call {record.id} cannot be opened as {record.status.value}, epoch {record.epoch}")


def check_call_end(id: RequestId, status: CallStatus, trace: bytes = b"") -> None:
    """Raises `Broken` unless a call may end in `status` and `trace` fits."""
    if status is CallStatus.OPEN:
        raise Broken(f"call {id} cannot end as open")
    if len(trace) > MAX_TRACE_BYTES:
        raise Broken(f"the trace of call {id} has {len(trace)} bytes, more than {MAX_TRACE_BYTES}")


def owner_of(record: CallRecord) -> CallOwner:
    """Owner, ballot and status of a call."""
    return CallOwner(record.owner, record.ballot, record.status)


def tombstone(id: RequestId, ballot: Ballot) -> CallRecord:
    """Record of the end of a call that the store has lost."""
    epoch, owner_tag = ballot
    return CallRecord(id, OwnerId(""), epoch, CallStatus.ENDED, "", b"", "", 0, 0, (), owner_tag=owner_tag)


def superseded_message(id: AttemptId, event: RequestEvent, stored_attempt: int) -> str:
    """Message of `Superseded`, the same from every store."""
    return f"{event.value} of {id} came late: the store is at attempt {stored_attempt}"


def lost_message(id: AttemptId, event: RequestEvent, stored_attempt: int | None) -> str:
    """Message of `RecordLost`, the same from every store. None: the store has no record."""
    found = "no such request in the store" if stored_attempt is None else f"the store is at attempt {stored_attempt}"
    return f"{event.value} of {id}: {found}"


@functools.lru_cache(maxsize=4096)
def shortest_path(
    start: RequestState, goal: RequestState, num_opened_attempts: int = 0
) -> tuple[RequestEvent, ...] | None:
    """Returns the fewest events from `start` to `goal` that open so many attempts; None when there are none.

    RESUME is never among them: only a claim applies it. A record that lags behind follows the events of its own
    request; a cancelled one that another router resumes is superseded. Breadth-first search.
    """
    if num_opened_attempts < 0:
        return None
    paths: dict[tuple[RequestState, int], tuple[RequestEvent, ...]] = {(start, num_opened_attempts): ()}
    frontier = deque(paths)
    while frontier:
        state, left = frontier.popleft()
        if (state, left) == (goal, 0):
            return paths[state, left]
        for (origin, event), target in TABLE.items():
            node = (target, left - NUM_ATTEMPTS_OPENED[event])
            if event is not RequestEvent.RESUME and origin is state and node[1] >= 0 and node not in paths:
                paths[node] = (*paths[state, left], event)
                frontier.append(node)
    return None
