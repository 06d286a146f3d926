"""A draft model: a smaller decoder of the same tokens, whose K and V lie in the draft layers of the target's pages.

Called by the runner around the target's forward pass. After a step the draft layers of every slot that it has written
hold the K and V of its token, whether it was a prompt's, a row's or a draft. So pages are all that drafting needs:
those that were handed over, cached, copied to the host or replayed are as good as one's own. Knows rows, no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from baton.model.attention.base import Segment, StepMetadata, plan_step
from baton.model.decoders.base import Decoder
from baton.model.sampling.sampler import SamplerBackend, SamplingRow, sample_tokens
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row that wants `count` drafts behind `token` at position `start`; `pages` cover them.

    `spec` says how the target will sample after given drafts of this row.
    """

    token: int
    start: int
    pages: Sequence[int]
    count: int
    spec: Callable[[Sequence[int]], SamplingRow]

    def segment(self, offset: int, place: int) -> Segment:
        """The token or draft at `place`, alone."""
        return Segment(offset, self.start + place, 1, self.pages)


class DraftModel:
    """Drafts with `decoder`, which runs over `storage`, a draft view. `vocab_size`: the target's."""

    def __init__(
        self, decoder: Decoder, storage: PageStorage, sampler: SamplerBackend, own_vocab_size: int, vocab_size: int
    ) -> None:
        self._decoder = decoder
        self._storage = storage
        self._sampler = sampler
        self._last_id = own_vocab_size - 1
        self.vocab_size = vocab_size

    def make(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """The drafts of each row, token by token, all rows side by side.

        Each is drawn as the target would draw it, with the seed and position of its place: where both distributions
        agree, so do the tokens. Writes draft layers of the rows' own slots; `write` does it again.
        """
        self._clear_begun_pages(rows)
        made: list[list[int]] = [[] for _ in rows]
        for place in range(max((row.count for row in rows), default=0)):
            active = [index for index, row in enumerate(rows) if row.count > place]
            tokens = [made[index][-1] if place else rows[index].token for index in active]
            segments = [rows[index].segment(offset, place) for offset, index in enumerate(active)]
            logits = self._forward(tokens, segments)
            specs = [rows[index].spec(made[index]) for index in active]
            for index, sampled in zip(active, sample_tokens(logits, specs, self._sampler, {}).read(), strict=True):
                made[index].append(sampled.token)
        return [tuple(drafts) for drafts in made]

    def write(self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata) -> None:
        """Writes the draft layers of all tokens of a step. To be called after the target, which clears pages."""
        self._run(input_ids, positions, step, torch.tensor([input_ids.shape[0] - 1], device=input_ids.device))

    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [tokens, target's vocab_size] after one token of each segment."""
        device = self._storage.device
        step = plan_step(segments, self._storage.geometry.page_size, device)
        ids, positions = int64_tensor(tokens, device), int64_tensor([one.start for one in segments], device)
        return self._fit(self._run(ids, positions, step, torch.arange(len(tokens), device=device)))

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata, keep: torch.Tensor
    ) -> torch.Tensor:
        """One pass that clears no page: the target's layers are in the same ones. Unknown ids are as the last one."""
        uncleared = replace(step, partial_pages=step.partial_pages[:0])
        return self._decoder.forward(input_ids.clamp(max=self._last_id), positions, uncleared, keep)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of the target's tokens: vocabularies may be padded to other sizes."""
        num_missing = self.vocab_size - logits.shape[1]
        if num_missing <= 0:
            return logits[:, : self.vocab_size].contiguous()
        return torch.nn.functional.pad(logits, (0, num_missing), value=-torch.inf)

    def _clear_begun_pages(self, rows: Sequence[DraftRow]) -> None:
        """A page that drafts begin must not keep its last owner's values: a NaN would survive masking."""
        segments = [Segment(0, row.start, 1 + row.count, row.pages) for row in rows]
        begun = plan_step(segments, self._storage.geometry.page_size, self._storage.device).partial_pages
        if begun.numel():
            self._storage.clear(begun)
