"""MTP of several layers over pages: layer c drafts the token c+1 places ahead, once in a chain (DeepSeek-V3, 2.2).

The draft layer of layer c, its depth counted from 0, holds K and V of token s beside the output of layer c-1 at slot
s-1 (`shared/design/speculation.md`); that of layer 0 the target's feature. They depend on no later token, as with one
layer. But an output needs the attention of its layer: a step runs all layers except the last one over all its tokens.
The tail of a page has the target's feature and the outputs of these layers at its last filled slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.model.attention.base import Segment, StepMetadata, plan_step
from baton.model.decoders.capture import HiddenCapture
from baton.model.drafts.chains import DraftRow, clear_begun_pages, make_chains
from baton.model.drafts.eagle import SHARPNESS
from baton.model.drafts.eagle_weights import EagleWeights
from baton.model.drafts.head_layer import HeadLayer
from baton.model.drafts.tails import PageTails
from baton.model.kernels.library import Kernels
from baton.model.sampling.sampler import SamplerBackend
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds


class DepthDrafts:
    """`PageDrafts` of MTP layers over `storage`, the target's pages. A chain has a draft of each layer at most."""

    def __init__(
        self,
        weights: Sequence[EagleWeights],
        storage: PageStorage,
        sampler: SamplerBackend,
        kernels: Kernels | None,
        max_positions: int,
        vocab_size: int,
    ) -> None:
        self.vocab_size = vocab_size
        self._storage = storage.draft_view()
        self._tails = PageTails(storage)
        self._sampler = sampler
        self._layers = [
            HeadLayer(one, self._storage, depth, kernels, max_positions) for depth, one in enumerate(weights)
        ]

    def new_capture(self) -> HiddenCapture:
        """See `PageDrafts.new_capture`."""
        return HiddenCapture(self._layers[0].weights.capture)

    def make(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """See `PageDrafts.make`. Raises `ValueError` for a tree, and for more drafts than there are layers.

        The layer of a draft has not seen the row's slots from `start` on, so it runs over all of them, with the outputs
        that the layer before gave for the draft before.
        """
        if any(row.parents for row in rows):
            raise ValueError("MTP layers that draft one token each make no trees")
        if any(row.count > len(self._layers) for row in rows):
            raise ValueError(f"each of {len(self._layers)} MTP layers makes one draft, and a row wants more")
        clear_begun_pages(self._storage, rows)
        with torch.inference_mode():
            before = self._by_depth([(row.start, row.pages) for row in rows])
            chains = _ChainBatch(self._layers, self._storage, rows, before, self.vocab_size)
            return make_chains(rows, chains.logits_after, self._sampler, SHARPNESS)

    def write(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        capture: HiddenCapture | None,
        embeds: Embeds | None = None,
    ) -> None:
        """See `PageDrafts.write`. The last layer's outputs are of no use here: it writes K and V only."""
        if capture is None:
            raise ValueError("a head needs the hidden states of its target")
        with torch.inference_mode():
            features = [capture.read()]
            before = self._by_depth([(segment.start, segment.pages) for segment in step.segments])
            for layer, of_segments in zip(self._layers[:-1], before[:-1], strict=True):
                shifted = self._tails.shift(step, features[-1], of_segments)
                features.append(layer.run(input_ids, shifted, positions, step, embeds)[1])
            shifted = self._tails.shift(step, features[-1], before[-1])
            self._layers[-1].write(input_ids, shifted, positions, step, embeds)
            self._tails.write(step, torch.cat(features, dim=1))

    def settle(self, kept: Sequence[Sequence[int]]) -> None:
        """See `PageDrafts.settle`. `kept` has at least 1 for each."""
        with torch.inference_mode():
            self._tails.settle(kept)

    def _by_depth(self, starts: Sequence[tuple[int, Sequence[int]]]) -> tuple[torch.Tensor, ...]:
        """For each layer the features [rows, hidden_size] of the slot before each (start, pages)."""
        return self._tails.before(starts).chunk(len(self._layers), dim=1)


class _ChainBatch:
    """The rows of one call of `make`: their tokens from `start` on, and the last layer's outputs at their slots.

    `before`: for each layer the features [rows, hidden_size] of the slot before each row's `start`.
    """

    def __init__(
        self,
        layers: Sequence[HeadLayer],
        storage: PageStorage,
        rows: Sequence[DraftRow],
        before: Sequence[torch.Tensor],
        vocab_size: int,
    ) -> None:
        self._layers, self._storage, self._rows, self._before = layers, storage, rows, before
        self._vocab_size = vocab_size
        self._tokens: list[list[int]] = [[] for _ in rows]
        self._outputs: dict[int, torch.Tensor] = {}

    def logits_after(self, active: Sequence[int], tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """See `LogitsAfter`. All active rows are at the same place of their chains."""
        for index, token in zip(active, tokens, strict=True):
            self._tokens[index].append(token)
        count = len(self._tokens[active[0]])
        layer, rows, device = self._layers[count - 1], [self._rows[index] for index in active], self._storage.device
        whole = [Segment(number * count, row.start, count, row.pages) for number, row in enumerate(rows)]
        ids = int64_tensor([token for index in active for token in self._tokens[index]], device)
        positions = int64_tensor([row.start + place for row in rows for place in range(count)], device)
        features = torch.cat([self._features(index, count - 1) for index in active])
        step = plan_step(whole, self._storage.geometry.page_size, device)
        outputs, following = layer.run(ids, features, positions, step)
        self._outputs = dict(zip(active, following.split(count), strict=True))
        return layer.logits(outputs[count - 1 :: count], self._vocab_size)

    def _features(self, index: int, depth: int) -> torch.Tensor:
        """What layer `depth` reads beside a row's tokens: [depth + 1, hidden_size]."""
        first = self._before[depth][index : index + 1]
        return first if depth == 0 else torch.cat((first, self._outputs[index]))
