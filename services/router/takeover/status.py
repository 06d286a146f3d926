"""The response of `GET /v1/requests/{id}`, read from the store by any router."""

from __future__ import annotations

import msgspec

from baton.store.store import CallRecord, CallStatus, JournalPart, SequenceRecord, StateStore
from baton.telemetry.request_trace import Outcome, RequestTrace, decode_trace


class ChoiceStatus(msgspec.Struct):
    """One choice. `finish_reason` or `error` (a code) is set once it has ended."""

    index: int
    attempt: int
    state: str
    num_tokens: int
    finish_reason: str | None = None
    error: str | None = None


class RequestStatus(msgspec.Struct):
    """A call. `status`: open (a router runs it), abandoned (its client disconnected) or ended.

    `epoch`: number of the claim that it runs under, 1 at the router that received it. `trace`: times, workers, stages
    and attempts; null until a router has recorded them.
    """

    id: str
    created: int
    endpoint: str
    status: str
    owner: str
    epoch: int
    choices: list[ChoiceStatus]
    complete: bool
    trace: RequestTrace | None
    object: str = "request"


async def request_status(store: StateStore, record: CallRecord, trace: RequestTrace | None) -> RequestStatus:
    """The call and its choices as the store has them now. Raises `StoreUnavailable`.

    `trace`: that of this router, if it runs the request or did; None: use the stored trace.
    """
    if trace is None and record.trace:
        trace = decode_trace(record.trace)
    ended = trace is not None and trace.outcome is not Outcome.RUNNING
    choices = [
        _choice(index, await store.get(sequence), await store.read_journal(sequence, 0, 0.0))
        for index, sequence in enumerate(record.sequence_ids)
    ]
    return RequestStatus(
        id=record.id,
        created=record.created_s,
        endpoint=record.endpoint,
        status=record.status.value,
        owner=record.owner,
        epoch=record.epoch,
        choices=choices,
        complete=ended or record.status is CallStatus.ENDED,
        trace=trace,
    )


def _choice(index: int, record: SequenceRecord | None, journal: JournalPart) -> ChoiceStatus:
    return ChoiceStatus(
        index=index,
        attempt=record.attempt if record is not None else 0,
        state=record.state.value if record is not None else "unknown",
        num_tokens=len(journal.tokens),
        finish_reason=journal.finish.value if journal.finish is not None else None,
        error=journal.failure_code or None,
    )
