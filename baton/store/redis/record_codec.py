"""Converts records to Redis hashes and JSON, and back. Called by `RedisStore` only; knows no connection.

Skips unknown fields, so services of two versions can share a store.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog

from baton.domain.ids import OwnerId, RequestId
from baton.domain.worker import WorkerRecord
from baton.store.store import CallRecord, CallStatus, SequenceRecord, StoreUnavailable

_log = structlog.get_logger(__name__)


def sequence_to_fields(record: SequenceRecord) -> list[str]:
    """Returns the hash fields and values of a record, alternating."""
    return [
        *("id", record.id),
        *("attempt", str(record.attempt)),
        *("state", record.state.value),
        *("router_id", record.router_id),
        *("model", record.model),
        *("num_prompt_tokens", str(record.num_prompt_tokens)),
        *("num_emitted", str(record.num_emitted)),
        *("failure_code", record.failure_code),
        *("fingerprint", record.fingerprint),
    ]


def sequence_from_fields(fields: Mapping[str, str]) -> SequenceRecord:
    """Decodes a hash. Raises `StoreUnavailable` when another version wrote something unreadable."""
    try:
        return msgspec.convert(fields, SequenceRecord, strict=False)
    except msgspec.ValidationError as error:
        raise StoreUnavailable(f"a request record cannot be read by this version: {error}") from error


def worker_to_json(record: WorkerRecord) -> str:
    """Encodes a record as JSON; integers keep all 64 bits."""
    return msgspec.json.encode(record).decode()


def worker_from_json(payload: str) -> WorkerRecord:
    """Decodes a JSON text. Raises `StoreUnavailable` when it is unreadable."""
    try:
        return msgspec.json.decode(payload, type=WorkerRecord)
    except msgspec.DecodeError as error:
        raise StoreUnavailable(f"a worker record cannot be read by this version: {error}") from error


def try_worker_from_json(payload: str) -> WorkerRecord | None:
    """Decodes a JSON text; logs an unreadable one and returns None, so the others stay visible."""
    try:
        return worker_from_json(payload)
    except StoreUnavailable as error:
        _log.warning("worker_record_unreadable", reason=str(error))
        return None


def call_to_fields(record: CallRecord) -> list[str | bytes | int]:
    """Returns the hash fields and values of a record, alternating; body and trace as they are."""
    return [
        *("id", record.id),
        *("owner", record.owner),
        *("epoch", record.epoch),
        *("status", record.status.value),
        *("endpoint", record.endpoint),
        *("body", record.body),
        *("tenant", record.tenant),
        *("created_s", record.created_s),
        *("seed", record.seed),
        *("sequence_ids", msgspec.json.encode(record.sequence_ids)),
        *("trace", record.trace),
    ]


def call_from_fields(fields: Mapping[bytes, bytes]) -> CallRecord:
    """Decodes a hash. Raises `StoreUnavailable` when another version wrote something unreadable."""
    try:
        return CallRecord(
            id=RequestId(fields[b"id"].decode()),
            owner=OwnerId(fields[b"owner"].decode()),
            epoch=int(fields[b"epoch"]),
            status=CallStatus(fields[b"status"].decode()),
            endpoint=fields[b"endpoint"].decode(),
            body=fields[b"body"],
            tenant=fields[b"tenant"].decode(),
            created_s=int(fields[b"created_s"]),
            seed=int(fields[b"seed"]),
            sequence_ids=tuple(msgspec.json.decode(fields[b"sequence_ids"], type=list[RequestId])),
            trace=fields.get(b"trace", b""),
        )
    except (KeyError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise StoreUnavailable(f"a call cannot be read by this version: {error}") from error


def try_call_from_fields(fields: Mapping[bytes, bytes]) -> CallRecord | None:
    """Decodes a hash; logs an unreadable one and returns None, so the others stay visible."""
    try:
        return call_from_fields(fields)
    except StoreUnavailable as error:
        _log.warning("call_record_unreadable", reason=str(error))
        return None
