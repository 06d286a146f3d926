"""Steps over a storage that keeps window parts apart (`baton.kv.windows`): their slots beside their pages.

The runner adds them once a step. Layers that are apart then read the step in slots, all others in pages.
"""

from __future__ import annotations

from dataclasses import replace

from baton.model.attention.base import Segment, StepMetadata, plan_step
from baton.model.storage import PageStorage


def with_window_slots(step: StepMetadata, storage: PageStorage) -> StepMetadata:
    """The step with the slots of the window parts that it reads and writes, as they are now.

    Raises `Broken` if one of them is not there.
    """
    if not storage.has_window_slots:
        return step
    segments = [_in_slots(segment, storage) for segment in step.segments]
    return replace(step, windowed=plan_step(segments, step.page_size, storage.device))


def clear_partial_pages(step: StepMetadata, storage: PageStorage) -> None:
    """Zeros the pages that a step begins and does not fill, with their window parts."""
    if step.partial_pages.numel():
        storage.clear(step.partial_pages)
        if storage.has_window_slots:
            storage.clear_windows(step.of(is_apart=True).partial_pages)


def _in_slots(segment: Segment, storage: PageStorage) -> Segment:
    first_page, slots = storage.reached_slots(segment.pages, segment.start, segment.end)
    return replace(segment, pages=slots, first_page=first_page)
