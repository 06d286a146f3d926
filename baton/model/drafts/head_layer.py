"""One layer of a drafting head over its draft layer of the pages. Used by `eagle` and `mtp_depths`."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from baton.model.attention.base import AttentionCall, StepMetadata
from baton.model.attention.torch_backend import TorchAttention
from baton.model.decoders.native_ops import choose_ops
from baton.model.drafts.chains import fit_vocabulary
from baton.model.drafts.eagle_weights import EagleWeights, HeadKind
from baton.model.kernels.library import Kernels
from baton.model.storage import PageStorage
from baton.model.vision.embedding import Embeds


class HeadLayer:
    """Draft layer `index` of `storage`, which has the draft layers only.

    The feature of slot `index` is the first one that tokens of a sequence define, and the slot behind it the first key.
    The published layers have no key before it: they leave out the tokens that have no feature.
    """

    def __init__(
        self, weights: EagleWeights, storage: PageStorage, index: int, kernels: Kernels | None, max_positions: int
    ) -> None:
        self.weights = weights
        self._storage = storage
        self._index = index
        self._ops = choose_ops(storage, kernels)
        self._backend = TorchAttention(storage, first_key=index + 1)
        self._rope = weights.rope.table(max_positions)

    def write(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        embeds: Embeds | None = None,
    ) -> None:
        """Writes K and V of tokens `ids` [tokens]; `features` [tokens, hidden_size]: of the slots before them.

        Needs no attention: K and V of one layer depend on tokens and features only. `embeds`: rows of images.
        """
        qkv, _ = self._project(ids, features, embeds)
        self._write_kv(qkv, positions, step)

    def run(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        embeds: Embeds | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `write`; returns what the output head reads, and the features of these slots: [tokens, hidden_size]."""
        weights = self.weights
        qkv, residual = self._project(ids, features, embeds)
        query = self._write_kv(qkv, positions, step)
        self._backend.begin(step)
        call = AttentionCall(self._index, query, weights.heads.head_dim**-0.5)
        change = weights.attention_out(self._backend.attend(call).flatten(1))
        hidden = self._ops.add_rms_norm(change, residual, weights.feed_forward_norm, weights.eps)
        part = weights.feed_forward
        residual += part.down(self._ops.act_and_mul(part.gate_up(hidden), weights.activation))
        if weights.norm is None:
            return residual, residual
        normed = self._ops.rms_norm(residual, weights.norm, weights.eps)
        return normed, normed if weights.kind is HeadKind.MTP else residual

    def logits(self, outputs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits [tokens, vocab_size] of the target's tokens; those that the head does not know are -inf."""
        logits, ids = self.weights.output(outputs), self.weights.token_ids
        if ids is None:
            return fit_vocabulary(logits, vocab_size)
        return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, ids, logits)

    def _project(
        self, ids: torch.Tensor, features: torch.Tensor, embeds: Embeds | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The fused projections and the residual stream of tokens with the features before them."""
        weights, ops = self.weights, self._ops
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
            qkv, self._rope, self.weights.heads, None, positions, self._storage, self._index, step
        )


def _fit_width(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of images for a head: zeros for one whose own embeddings have another width than the model's."""
    return rows if rows.shape[1] == width else rows.new_zeros(len(rows), width)
