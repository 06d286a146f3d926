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
    """`secret` None: an open cluster that serves every caller. `tls` None: calls are not encrypted."""

    secret: bytes | None = field(default=None, repr=False)
    tls: TlsIdentity | None = None

    def key(self, purpose: str) -> bytes | None:
        """A key of 32 bytes for one purpose; None in an open cluster."""
        return None if self.secret is None else hmac.digest(self.secret, f"baton/{purpose}/1".encode(), "sha256")

    def sign(self, record: WorkerRecord) -> str:
        """The valid `record.signature`: binds identity and address to the secret. Empty in an open cluster."""
        key = self.key("registration")
        if key is None:
            return ""
        claims = (record.role.value, record.id, str(record.incarnation), record.address)
        return hmac.digest(key, "\0".join(claims).encode(), "sha256").hex()

    def verify(self, record: WorkerRecord) -> bool:
        """True if the announcing worker holds the same secret, or if neither side has one."""
        return hmac.compare_digest(self.sign(record).encode(), record.signature.encode())

    def mismatch(self, record: WorkerRecord) -> str:
        """The reason why `verify` failed, for logs and errors."""
        here = "no cluster secret" if self.secret is None else "a cluster secret"
        there = "another one" if self.secret is not None and record.signature else "one" if record.signature else "none"
        return f"{record.id} at {record.address} is not trusted: {here} here, {there} there"


OPEN_CLUSTER = ClusterTrust()
"""No secret and no certificates: for tests and isolated machines."""
