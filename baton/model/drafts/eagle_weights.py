"""Published EAGLE-1 and EAGLE-3 heads: their weights by name, checked against what the target has. Called at load.

EAGLE-1 (arXiv:2401.15077): `fc` joins embedding and feature, `layers.0` has no norm before its attention, and the
output is the next feature, which the target's own output head reads. EAGLE-3 (arXiv:2503.01840): `fc` joins three of
the target's hidden states to a feature, `midlayer` reads normalised embedding and feature side by side, and `lm_head`
knows a part of the vocabulary, whose ids are its rows' numbers plus `d2t`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.kv.geometry import LayerGeometry
from baton.model.decoders.capture import CaptureSpec
from baton.model.decoders.lean_weights import GatedFeedForward, Rope
from baton.model.decoders.ops import Activation, HeadShape
from baton.model.drafts.head_files import read_config_of_head, read_tensors_of_head
from baton.model.drafts.head_reader import HeadReader, HeadTarget, OutputHead
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.linears.linear import Linear

_IGNORED = frozenset({"t2d", "midlayer.self_attn.rotary_emb.inv_freq"})


class HeadKind(enum.Enum):
    """What a head computes. `MTP`: a layer for multi-token prediction, out of the target's own checkpoint."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A head. `input_norms`: of embedding and feature; None: EAGLE-1. `token_ids`: the target's, by row.

    `norm_before_residual`: the residual stream begins with the normalised feature, not with the feature.
    `attention_norm`: of an MTP layer, between `fc` and attention.
    """

    kind: HeadKind
    capture: CaptureSpec
    heads: HeadShape
    eps: float
    activation: Activation
    rope: Rope
    embedding: torch.Tensor
    fc: Linear
    input_norms: tuple[torch.Tensor, torch.Tensor] | None
    norm_before_residual: bool
    attention_norm: torch.Tensor | None
    qkv: Linear
    attention_out: Linear
    feed_forward_norm: torch.Tensor
    feed_forward: GatedFeedForward
    norm: torch.Tensor | None
    output: OutputHead
    token_ids: torch.Tensor | None
    num_parameters: int

    @property
    def name(self) -> str:
        """For the log."""
        return self.kind.value

    @property
    def hidden_size(self) -> int:
        """Elements of a feature, and so of a page's tail."""
        return self.feed_forward_norm.shape[0]

    @property
    def cache_layer(self) -> LayerGeometry:
        """The draft layer."""
        return LayerGeometry(self.heads.num_kv_heads, self.heads.head_dim, self.heads.head_dim)

    def feature(self, captured: torch.Tensor) -> torch.Tensor:
        """The features [tokens, hidden_size] of captured hidden states."""
        return self.fc(captured) if self.kind is HeadKind.EAGLE3 else captured


def load_eagle_weights(directory: Path, target: HeadTarget) -> EagleWeights:
    """Reads the head in `directory` for `target`, in its dtype and on its device.

    Raises `UnreadableModel` for files that are missing or broken, `UnsupportedModel` for a head that does not fit the
    target or has parts that are not computed here.
    """
    config, tensors = read_config_of_head(directory), read_tensors_of_head(directory)
    try:
        return _EagleReader(config, tensors, target).read()
    except KeyError as error:
        raise UnreadableModel(f"the head in {directory} lacks {error}; download it again") from error


class _EagleReader(HeadReader):
    """Reads EAGLE-1 and EAGLE-3."""

    def __init__(self, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], target: HeadTarget) -> None:
        super().__init__(config, {name: tensor for name, tensor in tensors.items() if name not in _IGNORED}, target)
        self._is_eagle3 = "midlayer.hidden_norm.weight" in tensors

    def read(self) -> EagleWeights:
        config, hidden, heads = self.config, self.hidden_size, self.heads()
        activation, capture = self.activation(), self._capture()
        token_ids, output = self._output()
        weights = EagleWeights(
            kind=HeadKind.EAGLE3 if self._is_eagle3 else HeadKind.EAGLE,
            capture=capture,
            heads=heads,
            eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=activation,
            rope=self.rope(),
            embedding=self._embedding(),
            fc=self.linear("fc", hidden, self._fc_width(capture)),
            input_norms=self._input_norms(),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            attention_norm=None,
            qkv=self.qkv("midlayer", heads, 2 * hidden if self._is_eagle3 else hidden),
            attention_out=self.linear("midlayer.self_attn.o_proj", hidden, heads.num_heads * heads.head_dim),
            feed_forward_norm=self.norm("midlayer.post_attention_layernorm"),
            feed_forward=self.feed_forward("midlayer"),
            norm=self.norm("norm") if self._is_eagle3 else None,
            output=output,
            token_ids=token_ids,
            num_parameters=self.num_parameters,
        )
        self.refuse_leftovers()
        return weights

    def _capture(self) -> CaptureSpec:
        """The target's states. Ids in a head's config name layers whose output is read; by default as published."""
        if not self._is_eagle3:
            return CaptureSpec(final=True)
        num_layers = self.target.num_layers
        ids = (self.config.get("eagle_config") or self.config).get("eagle_aux_hidden_state_layer_ids")
        try:
            after = sorted((2, num_layers // 2, num_layers - 3)) if not ids else [int(id) + 1 for id in ids]
            if after[-1] >= num_layers:
                raise ValueError(f"there are {num_layers} layers, and it reads after {after[-1]}")
            return CaptureSpec(tuple(after))
        except (TypeError, ValueError) as error:
            raise UnsupportedModel(f"the head reads other layers than the model has: {error}") from error

    def _fc_width(self, capture: CaptureSpec) -> int:
        target_size = self.target.embedding.shape[1]
        return target_size * capture.num_states if self._is_eagle3 else self.hidden_size + target_size

    def _embedding(self) -> torch.Tensor:
        """The head's own embeddings, or the target's."""
        own = self.tensors.pop("embed_tokens.weight", None)
        found = self.target.embedding if own is None else self.placed(own)
        shape = tuple(found.shape)
        if shape[1] != self.hidden_size or shape[0] < min(self.target.vocab_size, self.target.embedding.shape[0]):
            raise UnsupportedModel(f"embeddings are {shape}, and the head has features of {self.hidden_size}")
        return found

    def _output(self) -> tuple[torch.Tensor | None, OutputHead]:
        """The target's id of each logit, None where they are the same; and what computes the logits."""
        rows = self.tensors.pop("lm_head.weight", None)
        deltas = self.tensors.pop("d2t", None)
        if not self._is_eagle3 or rows is None:
            if self.target.embedding.shape[1] != self.hidden_size:
                raise UnsupportedModel("the head needs the output head of a model with other hidden states")
            return None, self.target.output
        num_logits = len(rows)
        fits = rows.dim() == 2 and rows.shape[1] == self.hidden_size
        if not fits or (deltas is None and num_logits < self.target.vocab_size):
            raise UnsupportedModel(f"the head's lm_head.weight is {tuple(rows.shape)}, and does not fit head and model")
        linear = self.make(rows, None)
        if deltas is None:
            return None, linear
        ids = torch.arange(len(deltas)) + deltas.to(torch.int64)
        if len(ids) != num_logits or len(set(ids.tolist())) != len(ids) or not self._knows(ids):
            raise UnsupportedModel("the head's d2t does not name tokens of the model")
        return ids.to(self.target.embedding.device), linear

    def _knows(self, ids: torch.Tensor) -> bool:
        return bool(len(ids)) and int(ids.min()) >= 0 and int(ids.max()) < self.target.vocab_size

    def _input_norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._is_eagle3:
            return None
        return self.norm("midlayer.input_layernorm"), self.norm("midlayer.hidden_norm")
