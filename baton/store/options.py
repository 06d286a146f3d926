"""Names, lifetimes and deadlines of a state store. Services build it from their settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of `connect`.

    `prefix` starts every key, so deployments can share a server. `retention_s` counts from a record's last change and
    must exceed the longest life of a request; replaced incarnations of workers are remembered as long. `owner_ttl_s` is
    an owner's lease, `tombstone_s` the retention of the end of a call that the store has lost. `timeout_s` bounds every
    operation; a wait for tokens is added. `max_waiting_readers` bounds the connections that wait for tokens, and
    `max_orphans` the calls of one `list_orphans`. Unless `text_digest` is "", calls of other tokenizers are not
    listed as orphans: another router must continue them.
    """

    prefix: str = "baton:"
    retention_s: float = 3600.0
    worker_ttl_s: float = 2.0
    owner_ttl_s: float = 1.0
    tombstone_s: float = 60.0
    heartbeat_s: float = 0.5
    timeout_s: float = 1.0
    max_connections: int = 16
    max_incarnations: int = 64
    max_waiting_readers: int = 1024
    max_orphans: int = 64
    text_digest: str = ""

    def may_claim(self, text_digest: str) -> bool:
        """True if orphans with this digest are listed."""
        return "" in (text_digest, self.text_digest) or text_digest == self.text_digest

    def __post_init__(self) -> None:
        lifetimes = (
            *(self.retention_s, self.worker_ttl_s, self.owner_ttl_s, self.tombstone_s),
            *(self.heartbeat_s, self.timeout_s),
        )
        bounds = (self.max_connections, self.max_incarnations, self.max_waiting_readers, self.max_orphans)
        if min(lifetimes) <= 0 or min(bounds) < 1:
            raise ValueError(f"lifetimes, deadlines and bounds of the store must be positive: {self}")
