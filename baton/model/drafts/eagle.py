"""An EAGLE head or MTP layer over pages: drafts from hidden states of the target, with one layer in the draft layers.

K and V of the head at slot s come from token s and from the feature of slot s-1 (`shared/design/speculation.md` D3), so
they depend on no later token. The tail of a page is the feature of its last filled slot: with it a sequence goes on
behind any page, wherever that one was computed. Called by the runner around the target's forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from baton.model.attention.base import AttentionCall, Segment, StepMetadata, plan_step
from baton.model.attention.torch_backend import TorchAttention
from baton.model.decoders.capture import HiddenCapture
from baton.model.decoders.native_ops import choose_ops
from baton.model.drafts.chains import DraftRow, clear_begun_pages, fit_vocabulary, make_chains
from baton.model.drafts.eagle_weights import EagleWeights, HeadKind
from baton.model.kernels.library import Kernels
from baton.model.sampling.sampler import SamplerBackend
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds

FIRST_SLOT = 1
"""Slot 0 has no feature before it: the published heads have no such key, so none of them attends to it."""

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
        self._tails = storage.tails
        self._sampler = sampler
        self._ops = choose_ops(self._storage, kernels)
        self._backend = TorchAttention(self._storage, first_key=FIRST_SLOT)
        self._rope = weights.rope.table(max_positions)
        self._written: tuple[StepMetadata, torch.Tensor] | None = None

    def new_capture(self) -> HiddenCapture:
        """See `PageDrafts.new_capture`."""
        return HiddenCapture(self._weights.capture)

    def make(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """See `PageDrafts.make`. Behind the first draft the head goes on with its own output as the feature."""
        clear_begun_pages(self._storage, rows)
        features = self._features_before([(row.start, row.pages) for row in rows])  # [rows, hidden_size]

        def logits_after(active: Sequence[int], tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
            index = int64_tensor(active, self._storage.device)
            outputs, features[index] = self._forward(tokens, features[index], segments)
            return self._logits(outputs)

        with torch.inference_mode():
            return make_chains(rows, logits_after, self._sampler, SHARPNESS)

    def write(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        capture: HiddenCapture | None,
        embeds: Embeds | None = None,
    ) -> None:
        """See `PageDrafts.write`. Needs no attention: with one layer, K and V depend on tokens and features only.

        At the places of images it reads the rows that the target reads there. Its positions are places, on one axis.
        """
        if capture is None:
            raise ValueError("a head needs the hidden states of its target")
        with torch.inference_mode():
            features = self._weights.feature(capture.read())
            before = features.roll(1, 0)
            starts = [segment.offset for segment in step.segments]
            previous = self._features_before([(segment.start, segment.pages) for segment in step.segments])
            before[int64_tensor(starts, before.device)] = previous
            qkv, _ = self._project(input_ids, before, embeds)
            self._write_kv(qkv, positions, step)
            self._written = step, features
            self._set_tails(features, [place for segment in step.segments for place in _page_ends(segment, step)])

    def settle(self, kept: Sequence[int]) -> None:
        """See `PageDrafts.settle`: the last kept token's page gets its feature. `kept` has at least 1 for each."""
        if self._written is None:
            raise ValueError("no step was written")
        step, features = self._written
        ends = [
            (segment.pages[(segment.start + count - 1) // step.page_size], segment.offset + count - 1)
            for segment, count in zip(step.segments, kept, strict=True)
            if count < segment.num_tokens
        ]
        with torch.inference_mode():
            self._set_tails(features, ends)

    def _set_tails(self, features: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
        """Sets the tail of each page to the feature of a flat token: (page, token)."""
        if places:
            pages, tokens = (int64_tensor(column, features.device) for column in zip(*places, strict=True))
            self._tails.index_copy_(0, pages, features.index_select(0, tokens))

    def _features_before(self, starts: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """The feature of the slot before each (start, pages): [rows, hidden_size]; zeros before slot 0."""
        page_size, device = self._storage.geometry.page_size, self._tails.device
        pages = [pages[max(0, start - 1) // page_size] for start, pages in starts]
        features = self._tails.index_select(0, int64_tensor(pages, device))
        begun = [index for index, (start, _) in enumerate(starts) if start == 0]
        return features.index_fill_(0, int64_tensor(begun, device), 0)

    def _forward(
        self, tokens: Sequence[int], features: torch.Tensor, segments: Sequence[Segment]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs for the head, and features of the next slots, after one token of each segment: [tokens, hidden]."""
        device, weights = self._storage.device, self._weights
        step = plan_step(segments, self._storage.geometry.page_size, device)
        ids, positions = int64_tensor(tokens, device), int64_tensor([one.start for one in segments], device)
        qkv, residual = self._project(ids, features)
        query = self._write_kv(qkv, positions, step)
        self._backend.begin(step)
        seen = self._backend.attend(AttentionCall(0, query, weights.heads.head_dim**-0.5)).flatten(1)
        change = weights.attention_out(seen)
        hidden = self._ops.add_rms_norm(change, residual, weights.feed_forward_norm, weights.eps)
        part = weights.feed_forward
        residual += part.down(self._ops.act_and_mul(part.gate_up(hidden), weights.activation))
        if weights.norm is None:
            return residual, residual
        normed = self._ops.rms_norm(residual, weights.norm, weights.eps)
        return normed, normed if weights.kind is HeadKind.MTP else residual

    def _project(
        self, ids: torch.Tensor, features: torch.Tensor, embeds: Embeds | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The fused projections and the residual stream of tokens with the features before them."""
        weights, ops = self._weights, self._ops
        rows = embedding(ids.clamp(max=weights.embedding.shape[0] - 1), weights.embedding)
        if embeds is not None:
            rows.index_copy_(0, embeds.places, _fit_width(embeds.rows, rows.shape[1]).to(rows.dtype))
        if weights.input_norms is None:
            joined = weights.fc(torch.cat((rows, features), dim=-1))
            return weights.qkv(joined), joined
        of_token, of_feature = weights.input_norms
        normed = ops.rms_norm(features, of_feature, weights.eps)
        joined = torch.cat((ops.rms_norm(rows, of_token, weights.eps), normed), dim=-1)
        if weights.attention_norm is not None:
            residual = weights.fc(joined)
            return weights.qkv(ops.rms_norm(residual, weights.attention_norm, weights.eps)), residual
        return weights.qkv(joined), normed if weights.norm_before_residual else features.clone()

    def _write_kv(self, qkv: torch.Tensor, positions: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Writes K and V, and returns the query."""
        return self._ops.rope_and_write_kv(
            qkv, self._rope, self._weights.heads, None, positions, self._storage, 0, step
        )

    def _logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits of the target's tokens; those that the head does not know are -inf."""
        logits, ids = self._weights.output(outputs), self._weights.token_ids
        if ids is None:
            return fit_vocabulary(logits, self.vocab_size)
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, ids, logits)


def _fit_width(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of images for a head: zeros for one whose own embeddings have another width than the model's."""
    return rows if rows.shape[1] == width else rows.new_zeros(len(rows), width)


def _page_ends(segment: Segment, step: StepMetadata) -> list[tuple[int, int]]:
    """For each page that the segment writes to: (page, flat index of its last token there)."""
    size = step.page_size
    numbers = range(segment.start // size, (segment.end - 1) // size + 1)
    return [
        (segment.pages[number], segment.offset + min(segment.end, (number + 1) * size) - 1 - segment.start)
        for number in numbers
    ]
