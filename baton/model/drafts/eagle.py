"""An EAGLE head or MTP layer over pages: drafts from hidden states of the target, with one layer in the draft layers.

K and V of the head at slot s come from token s and from the feature of slot s-1 (`shared/design/speculation.md` D3), so
they depend on no later token. The tail of a page is the feature of its last filled slot: with it a sequence goes on
behind any page, wherever that one was computed. Called by the runner around the target's forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.model.attention.base import Segment, StepMetadata, plan_step
from baton.model.decoders.capture import HiddenCapture
from baton.model.drafts.chains import DraftRow, by_shape, clear_begun_pages, make_chains
from baton.model.drafts.eagle_weights import EagleWeights
from baton.model.drafts.growing_trees import Generation, make_trees
from baton.model.drafts.head_layer import HeadLayer
from baton.model.drafts.tails import PageTails
from baton.model.kernels.library import Kernels
from baton.model.sampling.sampler import SamplerBackend
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds

SHARPNESS = 2.0
"""A head sees less than its target and is less sure of the next token. Of 1, 1.25, 1.5, 2, 3, 4 and 8 about as good as
any for the bundled head, at temperatures of 0.7 and 1 (`docs/results/speculation.md`). Changes no output."""


class EagleDrafts:
    """`PageDrafts` of a head over `storage`, the target's pages. `vocab_size`: the target's."""

    def __init__(
        self,
        weights: EagleWeights,
        storage: PageStorage,
        sampler: SamplerBackend,
        kernels: Kernels | None,
        max_positions: int,
        vocab_size: int,
    ) -> None:
        self.vocab_size = vocab_size
        self._weights = weights
        self._storage = storage.draft_view()
        self._tails = PageTails(storage)
        self._sampler = sampler
        self._layer = HeadLayer(weights, self._storage, 0, kernels, max_positions)

    def new_capture(self) -> HiddenCapture:
        """See `PageDrafts.new_capture`."""
        return HiddenCapture(self._weights.capture)

    def make(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """See `PageDrafts.make`. Behind the first draft the head goes on with its own output as the feature."""
        clear_begun_pages(self._storage, rows)
        return by_shape(rows, self._chains, self._trees)

    def _chains(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        device, page_size = self._storage.device, self._storage.geometry.page_size
        features = self._tails.before([(row.start, row.pages) for row in rows])  # [rows, hidden_size]

        def logits_after(active: Sequence[int], tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
            index, ids = int64_tensor(active, device), int64_tensor(tokens, device)
            positions = int64_tensor([segment.start for segment in segments], device)
            step = plan_step(segments, page_size, device)
            outputs, features[index] = self._layer.run(ids, features[index], positions, step)
            return self._layer.logits(outputs, self.vocab_size)

        with torch.inference_mode():
            return make_chains(rows, logits_after, self._sampler, SHARPNESS)

    def _trees(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        device, page_size = self._storage.device, self._storage.geometry.page_size
        before = self._tails.before([(row.start, row.pages) for row in rows])  # [rows, hidden_size]
        outputs: dict[int, torch.Tensor] = {}  # of the places that were run, by row

        def features(index: int, segment: Segment) -> torch.Tensor:
            """Of the token before each one of the segment: [tokens, hidden_size]."""
            first = before[index : index + 1]
            if segment.num_tokens == 1:
                return first
            return torch.cat((first, outputs[index][int64_tensor(segment.parents[1:], device)]))

        def logits_of(generation: Generation) -> torch.Tensor:
            pairs = list(zip(generation.rows, generation.segments, strict=True))
            ids, positions = (int64_tensor(values, device) for values in (generation.ids, generation.positions))
            step = plan_step(generation.segments, page_size, device)
            read = torch.cat([features(index, segment) for index, segment in pairs])
            hidden, following = self._layer.run(ids, read, positions, step)
            parts = following.split([segment.num_tokens for segment in generation.segments])
            outputs.update(zip(generation.rows, parts, strict=True))
            return self._layer.logits(hidden[int64_tensor(generation.keep, device)], self.vocab_size)

        with torch.inference_mode():
            return make_trees(rows, logits_of, self._sampler, SHARPNESS)

    def write(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        capture: HiddenCapture | None,
        embeds: Embeds | None = None,
    ) -> None:
        """See `PageDrafts.write`. Needs no attention.

        At the places of images it reads the rows that the target reads there. Its positions are places, on one axis.
        """
        if capture is None:
            raise ValueError("a head needs the hidden states of its target")
        with torch.inference_mode():
            features = self._weights.feature(capture.read())
            before = self._tails.before([(segment.start, segment.pages) for segment in step.segments])
            self._layer.write(input_ids, self._tails.shift(step, features, before), positions, step, embeds)
            self._tails.write(step, features)

    def settle(self, kept: Sequence[Sequence[int]]) -> None:
        """See `PageDrafts.settle`: the last kept token's page gets its feature. `kept` has at least 1 for each."""
        with torch.inference_mode():
            self._tails.settle(kept)
