"""What a process shows its peers and asks of them: a secret that the cluster shares, and certificates. Values only.

Read from files by `baton.settings.trust`, used by `baton.rpc` for calls and by those who read the registry: a worker's
announcement carries a signature, so that nobody sends prompts to a worker that does not hold the secret.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from baton.domain.worker import WorkerRecord


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """PEM texts: this process's certificate (chain) and its key, and the authorities whose certificates it accepts."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes


@dataclass(frozen=True, slots=True)
class ClusterTrust:
    """`secret` None: an open cluster, where whoever reaches a port is served. `tls` None: calls travel in the clear."""

    secret: bytes | None = field(default=None, repr=False)
    tls: TlsIdentity | None = None

    def key(self, purpose: str) -> bytes | None:
        """A key of 32 bytes for one purpose alone; None in an open cluster."""
        return None if self.secret is None else hmac.digest(self.secret, f"baton/{purpose}/1".encode(), "sha256")

    def sign(self, record: WorkerRecord) -> str:
        """What `record.signature` has to be: binds identity and address to the secret. Empty in an open cluster."""
        key = self.key("registration")
        if key is None:
            return ""
        claims = (record.role.value, record.id, str(record.incarnation), record.address)
        return hmac.digest(key, "\0".join(claims).encode(), "sha256").hex()

    def verify(self, record: WorkerRecord) -> bool:
        """Whether the worker that announced this holds the same secret, or none where there is none."""
        return hmac.compare_digest(self.sign(record).encode(), record.signature.encode())

    def mismatch(self, record: WorkerRecord) -> str:
        """Why `verify` says no, in words."""
        here = "no cluster secret" if self.secret is None else "a cluster secret"
        there = "another one" if self.secret is not None and record.signature else "one" if record.signature else "none"
        return f"{record.id} at {record.address} is not trusted: {here} here, {there} there"


OPEN_CLUSTER = ClusterTrust()
"""No secret and no certificates: tests, and machines that nobody else reaches."""
