"""Records to what Redis stores, and back. Called by `RedisBook` only; knows no connection.

Fields that this version does not know are skipped, so that services of two versions can share a book.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from baton.domain.worker import WorkerRecord
from baton.state.base import RequestRecord, StateUnavailable


def request_to_fields(record: RequestRecord) -> dict[str, str]:
    """One hash field for each field of the record."""
    return {name: str(value) for name, value in msgspec.to_builtins(record).items()}


def request_from_fields(fields: Mapping[str, str]) -> RequestRecord:
    """The record in a hash. Raises `StateUnavailable` when another version wrote what this one cannot read."""
    try:
        return msgspec.convert(fields, RequestRecord, strict=False)
    except msgspec.ValidationError as error:
        raise StateUnavailable(f"a request record cannot be read by this version: {error}") from error


def worker_to_json(record: WorkerRecord) -> str:
    """The record as JSON; integers keep all 64 bits."""
    return msgspec.json.encode(record).decode()


def worker_from_json(payload: str) -> WorkerRecord:
    """The record in a JSON text. Raises `StateUnavailable` when this version cannot read it."""
    try:
        return msgspec.json.decode(payload, type=WorkerRecord)
    except msgspec.DecodeError as error:
        raise StateUnavailable(f"a worker record cannot be read by this version: {error}") from error
