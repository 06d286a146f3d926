"""The images that a prefill worker holds: tensors until they are encoded, embeddings from then on. Pure bookkeeping.

Owned by the engine thread. Bounded by bytes, the least recently used go first. Images that a prompt still needs are
pinned. An image is found by requests of its own salt only, so that timing tells no tenant what another one has sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.domain.ids import AttemptId
from baton.domain.media.span import MediaGrid

Inputs = TypeVar("Inputs")
Rows = TypeVar("Rows")
MediaKey = tuple[str, bytes]
"""Salt and identity."""


@dataclass(slots=True, eq=False)
class HeldMedia(Generic[Inputs, Rows]):
    """One image. `inputs`: of the tower, None once `rows` are there. `row_bytes` of all rows count from the start.

    `fault`: why it could not be encoded; "" if it could, or nobody has tried.
    """

    inputs: Inputs | None
    num_rows: int
    grid: MediaGrid | None
    input_bytes: int
    row_bytes: int
    rows: Rows | None = None
    fault: str = ""
    pins: set[AttemptId] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """What it counts for: its rows, and its inputs while they are here."""
        return self.row_bytes + (0 if self.inputs is None else self.input_bytes)


class MediaStore(Generic[Inputs, Rows]):
    """Held images by salt and identity. `max_bytes`: of all of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[MediaKey, HeldMedia[Inputs, Rows]] = OrderedDict()
        self._salts: dict[bytes, set[str]] = {}
        self._pinned: dict[AttemptId, tuple[MediaKey, ...]] = {}
        self.num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def find(self, key: MediaKey) -> HeldMedia[Inputs, Rows] | None:
        """The image, which becomes the most recently used one; None if it is not held."""
        item = self._held.get(key)
        if item is not None:
            self._held.move_to_end(key)
        return item

    def hold(self, key: MediaKey, item: HeldMedia[Inputs, Rows]) -> bool:
        """Keeps an image that is not held yet, and evicts others for it. False, and nothing changes, without room."""
        if self.find(key) is not None:
            return True
        evictable = sum(other.num_bytes for other in self._held.values() if not other.pins)
        if self.num_bytes - evictable + item.num_bytes > self._max_bytes:
            return False
        for old in [one for one, other in self._held.items() if not other.pins]:
            if self.num_bytes + item.num_bytes <= self._max_bytes:
                break
            self.drop(old)
            self.num_evicted += 1
        self._held[key] = item
        self._salts.setdefault(key[1], set()).add(key[0])
        self.num_bytes += item.num_bytes
        return True

    def drop(self, key: MediaKey) -> None:
        """Forgets an image, pinned or not. Ignores one that is not held."""
        item = self._held.pop(key, None)
        if item is None:
            return
        self.num_bytes -= item.num_bytes
        salts = self._salts[key[1]]
        salts.discard(key[0])
        if not salts:
            del self._salts[key[1]]

    def pin(self, id: AttemptId, keys: Iterable[MediaKey]) -> None:
        """Keeps those of `keys` that are held until `unpin`, for the prompt of one attempt. Called once for it."""
        found = tuple(key for key in keys if key in self._held)
        for key in found:
            self._held[key].pins.add(id)
        self._pinned[id] = found

    def unpin(self, id: AttemptId) -> None:
        """Releases what `pin` kept. Idempotent."""
        for key in self._pinned.pop(id, ()):
            item = self._held.get(key)
            if item is not None:
                item.pins.discard(id)

    def on_encoded(self, key: MediaKey, rows: Rows) -> None:
        """Takes the embedding of a held image in place of its inputs. Ignores one that was dropped."""
        item = self._held.get(key)
        if item is None:
            return
        self.num_bytes -= item.num_bytes
        item.rows, item.inputs = rows, None
        self.num_bytes += item.num_bytes

    def get(self, identity: bytes) -> Rows | None:
        """The embedding of an image, under whatever salt: it does not depend on it. None if there is none."""
        found = (self._held[(salt, identity)].rows for salt in self._salts.get(identity, ()))
        return next((rows for rows in found if rows is not None), None)
