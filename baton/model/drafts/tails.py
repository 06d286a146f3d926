"""The tails of pages: features of their last filled slots, with which a head goes on behind them.

A step sets the tails of all pages it writes to. Its owner sets them again once it knows which drafts were rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from baton.model.attention.base import Segment, StepMetadata
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor


class PageTails:
    """The tails of `storage`, the target's pages; each as wide as the features [tokens, tail_elements] of a step."""

    def __init__(self, storage: PageStorage) -> None:
        self._page_size = storage.geometry.page_size
        self._tails = storage.tails
        self._written: tuple[StepMetadata, torch.Tensor] | None = None

    def before(self, starts: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """The features of the slot before each (start, pages): [rows, tail_elements]; zeros before slot 0."""
        pages = [pages[max(0, start - 1) // self._page_size] for start, pages in starts]
        features = self._tails.index_select(0, int64_tensor(pages, self._tails.device))
        begun = [index for index, (start, _) in enumerate(starts) if start == 0]
        return features.index_fill_(0, int64_tensor(begun, self._tails.device), 0)

    def shift(self, step: StepMetadata, features: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """For each token of a step the feature of the slot before it: [tokens, width].

        `features` [tokens, width]: of the step's own slots; `before` [segments, width]: of those before it.
        """
        shifted = features.roll(1, 0)
        for segment in step.segments:
            if segment.parents:
                places = [segment.offset + parent for parent in segment.parents[1:]]
                rows = features[int64_tensor(places, features.device)]
                shifted[segment.offset + 1 : segment.offset + segment.num_tokens] = rows
        shifted[int64_tensor([segment.offset for segment in step.segments], shifted.device)] = before
        return shifted

    def write(self, step: StepMetadata, features: torch.Tensor) -> None:
        """Sets the tails of all pages that a step wrote to."""
        self._set(features, [place for segment in step.segments for place in _page_ends(segment, step.page_size)])
        self._written = step, features

    def settle(self, kept: Sequence[Sequence[int]]) -> None:
        """Sets them again where only some tokens of a segment of that step were kept.

        `kept`: for each segment the indices of its kept tokens in the order of their positions, at least one.
        """
        if self._written is None:
            raise ValueError("no step was written")
        step, features = self._written
        places = [
            place
            for segment, tokens in zip(step.segments, kept, strict=True)
            if len(tokens) < segment.num_tokens or segment.parents
            for place in _kept_ends(segment, tokens, self._page_size)
        ]
        self._set(features, places)

    def _set(self, features: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
        """Sets the tail of each page to the features of a flat token: (page, token)."""
        if places:
            pages, tokens = (int64_tensor(column, features.device) for column in zip(*places, strict=True))
            self._tails.index_copy_(0, pages, features.index_select(0, tokens))


def _page_ends(segment: Segment, page_size: int) -> Iterator[tuple[int, int]]:
    """For each page that the segment writes to: (page, flat index of its last token there)."""
    for number in range(segment.start // page_size, (segment.end - 1) // page_size + 1):
        last = min(segment.end, (number + 1) * page_size) - 1
        yield segment.pages[number], segment.offset + last - segment.start


def _kept_ends(segment: Segment, kept: Sequence[int], page_size: int) -> Iterator[tuple[int, int]]:
    """The same for a segment of which only some tokens were kept; they lie in adjacent slots."""
    for place, token in enumerate(kept):
        at = segment.start + place
        if place == len(kept) - 1 or (at + 1) % page_size == 0:
            yield segment.pages[at // page_size], segment.offset + token
