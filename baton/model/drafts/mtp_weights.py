"""Layers for multi-token prediction (MTP) of a checkpoint, as a drafting head. Called at load.

Layout of MiMo (arXiv:2505.07608), whose layer follows DeepSeek-V3 (arXiv:2412.19437): `input_proj` joins the normalised
feature and the normalised embedding, in this order. A decoder layer of the model's own kind follows. The output of
`final_layernorm` is the next feature, which the model's output head reads; the first feature is the model's final
hidden state. One layer makes all drafts of a chain, each from its own output, as an EAGLE head does. Of several layers
each makes one draft, from the output of the layer before.
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


def load_mtp_weights(directory: Path, target: HeadTarget) -> tuple[EagleWeights, ...]:
    """Reads the MTP layers of the checkpoint in `directory` for `target`, in its dtype and on its device.

    Raises `UnreadableModel` for files that are missing or broken, `UnsupportedModel` for a layer that does not fit the
    target or has parts that are not computed here.
    """
    config, tensors = read_config_of_head(directory), read_mtp_tensors(directory)
    by_layer: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        by_layer.setdefault(name.removeprefix(MTP_PREFIX).split(".")[0], {})[name] = tensor
    numbers = [str(number) for number in range(len(by_layer))]
    if missing := set(numbers) - set(by_layer):
        raise UnreadableModel(f"the MTP layers in {directory} lack layer {min(missing)}; download them again")
    try:
        return tuple(_MtpReader(config, by_layer[number], target, f"{MTP_PREFIX}{number}").read() for number in numbers)
    except KeyError as error:
        raise UnreadableModel(f"the MTP layers in {directory} lack {error}; download them again") from error


class _MtpReader(HeadReader):
    """Reads one layer in the layout of MiMo, whose tensors begin with `prefix`."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: HeadTarget, prefix: str
    ) -> None:
        super().__init__(config, tensors, target)
        self._prefix = prefix
        if target.embedding.shape[1] != self.hidden_size:
            raise UnsupportedModel(f"the MTP layer reads states of {self.hidden_size}, the model has others")
        if (config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UnsupportedModel("the MTP layer rotates a part of each head")
        if config.get("use_sliding_window"):
            raise UnsupportedModel("the MTP layer has a sliding window")

    def read(self) -> EagleWeights:
        """The layer as a head."""
        hidden, heads, prefix = self.hidden_size, self.heads(), self._prefix
        weights = EagleWeights(
            kind=HeadKind.MTP,
            capture=CaptureSpec(final=True),
            heads=heads,
            eps=float(self.config.get("rms_norm_eps", 1e-6)),
            activation=self.activation(),
            rope=self.rope(),
            embedding=self.target.embedding,
            fc=self._join(),
            input_norms=(self.norm(f"{prefix}.token_layernorm"), self.norm(f"{prefix}.hidden_layernorm")),
            norm_before_residual=False,
            attention_norm=self.norm(f"{prefix}.input_layernorm"),
            qkv=self.qkv(prefix, heads, hidden),
            attention_out=self.linear(f"{prefix}.self_attn.o_proj", hidden, heads.num_heads * heads.head_dim),
            feed_forward_norm=self.norm(f"{prefix}.post_attention_layernorm"),
            feed_forward=self.feed_forward(prefix),
            norm=self.norm(f"{prefix}.final_layernorm"),
            output=self.target.output,
            token_ids=None,
            num_parameters=self.num_parameters,
        )
        self.refuse_leftovers()
        return weights

    def _join(self) -> Any:
        """The projection, with the columns of the embedding first, as heads have them."""
        rows = self.take(f"{self._prefix}.input_proj.weight", (self.hidden_size, 2 * self.hidden_size))
        of_feature, of_token = rows.chunk(2, dim=1)
        return self.make(torch.cat((of_token, of_feature), dim=1), None)
