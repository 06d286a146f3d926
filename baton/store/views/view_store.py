"""Interface and values of the store of views. `RedisViewStore` and `MemoryViewStore` implement it.

Called by the router's cluster view, about once a second. A router is listed while it calls; its view is there while
another one watches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.ids import OwnerId

WATCH_TTL_S = 5.0
"""Time for which one call with `watching` lets the others share."""
LISTED_S = 30.0
"""A router that has not called for so long is forgotten."""
MAX_VIEW_BYTES = 64 * 1024
MAX_LISTED = 32
"""Routers that one call returns."""


@dataclass(frozen=True, slots=True)
class StoredView:
    """What the store has of another router. `age_s`: since its last call.

    `payload`: its view; "" if it has shared none. `fault`: why there is a view that must not be used, or "".
    """

    owner: OwnerId
    age_s: float
    payload: bytes = b""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class ViewExchange:
    """Answer of one call. `watched`: another router watches. `views`: all others; with payloads if the
    caller watches.
    """

    watched: bool
    views: Sequence[StoredView] = ()


class ViewStore(Protocol):
    """Views of the routers of one model."""

    async def exchange(self, owner: OwnerId, payload: bytes, *, watching: bool) -> ViewExchange:
        """Lists this router, stores its view ("" removes it), and reads those of the others if it is `watching`.

        Raises `ValueError` for a view of more than `MAX_VIEW_BYTES`, `StoreUnavailable`.
        """
        ...

    async def withdraw(self, owner: OwnerId) -> None:
        """Removes this router and its view. Raises `StoreUnavailable`."""
        ...

    async def close(self) -> None:
        """Releases connections; idempotent."""
        ...


def check_size(payload: bytes) -> None:
    """Raises `ValueError` for a view that is too large."""
    if len(payload) > MAX_VIEW_BYTES:
        raise ValueError(f"a view may have {MAX_VIEW_BYTES} bytes, not {len(payload)}")
