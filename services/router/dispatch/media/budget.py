"""Bounds the memory of the images of all admitted sequences. Owned by `dispatcher`; pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.errors import Overloaded
from baton.services.router.generation import MediaFile

RETRY_AFTER_S = 2.0


class MediaBudget:
    """At most `max_bytes` of files. The choices of a request share theirs, which count once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_holders: dict[int, int] = {}  # by the id of the bytes object, which its holders keep alive
        self.num_bytes = 0
        """Bytes held now."""

    def hold(self, files: Sequence[MediaFile], *, force: bool = False) -> None:
        """Counts the files of a sequence. Raises `Overloaded`, without effect, if there is no room for them.

        `force`: there is room, since the sequence was admitted before, by another router.
        """
        if not files:
            return
        new = {id(file.data): file.data for file in files if file.data is not None}
        num_new_bytes = sum(len(data) for key, data in new.items() if key not in self._num_holders)
        if num_new_bytes and not force and self.num_bytes + num_new_bytes > self._max_bytes:
            raise Overloaded("too many images are held for other requests", retry_after_s=RETRY_AFTER_S)
        self.num_bytes += num_new_bytes
        for key in new:
            self._num_holders[key] = self._num_holders.get(key, 0) + 1

    def release(self, files: Sequence[MediaFile]) -> None:
        """Gives back what `hold` has counted for the same files."""
        if not files:
            return
        for key, data in {id(file.data): file.data for file in files if file.data is not None}.items():
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                del self._num_holders[key]
                self.num_bytes -= len(data)
