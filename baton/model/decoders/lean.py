"""The lean decoder: a whole model in a few operations a layer on flat tokens.

It has the stock decoder's interface and writes the same bytes to the pages, up to rounding. One operation adds and
normalises the residual stream. The backend computes attention, `Ops` everything else. Knows pages and positions, no
requests and no configs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from baton.model.attention.base import AttentionBackend, AttentionCall, StepMetadata
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.window_slots import clear_partial_pages
from baton.model.decoders.base import LogitsReader, read_in_parts
from baton.model.decoders.capture import HiddenCapture
from baton.model.decoders.lean_weights import ExpertFeedForward, GatedFeedForward, LeanModel
from baton.model.decoders.native_layers import NativeLayers, make_native_layers
from baton.model.decoders.ops import Ops, RopeTable
from baton.model.decoders.rotary_axes import rows_by_axes
from baton.model.storage import PageStorage
from baton.model.vision.embedding import Embeds


class LeanDecoder:
    """A `Decoder` over `storage`. `layers`: the observed layers; `max_positions`: length of the longest row."""

    def __init__(
        self,
        model: LeanModel,
        layers: Sequence[ObservedLayer],
        storage: PageStorage,
        max_positions: int,
        backend: AttentionBackend,
        ops: Ops,
    ) -> None:
        self._model = model
        self._observed = tuple(layers)
        self._storage = storage
        self._backend = backend
        self._ops = ops
        self.max_positions = max_positions
        ropes = {id(rope): rope for rope in model.ropes}
        tables = {number: rope.table(max_positions) for number, rope in ropes.items()}
        self._ropes = [tables[id(rope)] for rope in model.ropes]
        self._scale = _embedding_scale(model)
        axes, device = model.feature_axes, model.embedding.device
        self._axes = None if axes is None else torch.tensor(axes, device=device)
        self._native: NativeLayers | None = None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        keep: torch.Tensor,
        reader: LogitsReader | None = None,
        embeds: Embeds | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        self.clear_partial_pages(step)
        self._backend.begin(step)
        if reader is None:
            return self.compute(input_ids, positions, step, keep, embeds, capture)
        with torch.inference_mode():
            hidden = self._hidden(input_ids, positions, step, torch.cat((keep, reader.places)), embeds, capture)
            read_in_parts(reader, hidden[len(keep) :], self._logits)
            return self._logits(hidden[: len(keep)])

    def clear_partial_pages(self, step: StepMetadata) -> None:
        """Zeros the pages that a step begins and does not fill. The first part of `forward`, before the plan."""
        clear_partial_pages(step, self._storage)

    def compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        keep: torch.Tensor,
        embeds: Embeds | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        """The last part of `forward`, after attention is planned. Reads the step's pages and slots, no segments."""
        with torch.inference_mode():
            return self._logits(self._hidden(input_ids, positions, step, keep, embeds, capture))

    def with_backend(self, backend: AttentionBackend) -> LeanDecoder:
        """This decoder with another backend over its storage. Weights and tables are shared."""
        other = copy.copy(self)
        other._backend, other._native = backend, None
        return other

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend."""
        return self._backend

    @property
    def has_experts(self) -> bool:
        """True if a layer routes tokens to experts, which reads their counts back to the host."""
        return any(isinstance(layer.feed_forward, ExpertFeedForward) for layer in self._model.layers)

    def _hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        keep: torch.Tensor,
        embeds: Embeds | None,
        capture: HiddenCapture | None,
    ) -> torch.Tensor:
        """Hidden states [len(keep), hidden_size], normalised for the head.

        The last feed-forward gets only `keep`, unless all final states are captured.
        """
        taken = () if capture is None else capture.spec.after
        takes_final = capture is not None and capture.spec.final
        ropes, positions = self._ropes_at(positions)
        layers = self._model.layers
        norms = [*(layer.attention_norm for layer in layers[1:]), self._model.norm]  # the norm after each layer
        query = None  # [tokens, num_heads, head_dim], one buffer for all layers
        residual = self._embed(input_ids, embeds)  # [tokens, hidden_size]
        deep = () if embeds is None else embeds.deep  # of fewer layers than there are
        hidden = self._ops.rms_norm(residual, layers[0].attention_norm, self._model.spec.eps)
        native = self._native_layers(hidden) if capture is None and not deep and ropes is self._ropes else None
        if native is not None:
            native.run(hidden, residual, positions, step)
        first = 0 if native is None else native.num_layers
        for index in range(first, len(layers)):
            layer, next_norm = layers[index], norms[index]
            if capture is not None and index in taken:
                capture.add(residual.clone())
            query = self._rope_and_write_kv(index, layer.qkv(hidden), ropes[index], positions, step, query)
            seen = self._backend.attend(self._call(index, query)).flatten(1)  # [tokens, num_heads * head_dim]
            if next_norm is self._model.norm and not takes_final:
                seen, residual = seen[keep], residual[keep]
            hidden = self._add(layer.attention_out(seen), layer.attention_out_norm, residual, layer.feed_forward_norm)
            change = self._feed_forward(layer.feed_forward, hidden)
            if embeds is not None and index < len(deep):
                residual.index_add_(0, embeds.places, deep[index].to(residual.dtype))
            hidden = self._add(change, layer.feed_forward_out_norm, residual, next_norm)
        if capture is not None and takes_final:
            capture.add(hidden)
            hidden = hidden[keep]
        return hidden

    def _native_layers(self, hidden: torch.Tensor) -> NativeLayers | None:
        """Those that compute the planned step in one call; None: there are none for it."""
        if self._native is None or not self._native.is_current:
            parts = self._model, self._observed, self._storage, self._ropes
            self._native = make_native_layers(*parts, self._backend, self._ops)
        return self._native if self._native is not None and self._native.usable_for(hidden) else None

    def _add(
        self, change: torch.Tensor, own_norm: torch.Tensor | None, residual: torch.Tensor, next_norm: torch.Tensor
    ) -> torch.Tensor:
        """Adds `change` to `residual`, after its own norm if the family has one. Returns the next part's input."""
        eps = self._model.spec.eps
        if own_norm is not None:
            change = self._ops.rms_norm(change, own_norm, eps, out=change)
        return self._ops.add_rms_norm(change, residual, next_norm, eps, out=change)

    def _ropes_at(self, positions: torch.Tensor) -> tuple[Sequence[RopeTable], torch.Tensor]:
        """Every layer's table of cosines and the row of each token in it. Made anew for positions [3, tokens]."""
        if positions.dim() == 1 or self._axes is None:
            return self._ropes, positions
        made = {id(rope): rows_by_axes(rope, positions, self._axes) for rope in self._ropes}
        return [made[id(rope)] for rope in self._ropes], torch.arange(positions.shape[1], device=positions.device)

    def _rope_and_write_kv(
        self,
        index: int,
        qkv: torch.Tensor,
        rope: RopeTable,
        positions: torch.Tensor,
        step: StepMetadata,
        query: torch.Tensor | None,
    ) -> torch.Tensor:
        heads, norms = self._model.spec.heads, self._model.layers[index].qk_norm
        where = (positions, self._storage, index, step)
        return self._ops.rope_and_write_kv(qkv, rope, heads, norms, *where, query)

    def _embed(self, input_ids: torch.Tensor, embeds: Embeds | None) -> torch.Tensor:
        """Embeddings of tokens, scaled where the family does that, and rows of images as they are."""
        rows = embedding(input_ids, self._model.embedding)
        rows = rows if self._scale is None else rows.mul_(self._scale)
        return rows if embeds is None else rows.index_copy_(0, embeds.places, embeds.rows.to(rows.dtype))

    def _call(self, index: int, query: torch.Tensor) -> AttentionCall:
        layer = self._observed[index]
        return AttentionCall(index, query, layer.scale, layer.window, layer.softcap)

    def _feed_forward(self, part: GatedFeedForward | ExpertFeedForward, hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(part, GatedFeedForward):
            return part.down(self._ops.act_and_mul(part.gate_up(hidden), self._model.spec.activation))
        out: torch.Tensor = part.module(hidden[None])[0]
        return out

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def _embedding_scale(model: LeanModel) -> torch.Tensor | None:
    """The scale in the weights' dtype, as the stock models round it."""
    if model.spec.embedding_scale is None:
        return None
    return torch.tensor(model.spec.embedding_scale, dtype=model.embedding.dtype, device=model.embedding.device)
