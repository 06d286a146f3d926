"""The images that a worker holds: tensors until they are encoded, embeddings from then on. Pure bookkeeping.

Owned by the engine thread. Bounded by bytes, the least recently used go first. Images that a prompt still needs are
pinned; one that came for a prompt is kept for a while, until that prompt is here. An image is found by requests of its
own salt only, so that timing tells no tenant what another one has sent.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from baton.domain.ids import AttemptId
from baton.domain.media.span import MediaGrid
from baton.domain.worker import MediaCounts

Inputs = TypeVar("Inputs")
Rows = TypeVar("Rows")
MediaKey = tuple[str, bytes]
"""Salt and identity."""

PinHolder = AttemptId | int
"""What keeps an image: the prompt of an attempt, or the number of a lease."""

KEEP_S = 30.0
"""Longest wait of an image for its prompt, whose other images may still be to come."""


@dataclass(slots=True, eq=False)
class HeldMedia(Generic[Inputs, Rows]):
    """One image. `inputs`: of the tower, None once `rows` are there. `row_bytes` of all rows count from the start.

    `kept_until`: it is not evicted before, with or without a prompt.
    """

    inputs: Inputs | None
    num_rows: int
    grid: MediaGrid | None
    input_bytes: int
    row_bytes: int
    rows: Rows | None = None
    kept_until: float = 0.0
    pins: set[PinHolder] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Bytes of its rows, and of its inputs while they are here."""
        return self.row_bytes + (0 if self.inputs is None else self.input_bytes)


class MediaStore(Generic[Inputs, Rows]):
    """Held images by salt and identity. `max_bytes`: of all of them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes_per_row = math.inf
        """The least of an image with its inputs, of all that were ever held; infinite before the first."""
        self._held: OrderedDict[MediaKey, HeldMedia[Inputs, Rows]] = OrderedDict()
        self._salts: dict[bytes, set[str]] = {}
        self._pinned: dict[PinHolder, set[MediaKey]] = {}
        self.num_bytes = 0
        self.num_evicted = 0
        self._num_encoded = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def counts(self) -> MediaCounts:
        """What is held now."""
        return MediaCounts(len(self._held), self._num_encoded, self.num_bytes, self.max_bytes)

    def find(self, key: MediaKey) -> HeldMedia[Inputs, Rows] | None:
        """The image, which becomes the most recently used one; None if it is not held."""
        item = self._held.get(key)
        if item is not None:
            self._held.move_to_end(key)
        return item

    def peek(self, key: MediaKey) -> HeldMedia[Inputs, Rows] | None:
        """The image, without a use of it; None if it is not held."""
        return self._held.get(key)

    def hold(self, key: MediaKey, item: HeldMedia[Inputs, Rows], now: float = 0.0) -> bool:
        """Holds an image that is not held yet, and evicts others for it. False, and nothing changes, without room."""
        if self.find(key) is not None:
            return True
        if not self.has_room(item.num_bytes, now):
            return False
        for old in self._evictable(now):
            if self.num_bytes + item.num_bytes <= self.max_bytes:
                break
            self.drop(old)
            self.num_evicted += 1
        self._held[key] = item
        self._num_encoded += item.rows is not None
        self._salts.setdefault(key[1], set()).add(key[0])
        self.num_bytes += item.num_bytes
        self.bytes_per_row = min(self.bytes_per_row, item.num_bytes / max(1, item.num_rows))
        return True

    def has_room(self, num_bytes: int, now: float) -> bool:
        """True if an image of so many bytes could be held now, perhaps in place of others."""
        evictable = sum(self._held[key].num_bytes for key in self._evictable(now))
        return self.num_bytes - evictable + num_bytes <= self.max_bytes

    def _evictable(self, now: float) -> list[MediaKey]:
        return [key for key, one in self._held.items() if not one.pins and one.kept_until <= now]

    def keep(self, key: MediaKey, now: float) -> None:
        """Evicts a held image for no other one until its prompt has come, for `KEEP_S` at most."""
        if key in self._held:
            self._held[key].kept_until = now + KEEP_S

    def end_keep(self, keys: Iterable[MediaKey]) -> None:
        """A prompt with these images has come. From now on its pins keep them."""
        for key in keys:
            if key in self._held:
                self._held[key].kept_until = 0.0

    def drop(self, key: MediaKey) -> None:
        """Forgets an image, pinned or not. Ignores one that is not held."""
        item = self._held.pop(key, None)
        if item is None:
            return
        self.num_bytes -= item.num_bytes
        self._num_encoded -= item.rows is not None
        salts = self._salts[key[1]]
        salts.discard(key[0])
        if not salts:
            del self._salts[key[1]]

    def drop_rows(self, identity: bytes, rows: Rows) -> None:
        """Forgets the images whose embedding is exactly `rows`, pinned or not."""
        for salt in [*self._salts.get(identity, ())]:
            if self._held[salt, identity].rows is rows:
                self.drop((salt, identity))

    def pin(self, id: PinHolder, keys: Iterable[MediaKey]) -> None:
        """Keeps those of `keys` that are held until `unpin`. Adds to earlier ones of the same holder."""
        pinned = self._pinned.setdefault(id, set())
        for key in keys:
            if key in self._held:
                self._held[key].pins.add(id)
                pinned.add(key)

    def unpin(self, id: PinHolder) -> None:
        """Releases what `pin` kept. Idempotent."""
        for key in self._pinned.pop(id, ()):
            item = self._held.get(key)
            if item is not None:
                item.pins.discard(id)

    def take_batch(
        self, queue: MutableMapping[MediaKey, Any], order: Iterable[MediaKey], budget_rows: int
    ) -> list[tuple[MediaKey, HeldMedia[Inputs, Rows]]]:
        """Takes the images of one step out of `queue`: the first in `order`, and further ones within `budget_rows`.

        Those that are no longer held, or are encoded, leave the queue, too.
        """
        batch: list[tuple[MediaKey, HeldMedia[Inputs, Rows]]] = []
        num_rows = 0
        for key in order:
            item = self.find(key)
            if item is None or item.rows is not None:
                del queue[key]
                continue
            if batch and num_rows + item.num_rows > budget_rows:
                break
            del queue[key]
            num_rows += item.num_rows
            batch.append((key, item))
        return batch

    def on_encoded(self, key: MediaKey, rows: Rows) -> None:
        """Takes the embedding of a held image in place of its inputs. Ignores one that was dropped."""
        item = self._held.get(key)
        if item is None:
            return
        self._num_encoded += item.rows is None
        self.num_bytes -= item.num_bytes
        item.rows, item.inputs = rows, None
        self.num_bytes += item.num_bytes

    def get(self, identity: bytes) -> Rows | None:
        """The embedding of an image, under whatever salt: it does not depend on it. None if there is none."""
        found = (self._held[(salt, identity)].rows for salt in self._salts.get(identity, ()))
        return next((rows for rows in found if rows is not None), None)
