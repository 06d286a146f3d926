"""Chains of drafts, token by token, all rows of a step side by side. Shared by draft models and drafting heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.attention.base import Segment, StepMetadata
from baton.model.decoders.capture import HiddenCapture
from baton.model.sampling.sampler import SamplerBackend, SamplingRow, sample_tokens
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row that wants `count` drafts behind `token` at position `start`; `pages` cover them.

    `spec` says how the target will sample after given drafts of this row, at its temperature divided by a number.
    `parents`: of a tree, by the indices of drafts, and -1; (): a chain.
    """

    token: int
    start: int
    pages: Sequence[int]
    count: int
    spec: Callable[[Sequence[int], float], SamplingRow]
    parents: tuple[int, ...] = ()

    def segment(self, offset: int, place: int) -> Segment:
        """The token or draft at `place`, alone."""
        return Segment(offset, self.start + place, 1, self.pages)


class PageDrafts(Protocol):
    """Makes drafts from the draft layers of pages, and keeps these layers. Called by the runner."""

    vocab_size: int

    def new_capture(self) -> HiddenCapture | None:
        """For the target's pass over a step: the hidden states that `write` needs; None: none."""
        ...

    def make(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """The drafts of each row. They write draft layers of the rows' own slots; `write` does it again."""
        ...

    def write(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        capture: HiddenCapture | None,
        embeds: Embeds | None = None,
    ) -> None:
        """Writes the draft part of all tokens of a step, after the target's pass, which clears pages.

        `embeds`: the rows of images that the target read in this step.
        """
        ...

    def settle(self, kept: Sequence[Sequence[int]]) -> None:
        """The tokens `kept[i]` of segment i of the step written last are true, in this order; the rest were rejected.

        Their slots were not moved yet, or were: it reads none.
        """
        ...


LogitsAfter = Callable[[Sequence[int], Sequence[int], Sequence[Segment]], torch.Tensor]
"""Logits [active rows, vocab_size] after one token of each active row: (indices of the rows, tokens, segments)."""


def make_chains(
    rows: Sequence[DraftRow], logits_after: LogitsAfter, sampler: SamplerBackend, sharpness: float = 1.0
) -> list[tuple[int, ...]]:
    """The drafts of each row, each drawn as the target would draw it: with the seed and position of its place.

    Where both distributions agree, so do the tokens. `sharpness`: power of the drafter's distribution, above 1 for one
    that is less sure than the target.
    """
    made: list[list[int]] = [[] for _ in rows]
    for place in range(max((row.count for row in rows), default=0)):
        active = [index for index, row in enumerate(rows) if row.count > place]
        tokens = [made[index][-1] if place else rows[index].token for index in active]
        segments = [rows[index].segment(offset, place) for offset, index in enumerate(active)]
        logits = logits_after(active, tokens, segments)
        specs = [rows[index].spec(made[index], sharpness) for index in active]
        for index, sampled in zip(active, sample_tokens(logits, specs, sampler, {}).read(), strict=True):
            made[index].append(sampled.token)
    return [tuple(drafts) for drafts in made]


MakeDrafts = Callable[[Sequence[DraftRow]], list[tuple[int, ...]]]


def by_shape(rows: Sequence[DraftRow], chains: MakeDrafts, trees: MakeDrafts) -> list[tuple[int, ...]]:
    """The drafts of each row, of those that want chains by `chains`, of the others by `trees`."""
    made: dict[int, tuple[int, ...]] = {}
    for make, wants_tree in ((chains, False), (trees, True)):
        asking = [index for index, row in enumerate(rows) if bool(row.parents) is wants_tree]
        if asking:
            made.update(zip(asking, make([rows[index] for index in asking]), strict=True))
    return [made[index] for index in range(len(rows))]


def clear_begun_pages(storage: PageStorage, rows: Sequence[DraftRow]) -> None:
    """Clears the pages that drafts begin: they must not keep values of a last owner. A NaN would survive masking.

    Also those that they fill: passes before the last one see them partly filled.
    """
    size = storage.geometry.page_size
    begun = [
        row.pages[number]
        for row in rows
        for number in range(ceil_div(row.start, size), (row.start + row.count) // size + 1)
    ]
    if begun:
        storage.clear(int64_tensor(begun, storage.device))


def fit_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The logits of the target's tokens: vocabularies may be padded to other sizes."""
    num_missing = vocab_size - logits.shape[1]
    if num_missing <= 0:
        return logits[:, :vocab_size].contiguous()
    return torch.nn.functional.pad(logits, (0, num_missing), value=-torch.inf)
