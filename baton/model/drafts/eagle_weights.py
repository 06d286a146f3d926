"""Published EAGLE-1 and EAGLE-3 heads: their weights by name, checked against what the target has. Called at load.

EAGLE-1 (arXiv:2401.15077): `fc` joins embedding and feature, `layers.0` has no norm before its attention, and the
output is the next feature, which the target's own output head reads. EAGLE-3 (arXiv:2503.01840): `fc` joins three of
the target's hidden states to a feature, `midlayer` reads normalised embedding and feature side by side, and `lm_head`
knows a part of the vocabulary, whose ids are its rows' numbers plus `d2t`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.kv.geometry import LayerGeometry
from baton.model.decoders.capture import CaptureSpec
from baton.model.decoders.lean_spec import ACTIVATIONS, SUPPORTED_ROPES
from baton.model.decoders.lean_weights import GatedFeedForward, LeanModel, Rope
from baton.model.decoders.ops import Activation, HeadShape
from baton.model.drafts.head_files import read_config_of_head, read_tensors_of_head
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.linears.linear import Linear, make_linear
from baton.model.linears.packing import WeightPacker

OutputHead = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, hidden_size] -> logits [tokens, vocabulary]."""
_IGNORED = frozenset({"t2d", "midlayer.self_attn.rotary_emb.inv_freq"})


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """Parts of the target that a head uses. `embedding` [vocab_size, hidden_size] gives dtype and device, too.

    `packer`: of the target's matrices; None: they are plain.
    """

    embedding: torch.Tensor
    output: OutputHead
    num_layers: int
    vocab_size: int
    packer: WeightPacker | None

    @classmethod
    def of(
        cls, impl: torch.nn.Module | LeanModel, num_layers: int, vocab_size: int, packer: WeightPacker | None
    ) -> HeadTarget:
        """Takes them from a loaded model. Raises `UnsupportedModel` for a stock module without a list of layers."""
        if isinstance(impl, LeanModel):
            return cls(impl.embedding, impl.logits, num_layers, vocab_size, packer)
        module: Any = impl
        if not hasattr(module.base_model, "layers"):
            raise UnsupportedModel(f"{type(module).__name__} has no list of layers that a head could read between")
        head = getattr(module, "lm_head", None)
        rows = module.get_input_embeddings().weight.detach()
        return cls(rows, module.get_output_embeddings() if head is None else head, num_layers, vocab_size, packer)


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """A head. `input_norms`: of embedding and feature, of EAGLE-3; None: EAGLE-1. `token_ids`: the target's, by row.

    `norm_before_residual`: the residual stream begins with the normalised feature, not with the feature.
    """

    capture: CaptureSpec
    heads: HeadShape
    eps: float
    activation: Activation
    rope: Rope
    embedding: torch.Tensor
    fc: Linear
    input_norms: tuple[torch.Tensor, torch.Tensor] | None
    norm_before_residual: bool
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
        return "eagle" if self.input_norms is None else "eagle3"

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
        return captured if self.input_norms is None else self.fc(captured)


def load_eagle_weights(directory: Path, target: HeadTarget) -> EagleWeights:
    """Reads the head in `directory` for `target`, in its dtype and on its device.

    Raises `UnreadableModel` for files that are missing or broken, `UnsupportedModel` for a head that does not fit the
    target or has parts that are not computed here.
    """
    config, tensors = read_config_of_head(directory), read_tensors_of_head(directory)
    try:
        return _HeadReader(config, tensors, target).read()
    except KeyError as error:
        raise UnreadableModel(f"the head in {directory} lacks {error}; download it again") from error


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnreadableModel(f"the head's {name} is {value!r}")
    return value


class _HeadReader:
    """Takes tensors by name; what is left over at the end is not understood."""

    def __init__(self, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], target: HeadTarget) -> None:
        self._config = config
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in _IGNORED}
        self._target = target
        self._hidden_size = _integer(config, "hidden_size")
        self._is_eagle3 = "midlayer.hidden_norm.weight" in tensors
        self._num_parameters = 0

    def read(self) -> EagleWeights:
        config, hidden = self._config, self._hidden_size
        num_heads = _integer(config, "num_attention_heads")
        head_dim = int(config.get("head_dim") or hidden // num_heads)
        heads = HeadShape(num_heads, int(config.get("num_key_value_heads") or num_heads), head_dim)
        if config.get("hidden_act", "silu") not in ACTIVATIONS:
            raise UnsupportedModel(f"the head's activation is {config['hidden_act']}")
        capture = self._capture()
        token_ids, output = self._output()
        inner = self._tensors["midlayer.mlp.down_proj.weight"].shape[1]
        width = 2 * hidden if self._is_eagle3 else hidden
        sizes = (num_heads * head_dim, *[heads.num_kv_heads * head_dim] * 2)
        weights = EagleWeights(
            capture=capture,
            heads=heads,
            eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=ACTIVATIONS[config.get("hidden_act", "silu")],
            rope=_rope(config, self._target.embedding.device),
            embedding=self._embedding(),
            fc=self._linear("fc", hidden, self._fc_width(capture)),
            input_norms=self._input_norms(),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            qkv=self._fused([f"midlayer.self_attn.{side}_proj" for side in "qkv"], sizes, width),
            attention_out=self._linear("midlayer.self_attn.o_proj", hidden, sizes[0]),
            feed_forward_norm=self._norm("midlayer.post_attention_layernorm"),
            feed_forward=GatedFeedForward(
                self._fused(["midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"], (inner, inner), hidden),
                self._linear("midlayer.mlp.down_proj", hidden, inner),
            ),
            norm=self._norm("norm") if self._is_eagle3 else None,
            output=output,
            token_ids=token_ids,
            num_parameters=self._num_parameters,
        )
        if self._tensors:
            raise UnsupportedModel(f"the head has {min(self._tensors)}, which is not computed here")
        return weights

    def _capture(self) -> CaptureSpec:
        """The target's states. Ids in a head's config name layers whose output is read; by default as published."""
        if not self._is_eagle3:
            return CaptureSpec(final=True)
        num_layers = self._target.num_layers
        ids = (self._config.get("eagle_config") or self._config).get("eagle_aux_hidden_state_layer_ids")
        try:
            after = sorted((2, num_layers // 2, num_layers - 3)) if not ids else [int(id) + 1 for id in ids]
            if after[-1] >= num_layers:
                raise ValueError(f"there are {num_layers} layers, and it reads after {after[-1]}")
            return CaptureSpec(tuple(after))
        except (TypeError, ValueError) as error:
            raise UnsupportedModel(f"the head reads other layers than the model has: {error}") from error

    def _fc_width(self, capture: CaptureSpec) -> int:
        target_size = self._target.embedding.shape[1]
        return target_size * capture.num_states if self._is_eagle3 else self._hidden_size + target_size

    def _embedding(self) -> torch.Tensor:
        """The head's own embeddings, or the target's."""
        own = self._tensors.pop("embed_tokens.weight", None)
        found = self._target.embedding if own is None else self._placed(own)
        shape = tuple(found.shape)
        if shape[1] != self._hidden_size or shape[0] < min(self._target.vocab_size, self._target.embedding.shape[0]):
            raise UnsupportedModel(f"embeddings are {shape}, and the head has features of {self._hidden_size}")
        return found

    def _output(self) -> tuple[torch.Tensor | None, OutputHead]:
        """The target's id of each logit, None where they are the same; and what computes the logits."""
        rows = self._tensors.pop("lm_head.weight", None)
        deltas = self._tensors.pop("d2t", None)
        if not self._is_eagle3 or rows is None:
            if self._target.embedding.shape[1] != self._hidden_size:
                raise UnsupportedModel("the head needs the output head of a model with other hidden states")
            return None, self._target.output
        num_logits = len(rows)
        fits = rows.dim() == 2 and rows.shape[1] == self._hidden_size
        if not fits or (deltas is None and num_logits < self._target.vocab_size):
            raise UnsupportedModel(f"the head's lm_head.weight is {tuple(rows.shape)}, and does not fit head and model")
        linear = self._make(rows, None)
        if deltas is None:
            return None, linear
        ids = torch.arange(len(deltas)) + deltas.to(torch.int64)
        if len(ids) != num_logits or len(set(ids.tolist())) != len(ids) or not self._knows(ids):
            raise UnsupportedModel("the head's d2t does not name tokens of the model")
        return ids.to(self._target.embedding.device), linear

    def _knows(self, ids: torch.Tensor) -> bool:
        return bool(len(ids)) and int(ids.min()) >= 0 and int(ids.max()) < self._target.vocab_size

    def _input_norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._is_eagle3:
            return None
        return self._norm("midlayer.input_layernorm"), self._norm("midlayer.hidden_norm")

    def _norm(self, name: str) -> torch.Tensor:
        weight = self._take(f"{name}.weight", (self._hidden_size,))
        return weight.to(self._target.embedding.device).float().contiguous()

    def _linear(self, name: str, num_out: int, num_in: int) -> Linear:
        return self._fused([name], (num_out,), num_in)

    def _fused(self, names: list[str], sizes: tuple[int, ...], num_in: int) -> Linear:
        """One matrix over the outputs of all names. Biases are used where the head has them."""
        weights = [self._take(f"{name}.weight", (size, num_in)) for name, size in zip(names, sizes, strict=True)]
        given = [(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)]
        biases = [self._take(name, (size,)) if name in self._tensors else None for name, size in given]
        present = [bias for bias in biases if bias is not None]
        if len(present) not in (0, len(names)):
            raise UnsupportedModel(f"only some of {', '.join(names)} have a bias")
        return self._make(torch.cat(weights), torch.cat(present) if present else None)

    def _make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        linear = make_linear(self._placed(weight), None if bias is None else self._placed(bias))
        self._num_parameters += weight.numel()
        if self._target.packer is not None:
            linear.pack(self._target.packer)
        return linear

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"the head's {name} is {tuple(tensor.shape)}, and {shape} would fit the model")
        return tensor

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._target.embedding.device, self._target.embedding.dtype).contiguous()


def _rope(config: Mapping[str, Any], device: torch.device) -> Rope:
    """The rotary embedding, computed by transformers."""
    from transformers import LlamaConfig  # slow to import
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stock = LlamaConfig.from_dict(dict(config))
    kind = (stock.rope_parameters or {}).get("rope_type", "default")
    if kind not in SUPPORTED_ROPES:
        raise UnsupportedModel(f"the head's rotary scaling is {kind}")
    rotary: Any = LlamaRotaryEmbedding(stock)
    return Rope(rotary.inv_freq.float().to(device), float(rotary.attention_scaling))
