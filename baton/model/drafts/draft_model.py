"""A draft model: a smaller decoder of the same tokens, whose K and V lie in the draft layers of the target's pages.

Called by the runner around the target's forward pass. After a step the draft layers of every slot that it has written
hold the K and V of its token, whether it was a prompt's, a row's or a draft. So pages are all that drafting needs:
those that were handed over, cached, copied to the host or replayed are as good as one's own. Knows rows, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from baton.model.attention.base import Segment, StepMetadata, plan_step
from baton.model.decoders.base import Decoder
from baton.model.decoders.capture import HiddenCapture
from baton.model.drafts.chains import DraftRow, by_shape, clear_begun_pages, fit_vocabulary, make_chains
from baton.model.drafts.growing_trees import Generation, make_trees
from baton.model.sampling.sampler import SamplerBackend
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds


class DraftModel:
    """`PageDrafts` of `decoder`, which runs over `storage`, a draft view. `vocab_size`: the target's."""

    def __init__(
        self, decoder: Decoder, storage: PageStorage, sampler: SamplerBackend, own_vocab_size: int, vocab_size: int
    ) -> None:
        self._decoder = decoder
        self._storage = storage
        self._sampler = sampler
        self._last_id = own_vocab_size - 1
        self.vocab_size = vocab_size

    def new_capture(self) -> HiddenCapture | None:
        """See `PageDrafts.new_capture`: it needs tokens only."""
        return None

    def make(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """See `PageDrafts.make`."""
        clear_begun_pages(self._storage, rows)

        def chains(rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
            return make_chains(rows, self._logits_after, self._sampler)

        def trees(rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
            with torch.inference_mode():
                return make_trees(rows, self._logits_of, self._sampler)

        return by_shape(rows, chains, trees)

    def write(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        capture: HiddenCapture | None = None,
        embeds: Embeds | None = None,
    ) -> None:
        """See `PageDrafts.write`. A draft model is one of text: it reads the placeholders of images as tokens."""
        self._run(input_ids, positions, step, torch.tensor([input_ids.shape[0] - 1], device=input_ids.device))

    def settle(self, kept: Sequence[Sequence[int]]) -> None:
        """See `PageDrafts.settle`: slots behind the kept ones are written again."""

    def _logits_after(self, _: Sequence[int], tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        device = self._storage.device
        step = plan_step(segments, self._storage.geometry.page_size, device)
        ids, positions = int64_tensor(tokens, device), int64_tensor([one.start for one in segments], device)
        logits = self._run(ids, positions, step, torch.arange(len(tokens), device=device))
        return fit_vocabulary(logits, self.vocab_size)

    def _logits_of(self, generation: Generation) -> torch.Tensor:
        device = self._storage.device
        step = plan_step(generation.segments, self._storage.geometry.page_size, device)
        ids, positions, keep = (
            int64_tensor(values, device) for values in (generation.ids, generation.positions, generation.keep)
        )
        return fit_vocabulary(self._run(ids, positions, step, keep), self.vocab_size)

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata, keep: torch.Tensor
    ) -> torch.Tensor:
        """One pass that clears no page: the target's layers are in the same ones. Unknown ids are as the last one."""
        uncleared = replace(step, partial_pages=step.partial_pages[:0])
        return self._decoder.forward(input_ids.clamp(max=self._last_id), positions, uncleared, keep)
