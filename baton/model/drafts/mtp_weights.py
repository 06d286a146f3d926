"""Layers for multi-token prediction (MTP) of a checkpoint, as a drafting head. Called at load.

Layout of MiMo (arXiv:2505.07608), whose layer follows DeepSeek-V3 (arXiv:2412.19437): `input_proj` joins the normalised
feature and the normalised embedding, in this order. A decoder layer of the model's own kind follows. The output of
`final_layernorm` is the next feature, which the model's output head reads; the first feature is the model's final
hidden state. One layer makes all drafts of a chain, each from its own output, as an EAGLE head does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from baton.model.decoders.capture import CaptureSpec
from baton.model.drafts.eagle_weights import EagleWeights, HeadKind
from baton.model.drafts.head_files import MTP_PREFIX, read_config_of_head, read_mtp_tensors
from baton.model.drafts.head_reader import HeadReader, HeadTarget
from baton.model.errors import UnreadableModel, UnsupportedModel

FIRST_LAYER = f"{MTP_PREFIX}0"


def load_mtp_weights(directory: Path, target: HeadTarget) -> EagleWeights:
    """Reads the MTP layer of the checkpoint in `directory` for `target`, in its dtype and on its device.

    Raises `UnreadableModel` for files that are missing or broken, `UnsupportedModel` for a layer that does not fit the
    target or has parts that are not computed here.
    """
    config, tensors = read_config_of_head(directory), read_mtp_tensors(directory)
    try:
        return _MtpReader(config, tensors, target).read()
    except KeyError as error:
        raise UnreadableModel(f"the MTP layer in {directory} lacks {error}; download it again") from error


class _MtpReader(HeadReader):
    """Reads one layer in the layout of MiMo."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: HeadTarget) -> None:
        super().__init__(config, tensors, target)
        if target.embedding.shape[1] != self.hidden_size:
            raise UnsupportedModel(f"the MTP layer reads states of {self.hidden_size}, the model has others")
        others = {name.removeprefix(MTP_PREFIX).split(".")[0] for name in tensors} - {"0"}
        if others:
            raise UnsupportedModel(f"there are {1 + len(others)} MTP layers, and one is computed here")
        if (config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UnsupportedModel("the MTP layer rotates a part of each head")
        if config.get("use_sliding_window"):
            raise UnsupportedModel("the MTP layer has a sliding window")

    def read(self) -> EagleWeights:
        """The layer as a head."""
        hidden, heads = self.hidden_size, self.heads()
        weights = EagleWeights(
            kind=HeadKind.MTP,
            capture=CaptureSpec(final=True),
            heads=heads,
            eps=float(self.config.get("rms_norm_eps", 1e-6)),
            activation=self.activation(),
            rope=self.rope(),
            embedding=self.target.embedding,
            fc=self._join(),
            input_norms=(self.norm(f"{FIRST_LAYER}.token_layernorm"), self.norm(f"{FIRST_LAYER}.hidden_layernorm")),
            norm_before_residual=False,
            attention_norm=self.norm(f"{FIRST_LAYER}.input_layernorm"),
            qkv=self.qkv(FIRST_LAYER, heads, hidden),
            attention_out=self.linear(f"{FIRST_LAYER}.self_attn.o_proj", hidden, heads.num_heads * heads.head_dim),
            feed_forward_norm=self.norm(f"{FIRST_LAYER}.post_attention_layernorm"),
            feed_forward=self.feed_forward(FIRST_LAYER),
            norm=self.norm(f"{FIRST_LAYER}.final_layernorm"),
            output=self.target.output,
            token_ids=None,
            num_parameters=self.num_parameters,
        )
        self.refuse_leftovers()
        return weights

    def _join(self) -> Any:
        """The projection, with the columns of the embedding first, as heads have them."""
        rows = self.take(f"{FIRST_LAYER}.input_proj.weight", (self.hidden_size, 2 * self.hidden_size))
        of_feature, of_token = rows.chunk(2, dim=1)
        return self.make(torch.cat((of_token, of_feature), dim=1), None)
