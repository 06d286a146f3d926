"""Interface of the store of images' files, which `RedisMediaFileStore` and `MemoryMediaFileStore` implement.

Called by the router's `CallMedia`, never on the way of a token. A tenant finds its own files only.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

MAX_STORED_BYTES = 256 * 1024 * 1024
"""Default bound on all files of a store together, as they are stored, each with `FILE_OVERHEAD_BYTES`."""

FILE_OVERHEAD_BYTES = 512
"""What a file counts beside its bytes: its names and entries take about as much of the server's memory."""


class PutOutcome(enum.Enum):
    """KEPT: the store has acknowledged the file. FULL: it has no room, and nothing changed."""

    KEPT = "kept"
    FULL = "full"


class MediaFileStore(Protocol):
    """Files by tenant and identity. A file expires one retention after it was last put."""

    async def put(self, tenant: str, identity: bytes, data: bytes) -> PutOutcome:
        """Keeps a file, or keeps one that it has for longer. Raises `StoreUnavailable`."""
        ...

    async def get(self, tenant: str, identity: bytes) -> bytes | None:
        """The file; None if it is missing, expired, or does not open. Raises `StoreUnavailable`."""
        ...

    async def holds(self, tenant: str, identities: Sequence[bytes]) -> bool:
        """True if all files are stored now. Raises `StoreUnavailable`."""
        ...

    async def discard(self, tenant: str, identity: bytes) -> None:
        """Removes a file, since its bytes are wrong; idempotent. Raises `StoreUnavailable`."""
        ...

    async def close(self) -> None:
        """Releases connections; idempotent."""
        ...
