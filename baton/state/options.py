"""How a book is kept: names, lifetimes and deadlines. Made by a service from its settings; knows no environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BookOptions:
    """What `connect` may be told.

    `prefix` starts every key, so that deployments can share a server. `retention_s` counts from a request's last
    change, and is also how long a worker's replaced incarnations are remembered. `timeout_s` bounds every call.
    """

    prefix: str = "baton:"
    retention_s: float = 3600.0
    worker_ttl_s: float = 2.0
    heartbeat_s: float = 0.5
    timeout_s: float = 1.0
    max_connections: int = 16
    max_incarnations: int = 64

    def __post_init__(self) -> None:
        positive = (self.retention_s, self.worker_ttl_s, self.heartbeat_s, self.timeout_s)
        if min(positive) <= 0 or self.max_connections < 1 or self.max_incarnations < 1:
            raise ValueError(f"lifetimes, deadlines and bounds of the book must be positive: {self}")
