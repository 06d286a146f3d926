"""Authentication between processes: the cluster's shared secret and TLS identities. Values only.

`baton.settings.trust` reads them from files; `baton.rpc` uses them for calls. Readers of the registry verify each
worker's signature, so no prompt goes to a worker that does not hold the secret.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum

from baton.domain.ids import Incarnation
from baton.domain.worker import WorkerRecord


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """PEM texts: this process's certificate chain and key, and the authorities that it accepts."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes


@dataclass(frozen=True, slots=True)
class ClusterTrust:
    """`secret` None: an open cluster that serves every caller. `tls` None: calls are not encrypted.

    `second_secret` is valid too while secrets are rotated, but signs and seals nothing.
    """

    secret: bytes | None = field(default=None, repr=False)
    tls: TlsIdentity | None = None
    second_secret: bytes | None = field(default=None, repr=False)

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """The valid secrets, the one that signs first; empty in an open cluster."""
        return tuple([secret for secret in (self.secret, self.second_secret) if secret is not None])

    def key(self, purpose: str) -> bytes | None:
        """The key of 32 bytes that signs for one purpose; None in an open cluster."""
        return next(iter(self.keys(purpose)), None)

    def keys(self, purpose: str) -> tuple[bytes, ...]:
        """The keys that are valid for one purpose, the one that signs first; empty in an open cluster."""
        return tuple([hmac.digest(secret, f"baton/{purpose}/1".encode(), "sha256") for secret in self.secrets])

    def sign(self, record: WorkerRecord) -> str:
        """The valid `record.signature`: binds all other fields to the secret. Empty in an open cluster."""
        return next(iter(self._signatures(record)), "")

    def verify(self, record: WorkerRecord) -> bool:
        """True if the announcing worker holds a valid secret, or if neither side has one."""
        given = record.signature.encode()
        return any([hmac.compare_digest(valid.encode(), given) for valid in self._signatures(record) or [""]])

    def mismatch(self, record: WorkerRecord) -> str:
        """The reason why `verify` failed, for logs and errors."""
        here = "no cluster secret" if self.secret is None else "a cluster secret"
        there = "another one" if self.secret is not None and record.signature else "one" if record.signature else "none"
        return f"{record.id} at {record.address} is not trusted: {here} here, {there} there"

    def _signatures(self, record: WorkerRecord) -> list[str]:
        """The valid signatures of a record, one a secret."""
        keys = self.keys("registration")
        claims = _claims(record) if keys else b""
        return [hmac.digest(key, claims, "sha256").hex() for key in keys]


OPEN_CLUSTER = ClusterTrust()
"""No secret and no certificates: for tests and isolated machines."""


class RecordVerifier:
    """Accepts the worker records of one reader: signed, and not older than one accepted before. Pure."""

    def __init__(self, trust: ClusterTrust) -> None:
        self._trust = trust
        self._newest: dict[Incarnation, int] = {}

    def accept(self, record: WorkerRecord) -> bool:
        """False for a record without a valid signature, and for a replayed one. Remembers the newest announcement."""
        if not self._trust.verify(record) or record.announcement < self._newest.get(record.incarnation, 0):
            return False
        self._newest[record.incarnation] = record.announcement
        return True

    def reason(self, record: WorkerRecord) -> str:
        """The reason why `accept` refused a record: the same one as long as the record is there."""
        if self._trust.verify(record):
            return f"{record.id}: its record is older ({record.announcement}) than one read before"
        return self._trust.mismatch(record)

    def retain(self, incarnations: Collection[Incarnation]) -> None:
        """Forgets all other incarnations."""
        self._newest = {one: number for one, number in self._newest.items() if one in incarnations}


def _claims(record: WorkerRecord) -> bytes:
    """All fields but the signature as canonical JSON, equal before and after a store's encoding."""
    return json.dumps(_values(replace(record, signature="")), default=_values, separators=(",", ":")).encode()


def _values(value: object) -> object:
    """The value of an enum, or the fields of a dataclass in order. A store may read 1.0 and 1 as either type."""
    if isinstance(value, Enum):
        return value.value
    fields = [getattr(value, name) for name in value.__slots__]  # type: ignore[attr-defined]
    return [int(field) if type(field) is float and field.is_integer() else field for field in fields]
