"""Authentication between processes: the cluster's shared secret and TLS identities. Values only.

`baton.settings.trust` reads them from files; `baton.rpc` uses them for calls. Readers of the registry verify each
worker's signature, so no prompt goes to a worker that does not hold the secret.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

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
        """The valid `record.signature`: binds identity and address to the secret. Empty in an open cluster."""
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
        claims = "\0".join((record.role.value, record.id, str(record.incarnation), record.address)).encode()
        return [hmac.digest(key, claims, "sha256").hex() for key in self.keys("registration")]


OPEN_CLUSTER = ClusterTrust()
"""No secret and no certificates: for tests and isolated machines."""
