"""A prefill worker whose memory is faulty: 64 bytes of a page change right after, or before, its digest was taken.

`run([MODE, FILE, "serve", "prefill", ...])` is the worker, a program for the fork server. Once FILE exists, every
`PERIOD`th page is damaged when it settles. MODE `after` is a fault that digests find; `before` is the control:
nothing can find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.domain.ids import PageId
from baton.kv.prefix_cache import PrefixCache
from baton.services.cli import main
from baton.transfer.digest import PoolHasher

PERIOD = 3
NUM_BYTES = 64


class RottingMemory:
    """Replaces `PrefixCache.settle`."""

    def __init__(self, mode: str, trigger: Path) -> None:
        self._before = mode == "before"
        self._trigger = trigger
        self._settle = PrefixCache.settle
        self._num_settled = 0

    def settle(self, cache: PrefixCache, pages: Sequence[PageId]) -> None:
        """Settles `pages` like the cache, and damages some of the new ones."""
        new = [page for page in pages if not cache.pool.digests.is_settled(page)]
        if self._before:
            self._damage(cache, new)
        self._settle(cache, pages)
        if not self._before:
            self._damage(cache, new)

    def _damage(self, cache: PrefixCache, pages: Sequence[PageId]) -> None:
        hasher = cache.hasher
        assert isinstance(hasher, PoolHasher)
        for page in pages if self._trigger.exists() else ():
            self._num_settled += 1
            if self._num_settled % PERIOD == 0:
                (content,) = hasher._memory.read([page])
                middle = len(content) // 2
                content[middle : middle + NUM_BYTES] = bytes(
                    byte ^ 0x55 for byte in content[middle : middle + NUM_BYTES]
                )


def run(words: Sequence[str]) -> int:
    """Runs `baton` with the words after MODE and FILE, in this process, and returns its exit code."""
    mode, trigger, *command = words
    memory = RottingMemory(mode, Path(trigger))
    setattr(PrefixCache, "settle", lambda cache, pages: memory.settle(cache, pages))  # noqa: B010
    return main.run(command)
