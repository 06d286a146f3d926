"""What is known of a request: `GET /v1/requests/{id}`. Read from the book, so any router can say it."""

from __future__ import annotations

import msgspec

from baton.state.base import CallRecord, JournalPart, RequestRecord
from services.router.api.carry import CarryStore


class ChoiceStatus(msgspec.Struct):
    """One choice. `finish_reason` or `error` (a code) once its tokens are complete, or never will be."""

    index: int
    attempt: int
    state: str
    num_tokens: int
    finish_reason: str | None = None
    error: str | None = None


class RequestStatus(msgspec.Struct):
    """A call. `status`: open (its owner answers it), abandoned (its client went away) or ended."""

    id: str
    created: int
    endpoint: str
    status: str
    owner: str
    num_owners: int
    choices: list[ChoiceStatus]
    object: str = "request"


async def request_status(store: CarryStore, record: CallRecord) -> RequestStatus:
    """The call and its choices as the book has them now. Raises `StateUnavailable`."""
    choices = [
        _choice(index, await store.get(job), await store.read_journal(job, 0, 0.0))
        for index, job in enumerate(record.jobs)
    ]
    return RequestStatus(
        id=record.id,
        created=record.created_s,
        endpoint=record.endpoint,
        status=record.status.value,
        owner=record.owner,
        num_owners=record.epoch,
        choices=choices,
    )


def _choice(index: int, record: RequestRecord | None, journal: JournalPart) -> ChoiceStatus:
    return ChoiceStatus(
        index=index,
        attempt=record.attempt if record is not None else 0,
        state=record.state.value if record is not None else "unknown",
        num_tokens=len(journal.tokens),
        finish_reason=journal.finish.value if journal.finish is not None else None,
        error=journal.failure_code or None,
    )
