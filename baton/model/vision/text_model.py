"""The text model of a vision-language model as a module of its own: transformers' layers and head, nothing of ours.

The loader and the stock decoder use it like a causal language model. It also takes embeddings, positions on three axes
and DeepStack rows, and passes them to the stock layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from baton.model.vision.embedding import Embeds


class VisionTextModel(nn.Module):
    """`model`: transformers' text model without a head; `lm_head`: the head that the whole model has."""

    def __init__(self, model: Any, lm_head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head
        self.config = model.config

    @property
    def base_model(self) -> Any:
        """The layers."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        """The table of token embeddings."""
        table: nn.Module = self.model.get_input_embeddings()
        return table

    def set_attn_implementation(self, name: str) -> None:
        """Sets the attention of the layers alone: a vision tower keeps its own."""
        self.model.set_attn_implementation(name)

    def forward(self, logits_to_keep: torch.Tensor | int = 0, **inputs: Any) -> Any:
        """Logits of the tokens at `logits_to_keep`; 0: of all."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = self.model(**inputs).last_hidden_state
        kept = hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        return CausalLMOutputWithPast(logits=self.lm_head(kept))


def stock_inputs(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, embeds: Embeds | None) -> dict[str, Any]:
    """Keyword arguments of a stock module for flat tokens [tokens], with `positions` [tokens] or [3, tokens].

    `embeds` needs a `VisionTextModel`.
    """
    inputs: dict[str, Any] = {"position_ids": positions[None] if positions.dim() == 1 else positions[:, None]}
    inputs["use_cache"] = False
    if embeds is None:
        return inputs | {"input_ids": input_ids[None]}
    table = model.get_input_embeddings()(input_ids)
    inputs["inputs_embeds"] = table.index_copy(0, embeds.places, embeds.rows.to(table.dtype))[None]
    if embeds.deep:
        mask = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        inputs["visual_pos_masks"] = mask.index_fill(0, embeds.places, True)[None]
        inputs["deepstack_visual_embeds"] = list(embeds.deep)
    return inputs


def block_masks(model: VisionTextModel, inputs: dict[str, Any], start: int, end: int) -> dict[str, torch.Tensor]:
    """transformers' own masks for `inputs` of `stock_inputs`, where the tokens [start, end) see each other (Gemma 3).

    By type of layer. For a reference only: over pages the attention backend does it.
    """
    from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    embeds = inputs["inputs_embeds"]
    block = torch.full(embeds.shape[:2], -1, device=embeds.device)
    block[:, start:end] = 0
    masks: dict[str, torch.Tensor] = create_masks_for_vision_model(
        config=model.config,
        inputs_embeds=embeds,
        attention_mask=None,
        past_key_values=None,
        position_ids=inputs["position_ids"],
        block_sequence_ids=block,
    )
    return masks
