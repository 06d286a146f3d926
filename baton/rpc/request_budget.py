"""Bounds the memory of requests: bytes a method, and bytes of all calls that are open. Pure.

Used by `AuthInterceptor` before a request is read: gRPC Python has no resource quota.
"""

from __future__ import annotations

MAX_PROMPT_BYTES = 16 * 1024 * 1024
"""Longest request that carries a prompt or its page keys: three times a prompt of a million tokens."""
MAX_CONTROL_BYTES = 256 * 1024
"""Longest request of any other kind: the renewal of 5,000 leases."""
MAX_OPEN_BYTES = 256 * 1024 * 1024
"""Requests of all open calls together."""

REFLECTION_METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_LARGE_METHODS = frozenset(
    f"/baton.v1.{name}" for name in ("Prefill/Prefill", "Decode/Generate", "Decode/Reserve", "Handoff/OpenExport")
) | {REFLECTION_METHOD}  # a stream, whose requests are not checked before gRPC has read them


def max_request_bytes(method: str) -> int:
    """Longest request of a method, named `/package.Service/Name`."""
    return MAX_PROMPT_BYTES if method in _LARGE_METHODS else MAX_CONTROL_BYTES


class RequestBudget:
    """Bytes of the requests of all open calls. Owned by one event loop."""

    def __init__(self, max_bytes: int = MAX_OPEN_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Takes `num_bytes`; False, and nothing taken, if they do not fit. The only call open always fits."""
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Releases what `take` took."""
        self.num_bytes -= num_bytes
