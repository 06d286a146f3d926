"""Converts records to Redis hashes and JSON, and back. Called by `RedisStore` only; knows no connection.

Fields that the Lua scripts compare or change are in clear; the rest is sealed (`baton.store.seal`). Skips unknown
fields, so services of two versions can share a store. A record that does not open or cannot be read is None: missing
for its call, counted and logged, never an outage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from baton.domain.ids import Ballot, OwnerId, RequestId
from baton.domain.lifecycle import RequestState
from baton.domain.worker import WorkerRecord
from baton.store.redis.unsealed_log import UnsealedLog
from baton.store.seal import SealedKind, SealError, SealFault, StoreSeal
from baton.store.store import CallRecord, CallStatus, SequenceRecord, StoreUnavailable

_log = structlog.get_logger(__name__)


_MAX_DIGITS = 16


class _SealedCall(msgspec.Struct, array_like=True, frozen=True):
    """Fields of a call that never change. A later version appends to them."""

    endpoint: str
    body: bytes
    tenant: str
    created_s: int
    seed: int
    sequence_ids: tuple[str, ...]
    text_digest: str = ""
    prompt_digest: str = ""


class _SealedSequence(msgspec.Struct, array_like=True, frozen=True):
    """Fields of a sequence that never change. A later version appends to them."""

    model: str = ""
    num_prompt_tokens: int = 0


_ENDED = CallStatus.ENDED.value
_TOMBSTONE = msgspec.msgpack.encode(_SealedCall("", b"", "", 0, 0, ()))
_call_decoder = msgspec.msgpack.Decoder(_SealedCall)
_sequence_decoder = msgspec.msgpack.Decoder(_SealedSequence)


class RecordFormat:
    """The hashes of calls and sequences."""

    def __init__(
        self, seal: StoreSeal, unsealed: UnsealedLog, max_age_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`max_age_s`: with a secret, an older call is not used; a copy of it was put into the store again."""
        self._seal = seal
        self._unsealed = unsealed
        self._max_age_s = max_age_s
        self._clock = clock

    def sequence_fields(self, record: SequenceRecord) -> list[str | bytes]:
        """Returns the hash fields and values of a record, alternating."""
        payload = msgspec.msgpack.encode((record.model, record.num_prompt_tokens))
        return [
            *self.placeholder_fields(record),
            *("sealed", self._seal.seal(SealedKind.SEQUENCE, record.id, payload)),
            *("fingerprint", self.fingerprint(record.id, record.fingerprint)),
        ]

    def placeholder_fields(self, record: SequenceRecord) -> list[str]:
        """The fields in clear only, of a record without the sealed ones: scripts enter it under several ids."""
        return [
            *("id", record.id),
            *("attempt", str(record.attempt)),
            *("state", record.state._value_),  # `value` is two Python calls
            *("router_id", record.router_id),
            *("num_emitted", str(record.num_emitted)),
            *("failure_code", record.failure_code),
            *("owner_tag", str(record.owner_tag)),
        ]

    def fingerprint(self, id: RequestId, fingerprint: str) -> bytes:
        """The sealed value of a fingerprint; empty for none."""
        return self._seal.seal(SealedKind.FINGERPRINT, id, fingerprint.encode()) if fingerprint else b""

    def sequence(self, id: RequestId, fields: Mapping[bytes, bytes]) -> SequenceRecord | None:
        """Decodes the hash of sequence `id`."""
        sealed, fingerprint = fields.get(b"sealed", b""), fields.get(b"fingerprint", b"")
        try:
            fixed = _sequence_decoder.decode(self._open(SealedKind.SEQUENCE, id, sealed) or b"\x90")
            return SequenceRecord(
                id=id,
                attempt=_whole(fields[b"attempt"]),
                state=RequestState(fields[b"state"].decode()),
                router_id=fields[b"router_id"].decode(),
                model=fixed.model,
                num_prompt_tokens=fixed.num_prompt_tokens,
                num_emitted=_whole(fields[b"num_emitted"]),
                failure_code=fields[b"failure_code"].decode(),
                fingerprint=self._open(SealedKind.FINGERPRINT, id, fingerprint).decode(),
                owner_tag=_whole(fields.get(b"owner_tag", b"0")),
            )
        except SealError as error:
            self._unsealed.record(SealedKind.SEQUENCE, id, error.fault)
        except (KeyError, ValueError):  # msgspec's errors are ValueErrors
            self._unsealed.record(SealedKind.SEQUENCE, id, SealFault.UNREADABLE)
        return None

    def call_fields(self, record: CallRecord) -> list[str | bytes | int]:
        """Returns the hash fields and values of a record, alternating."""
        fixed = _SealedCall(
            *(record.endpoint, record.body, record.tenant, record.created_s, record.seed),
            *(record.sequence_ids, record.text_digest, record.prompt_digest),
        )
        return [
            *("id", record.id),
            *("owner", record.owner),
            *("epoch", record.epoch),
            *("owner_tag", record.owner_tag),
            *("status", record.status._value_),
            *("sequence_ids", msgspec.json.encode(record.sequence_ids)),
            *("sealed", self._seal.seal(SealedKind.CALL, record.id, msgspec.msgpack.encode(fixed))),
            *("trace", self.trace(record.id, record.trace)),
        ]

    def tombstone_fields(self, id: RequestId, ballot: Ballot) -> list[str | bytes | int]:
        """`call_fields` of `transitions.tombstone`: each end of a call has them, in case that the store has lost it."""
        epoch, owner_tag = ballot
        sealed = self._seal.seal(SealedKind.CALL, id, _TOMBSTONE)
        return [
            *("id", id, "owner", "", "epoch", epoch, "owner_tag", owner_tag, "status", _ENDED),
            *("sequence_ids", b"[]", "sealed", sealed, "trace", b""),
        ]

    def trace(self, id: RequestId, trace: bytes) -> bytes:
        """The sealed value of a trace; empty for none."""
        return self._seal.seal(SealedKind.TRACE, id, trace) if trace else b""

    def call(self, fields: Mapping[bytes, bytes], id: RequestId | None = None) -> CallRecord | None:
        """Decodes the hash of call `id`; None: of the call that it names.

        The `sequence_ids` in clear are the scripts'; those of the record come from the seal.
        """
        id = id or RequestId(fields.get(b"id", b"").decode(errors="replace"))
        try:
            fixed = _call_decoder.decode(self._open(SealedKind.CALL, id, fields[b"sealed"]))
            is_old = fixed.created_s > 0 and self._clock() - fixed.created_s > self._max_age_s  # 0: a tombstone
            if self._seal.active and is_old:
                raise SealError(SealFault.REPLAYED)
            return CallRecord(
                id=id,
                owner=OwnerId(fields[b"owner"].decode()),
                epoch=_whole(fields[b"epoch"]),
                status=CallStatus(fields[b"status"].decode()),
                endpoint=fixed.endpoint,
                body=fixed.body,
                tenant=fixed.tenant,
                created_s=fixed.created_s,
                seed=fixed.seed,
                sequence_ids=tuple(map(RequestId, fixed.sequence_ids)),
                trace=self._opened_trace(id, fields.get(b"trace", b"")),
                owner_tag=_whole(fields.get(b"owner_tag", b"0")),
                text_digest=fixed.text_digest,
                prompt_digest=fixed.prompt_digest,
            )
        except SealError as error:
            self._unsealed.record(SealedKind.CALL, id, error.fault)
        except (KeyError, ValueError):  # msgspec's errors are ValueErrors
            self._unsealed.record(SealedKind.CALL, id, SealFault.UNREADABLE)
        return None

    def _opened_trace(self, id: RequestId, blob: bytes) -> bytes:
        """The trace; empty if it does not open, which does not spoil the call."""
        try:
            return self._open(SealedKind.TRACE, id, blob)
        except SealError as error:
            self._unsealed.record(SealedKind.TRACE, id, error.fault)
            return b""

    def _open(self, kind: SealedKind, id: str, blob: bytes) -> bytes:
        return self._seal.open(kind, id, blob) if blob else b""


def _whole(text: bytes) -> int:
    """The number of a text that scripts read as one (`scripts/forms.lua`). Raises `ValueError`."""
    if not text.isdigit() or len(text) > _MAX_DIGITS:
        raise ValueError("no digits, or too many")
    return int(text)


def worker_to_json(record: WorkerRecord) -> str:
    """Encodes a record as JSON; integers keep all 64 bits."""
    return msgspec.json.encode(record).decode()


def worker_from_json(payload: str | bytes) -> WorkerRecord:
    """Decodes a JSON text. Raises `StoreUnavailable` when it is unreadable."""
    try:
        record = msgspec.json.decode(payload, type=WorkerRecord)
        msgspec.msgpack.encode(record)  # raises for integers of more than 64 bits, with which readers cannot compute
        return record
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:  # of any field
        raise StoreUnavailable(f"a worker record cannot be read by this version: {error}") from error


def try_worker_from_json(payload: str | bytes, id: bytes) -> WorkerRecord | None:
    """Decodes a JSON text; logs an unreadable one and returns None, so the others stay visible.

    One of another worker than `id`, that of its key, is None as well: a copy must not stand for that worker.
    """
    try:
        record = worker_from_json(payload)
    except StoreUnavailable as error:
        _log.warning("worker_record_unreadable", reason=str(error))
        return None
    return record if record.id.encode() == id else None
