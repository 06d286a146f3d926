"""Moves keys and values of the accepted paths of trees to adjacent slots, in all layers. Called by runners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor


class MovedSlots(Protocol):
    """Slots of one sequence's `pages` to move: (from, to), places in the sequence."""

    @property
    def pages(self) -> Sequence[int]: ...

    @property
    def places(self) -> tuple[tuple[int, int], ...]: ...


def move_slots(storage: PageStorage, rows: Sequence[MovedSlots]) -> None:
    """Moves slots of the target's layers and of the draft layers, all at once. Tails are the drafter's business."""
    if not rows:
        return
    size, device = storage.geometry.page_size, storage.device
    sides = [[(row.pages, pair[side]) for row in rows for pair in row.places] for side in (0, 1)]
    sources, targets = (
        (
            int64_tensor([pages[place // size] for pages, place in side], device),
            int64_tensor([place % size for _, place in side], device),
        )
        for side in sides
    )
    storage.move_slots(sources, targets)
    if storage.geometry.draft is not None:
        storage.draft_view().move_slots(sources, targets)
