"""Decides which images are encoded next, and which pulls get an embedding. Pure: time is an argument.

An image's life here:

    not held --hold--> waiting --next_batch--> encoding --commit--> published --evicted--> not held

An image that came is kept for its first pull, for `KEEP_S` at most. A pull leases its image: it is not evicted until
the pull is closed or its deadline passes. One whose image waits gets the embedding at `commit`. One whose image is not
held, or cannot be encoded, ends with `NeedMedia`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.domain.errors import BatonError, DeadlineExceeded, NeedMedia
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.store import HeldMedia, MediaKey, MediaStore


@dataclass(frozen=True, slots=True)
class GiveEmbedding:
    """Effect: the pull `lease` gets this embedding."""

    lease: int
    item: HeldMedia[Any, ExportedEmbedding]


@dataclass(frozen=True, slots=True)
class RefusePull:
    """Effect: the pull `lease` has ended."""

    lease: int
    error: BatonError


EncodeEffect = GiveEmbedding | RefusePull


@dataclass(slots=True)
class _Lease:
    key: MediaKey
    deadline: float
    is_answered: bool = False


class EncodeScheduler:
    """The images and pulls of one encode worker. `budget_rows`: most rows that a step encodes, beyond one image."""

    def __init__(self, store: MediaStore[Any, ExportedEmbedding], budget_rows: int) -> None:
        self.store = store
        self._budget_rows = budget_rows
        self._waiting: dict[MediaKey, int] = {}  # rows, in the order of arrival
        self._leases: dict[int, _Lease] = {}
        self.num_damaged = 0
        """Embeddings whose bytes were no longer those that were digested. None of them was given away."""

    @property
    def num_waiting(self) -> int:
        """Images that are to be encoded."""
        return len(self._waiting)

    @property
    def num_waiting_rows(self) -> int:
        """Their rows."""
        return sum(self._waiting.values())

    @property
    def num_leases(self) -> int:
        """Pulls that are open."""
        return len(self._leases)

    def hold(self, key: MediaKey, item: HeldMedia[Any, ExportedEmbedding], now: float) -> bool:
        """Takes an image, to be encoded in its turn. False without room for it."""
        if not self.store.hold(key, item, now):
            return False
        self.store.keep(key, now)
        held = self.store.find(key)
        if held is not None and held.rows is None:
            self._waiting.setdefault(key, held.num_rows)
        return True

    def open(self, lease: int, key: MediaKey, deadline: float) -> list[EncodeEffect]:
        """Begins a pull. Its embedding comes now, or with a later `commit`."""
        item = self.store.find(key)
        if item is not None and item.rows is not None and not item.rows.is_intact:
            self.drop(key)
            self.num_damaged += 1
            item = None
        if item is None:
            return [RefusePull(lease, _missing(key))]
        self.store.pin(lease, (key,))
        self.store.end_keep((key,))  # it was kept for this pull, whose lease keeps it from now on
        self._leases[lease] = _Lease(key, deadline)
        if item.rows is None:
            self._waiting.setdefault(key, item.num_rows)
            return []
        return self._answer(key)

    def close(self, lease: int) -> None:
        """Ends a pull. Idempotent."""
        self._leases.pop(lease, None)
        self.store.unpin(lease)

    def drop(self, key: MediaKey) -> None:
        """Forgets an image."""
        self._waiting.pop(key, None)
        self.store.drop(key)

    def expire(self, now: float) -> list[EncodeEffect]:
        """Ends the pulls whose deadline has passed."""
        late = [(id, lease) for id, lease in self._leases.items() if lease.deadline <= now]
        for id, _ in late:
            self.close(id)
        error = DeadlineExceeded("the embedding was not pulled in time")
        return [RefusePull(id, error) for id, lease in late if not lease.is_answered]

    def next_wakeup(self) -> float | None:
        """Time of the next deadline."""
        return min((lease.deadline for lease in self._leases.values()), default=None)

    def next_batch(self) -> list[tuple[MediaKey, HeldMedia[Any, ExportedEmbedding]]]:
        """Takes the images of the next step: those that pulls wait for first, in the order of arrival."""
        pulled = {lease.key for lease in self._leases.values()}
        order = sorted(self._waiting, key=lambda one: one not in pulled)
        return self.store.take_batch(self._waiting, order, self._budget_rows)

    def commit(self, keys: Sequence[MediaKey], failed: Sequence[MediaKey]) -> list[EncodeEffect]:
        """Publishes the images of a finished step. Those that have `failed` are forgotten, and end their pulls."""
        effects: list[EncodeEffect] = []
        for key in keys:
            if key in failed:
                self.drop(key)
            effects += self._answer(key)
        return effects

    def _answer(self, key: MediaKey) -> list[EncodeEffect]:
        """Answers the pulls of an image that is published, or not held."""
        item = self.store.find(key)
        effects: list[EncodeEffect] = []
        for id, lease in list(self._leases.items()):
            if lease.key != key or lease.is_answered:
                continue
            if item is not None and item.rows is not None:
                lease.is_answered = True
                effects.append(GiveEmbedding(id, item))
            else:
                self.close(id)
                effects.append(RefusePull(id, _missing(key)))
        return effects


def _missing(key: MediaKey) -> NeedMedia:
    return NeedMedia(f"media {key[1].hex()} is not held here", (key[1],))
