"""Says which prompts wait for embeddings, and which images are encoded next. Pure.

A prompt's life here:

1. `begin`: its images are pinned. Images whose rows its cached prefix lacks join the queue of those to encode. One that
   is not held ends the prompt with `NeedMedia`, unless its rows are cached.
2. It waits, outside of the order of the others, until all rows that it lacks are here. A step encodes images up to a
   budget of rows, at least one, then text goes on: so no prompt of text waits for more than one such step.
   `on_failed` ends the prompts that need an image of which the tower made nothing, and forgets the image.
   Images are pinned again while it waits: one that was not held at `begin` may be needed by now.
3. `end`: the pins go. An image that no other prompt waits for leaves the queue; it stays held while there is room.

Pages that are evicted while a prompt waits can bring back the need for rows; `find_fault` then tells. Before a step
uses rows they are compared with the digests that they settled with (`check`); an image that has changed is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from baton.domain.errors import BatonError, InvalidRequest, NeedMedia
from baton.domain.ids import AttemptId
from baton.domain.media.span import shown_spans
from baton.domain.request import EngineRequest
from baton.engine.batch import Row
from baton.engine.media.store import HeldMedia, MediaKey, MediaStore, PinHolder
from baton.services.prefill.prompt import Prompt


class MediaGate:
    """The images of one prefill worker's prompts. `budget_rows`: most rows that a step encodes, beyond one image."""

    def __init__(self, store: MediaStore[Any, Any], budget_rows: int, *, is_used: bool = True) -> None:
        """`is_used` False: embeddings are there by other means, and no prompt waits."""
        self._is_used = is_used
        self.store = store
        self._budget_rows = budget_rows
        self._wanted: dict[MediaKey, set[AttemptId]] = {}  # in the order of their prompts
        self._failed: dict[PinHolder, BatonError] = {}
        self._encoding: set[AttemptId] = set()  # prompts that wait for the images of the last batch
        self._encode_s: dict[AttemptId, float] = {}
        self.num_damaged = 0
        """Embeddings whose bytes were no longer those that were digested. No step has used one."""

    @property
    def num_wanted(self) -> int:
        """Images that wait to be encoded."""
        return len(self._wanted)

    @property
    def num_wanted_rows(self) -> int:
        """Rows of the images that wait to be encoded."""
        items = map(self.store.peek, self._wanted)
        return sum(item.num_rows for item in items if item is not None and item.rows is None)

    def begin(self, request: EngineRequest, num_known: int) -> BatonError | None:
        """Pins the images of a new prompt, of which `num_known` tokens are cached. The error that ends it, or None."""
        if not request.media or not self._is_used:
            return None
        keys = dict.fromkeys(_keys(request, 0))
        self.store.pin(request.id, keys)
        fault = self._find_overflow(request, num_known) or self.find_fault(request, num_known)
        if fault is None:
            self.store.end_keep(keys)
        return fault

    def find_fault(self, request: EngineRequest, num_known: int) -> BatonError | None:
        """The error that ends a prompt whose rows behind the first `num_known` tokens cannot be had; None if none."""
        missing = []
        for key, item in self._needed(request, num_known):
            if item is None:
                missing.append(key[1])
            elif item.num_rows < _num_shown(request, key[1]):
                return InvalidRequest(f"media {key[1].hex()} has {item.num_rows} rows, fewer than its spans")
        if not missing:
            return None
        return NeedMedia(f"{request.id}: {len(missing)} images are not held", tuple(missing))

    def faults(self, prompts: Iterable[Prompt]) -> list[tuple[AttemptId, BatonError]]:
        """The waiting prompts that cannot get their rows any more, with the error that ends each."""
        faults = [(one.request.id, self.find_fault(one.request, one.num_known)) for one in prompts if one.request.media]
        return [(id, self._failed.get(id, fault)) for id, fault in faults if fault is not None]

    def on_failed(self, key: MediaKey, error: BatonError) -> None:
        """Forgets an image that cannot be encoded now. `error` ends the waiting prompts that need it."""
        item = self.store.find(key)
        if item is not None:
            self._failed.update(dict.fromkeys(item.pins, error))
            self.store.drop(key)

    def must_wait(self, request: EngineRequest, num_known: int) -> bool:
        """True while rows behind the first `num_known` tokens are not encoded. Queues and pins their images."""
        waits = False
        for key, item in self._needed(request, num_known):
            self.store.pin(request.id, (key,))
            if item is None or item.rows is None:
                waits = True
                self._wanted.setdefault(key, set()).add(request.id)
        return waits

    def check(self, rows: Sequence[Row]) -> list[tuple[AttemptId, BatonError]]:
        """The rows of a step whose embeddings are not here, or no longer those that were digested.

        Such an image is forgotten; each row comes with the error that ends its prompt.
        """
        num_damaged, faults = -1, dict[AttemptId, BatonError]()
        while num_damaged != self.num_damaged:  # an image that is forgotten may be one of a row that was looked at
            num_damaged = self.num_damaged
            for row in rows if self._is_used else ():
                if lost := tuple(one for one, shown in _shown_rows(row).items() if not self._has_rows(one, *shown)):
                    faults[row.id] = NeedMedia(f"{row.id}: {len(lost)} images are not held", lost)
        return list(faults.items())

    def _has_rows(self, identity: bytes, first: int, end: int) -> bool:
        """True if the rows [first, end) of an image are here as they were digested. Forgets what is not."""
        while (rows := self.store.get(identity)) is not None:  # those that the step will find
            if rows.is_intact(first, end):
                return True
            self.num_damaged += 1
            self.store.drop_rows(identity, rows)
        return False

    def next_batch(self) -> list[tuple[MediaKey, HeldMedia[Any, Any]]]:
        """Takes the images of the next step from the queue: the first, and further ones within the budget."""
        wanted = dict(self._wanted)
        batch = self.store.take_batch(self._wanted, wanted, self._budget_rows)
        self._encoding = set().union(*(wanted[key] for key, _ in batch))
        return batch

    def on_encoded(self, seconds: float) -> None:
        """The step of the last batch took `seconds`: that is time of each prompt that waits for one of its images."""
        for id in self._encoding:
            self._encode_s[id] = self._encode_s.get(id, 0.0) + seconds
        self._encoding.clear()

    def end(self, id: AttemptId) -> float:
        """Releases the images of a prompt that has left, and returns the time of the steps that encoded for it, in s.

        Idempotent; 0 from the second call on.
        """
        self._encoding.discard(id)
        self.store.unpin(id)
        self._failed.pop(id, None)
        for key in [key for key, ids in self._wanted.items() if id in ids]:
            self._wanted[key].discard(id)
            if not self._wanted[key]:
                del self._wanted[key]
        return self._encode_s.pop(id, 0.0)

    def _find_overflow(self, request: EngineRequest, num_known: int) -> BatonError | None:
        """The refusal of a prompt whose images alone exceed the store; None if they fit, or nothing tells yet."""
        needed = list(self._needed(request, num_known))
        lacks = [key for key, item in needed if item is None]
        if not lacks or math.isinf(self.store.bytes_per_row):
            return None
        num_bytes = sum(item.num_bytes for _, item in needed if item is not None)
        num_bytes += int(sum(_num_shown(request, key[1]) for key in lacks) * self.store.bytes_per_row)
        if num_bytes <= self.store.max_bytes:
            return None
        message = f"the images take {num_bytes} bytes in this worker, which holds {self.store.max_bytes}"
        return InvalidRequest(message, param="media")

    def _needed(self, request: EngineRequest, num_known: int) -> Iterator[tuple[MediaKey, HeldMedia[Any, Any] | None]]:
        """The images with rows behind the first `num_known` tokens, each once."""
        for key in dict.fromkeys(_keys(request, num_known)) if self._is_used else ():
            yield key, self.store.find(key)


def _keys(request: EngineRequest, num_known: int) -> Iterable[MediaKey]:
    return ((request.salt, span.identity) for span in request.media if span.end > num_known)


def _shown_rows(row: Row) -> dict[bytes, tuple[int, int]]:
    """The images among a row's new tokens, each with the range of its embedding's rows that they show."""
    found: dict[bytes, tuple[int, int]] = {}
    for span, first, last in shown_spans(row.media, row.start, row.start + len(row.tokens)):
        offset = span.first_row - span.first
        begin, end = found.get(span.identity, (first + offset, last + offset))
        found[span.identity] = min(begin, first + offset), max(end, last + offset)
    return found


def _num_shown(request: EngineRequest, identity: bytes) -> int:
    """Rows of an image that its spans go to."""
    return max(span.first_row + span.num_tokens for span in request.media if span.identity == identity)
