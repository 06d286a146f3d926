"""Cuts deltas into messages of bounded size and joins their keys. `CacheDelta` in worker.proto is their form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.domain.ids import PageKey
from baton.kv.events.event import CacheDelta
from baton.kv.keys import KEY_BYTES

MAX_KEYS = 1 << 15
"""Keys of one message: 512 KiB."""


def split_delta(delta: CacheDelta, max_keys: int = MAX_KEYS) -> Iterator[tuple[CacheDelta, bool]]:
    """Parts of a delta with at most `max_keys` keys, and True for each but the last. Only the first one resets."""
    num_stored, num_keys = len(delta.stored), len(delta.stored) + len(delta.removed)
    for start in range(0, max(1, num_keys), max_keys):
        stop = start + max_keys
        removed = delta.removed[max(0, start - num_stored) : max(0, stop - num_stored)]
        part = replace(delta, stored=delta.stored[start:stop], removed=removed, reset=delta.reset and start == 0)
        yield part, stop < num_keys


def join_keys(keys: Sequence[PageKey]) -> bytes:
    """The keys one after the other."""
    return b"".join(keys)


def split_keys(joined: bytes) -> tuple[PageKey, ...]:
    """Undoes `join_keys`. Raises `ValueError` unless the length is that of whole keys."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"page keys of {KEY_BYTES} bytes expected, got {len(joined)} bytes")
    return tuple(PageKey(joined[start : start + KEY_BYTES]) for start in range(0, len(joined), KEY_BYTES))
