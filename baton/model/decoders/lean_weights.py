"""The lean decoder's weights, taken from a loaded stock module without a second whole copy.

Fuses Q, K and V into one matrix, gate and up into another, layer by layer. The stock module's parameters become views
of the fused matrices, so both models stay valid on the same memory. Called once at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from baton.model.decoders.lean_spec import LeanSpec
from baton.model.decoders.ops import QkNorm, RopeTable
from baton.model.decoders.rotary_axes import feature_axes
from baton.model.errors import UnsupportedModel
from baton.model.huge_pages import move_parameters, to_huge_pages
from baton.model.kernels.library import Kernels
from baton.model.linears.linear import Linear, make_linear
from baton.model.linears.packing import WeightPacker


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """`down(activation(gate) * up)`. `gate_up` returns both halves, gate first."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertFeedForward:
    """A mixture of experts of transformers: [1, tokens, hidden_size] -> the same shape."""

    module: nn.Module


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """A layer in the order of use. Norm weights are [hidden_size], float32; None where the family has no such norm."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: QkNorm | None
    attention_out: Linear
    attention_out_norm: torch.Tensor | None
    feed_forward_norm: torch.Tensor
    feed_forward: GatedFeedForward | ExpertFeedForward
    feed_forward_out_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Rope:
    """Angles of a position are `position * inv_freq` [rotary_dim / 2]; cosines and sines are multiplied by `factor`."""

    inv_freq: torch.Tensor
    factor: float

    def table(self, max_positions: int) -> RopeTable:
        """The table of positions [0, max_positions)."""
        positions = torch.arange(max_positions, device=self.inv_freq.device)
        angles = positions[:, None].float() * self.inv_freq
        return RopeTable(angles.cos() * self.factor, angles.sin() * self.factor)


@dataclass(frozen=True, slots=True)
class LeanModel:
    """All weights. Layers with equal rotary embeddings share a `ropes[layer]`.

    `feature_axes`: the axis of positions by which each pair of features rotates; None: there is one axis.
    """

    spec: LeanSpec
    embedding: torch.Tensor
    layers: tuple[LeanLayer, ...]
    ropes: tuple[Rope, ...]
    norm: torch.Tensor
    head: Linear
    feature_axes: tuple[int, ...] | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head: normalised hidden states [tokens, hidden_size] -> logits [tokens, vocab_size]."""
        logits, softcap = self.head(hidden), self.spec.logit_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def pack(self, packer: WeightPacker) -> int:
        """Packs every matrix that `packer` accepts, one after another. Returns their number."""
        return sum(linear.pack(packer) for linear in self._linears())

    def unpack(self) -> None:
        """Undoes `pack`."""
        for linear in self._linears():
            linear.unpack()

    def quantize(self, kernels: Kernels) -> int:
        """Quantises every matrix to int8 for good, one after another. Returns their number. Raises `ValueError`."""
        for linear in self._linears():
            linear.quantize(kernels)
        return len(self._linears())

    def to_huge_pages(self) -> LeanModel:
        """This model with embedding and plain matrices on huge pages, copied one after another."""
        embedding = to_huge_pages(self.embedding)
        for linear in self._linears():
            linear.tie(embedding) if linear.shares(self.embedding) else linear.to_huge_pages()
        for module in self._experts():
            move_parameters(module)
        return replace(self, embedding=embedding)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that a step reads: embedding, matrices, experts."""
        matrices = [tensor for linear in self._linears() for tensor in linear.tensors()]
        experts = [parameter.detach() for module in self._experts() for parameter in module.parameters()]
        return [self.embedding, *matrices, *experts]

    def _experts(self) -> list[nn.Module]:
        parts = [layer.feed_forward for layer in self.layers]
        return [part.module for part in parts if isinstance(part, ExpertFeedForward)]

    def _linears(self) -> list[Linear]:
        """Every matrix that tokens are multiplied with, except the experts'."""
        found = [self.head]
        for layer in self.layers:
            found += [layer.qkv, layer.attention_out]
            if isinstance(layer.feed_forward, GatedFeedForward):
                found += [layer.feed_forward.gate_up, layer.feed_forward.down]
        return found


def make_lean_model(module: Any, spec: LeanSpec) -> LeanModel:
    """Makes a `LeanModel` from `module`, a stock causal language model, on the same memory.

    Raises `UnsupportedModel` where a layer has parameters that the lean decoder does not use, or lacks one.
    """
    try:
        base = module.model
        _refuse_leftovers(module, {"model", "lm_head"})
        _refuse_leftovers(base, {"embed_tokens", "layers", "norm"})
        ropes = _ropes(base.rotary_emb, spec.rope_names)
        return LeanModel(
            spec=spec,
            embedding=base.embed_tokens.weight.detach(),
            layers=tuple(_layer(layer, spec) for layer in base.layers),
            ropes=ropes,
            norm=_norm(base.norm, spec),
            head=_linear(module.lm_head),
            feature_axes=feature_axes(module.config.to_dict(), ropes[0].inv_freq.shape[-1]),
        )
    except AttributeError as error:
        raise UnsupportedModel(f"the stock module is built otherwise: {error}") from error


def _layer(layer: Any, spec: LeanSpec) -> LeanLayer:
    family, attention = spec.family, layer.self_attn
    used = {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"}
    behind, before = None, layer.post_attention_layernorm
    if family.sandwich_norms:
        behind, before = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
        used |= {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
    _refuse_leftovers(layer, used)
    return LeanLayer(
        attention_norm=_norm(layer.input_layernorm, spec),
        qkv=_qkv(attention, spec),
        qk_norm=_qk_norm(attention, spec),
        attention_out=_linear(attention.o_proj),
        attention_out_norm=None if behind is None else _norm(behind, spec),
        feed_forward_norm=_norm(before, spec),
        feed_forward=_feed_forward(layer.mlp, spec),
        feed_forward_out_norm=_norm(layer.post_feedforward_layernorm, spec) if family.sandwich_norms else None,
    )


def _qkv(attention: Any, spec: LeanSpec) -> Linear:
    names = ["qkv_proj"] if spec.family.fused_projections else ["q_proj", "k_proj", "v_proj"]
    norms = {"q_norm", "k_norm"} if spec.family.qk_norm else set()
    _refuse_leftovers(attention, {*names, *norms, "o_proj"})
    return _fuse([attention.get_submodule(name) for name in names])


def _qk_norm(attention: Any, spec: LeanSpec) -> QkNorm | None:
    if not spec.family.qk_norm:
        return None
    return QkNorm(_norm(attention.q_norm, spec), _norm(attention.k_norm, spec), spec.eps)


def _feed_forward(mlp: Any, spec: LeanSpec) -> GatedFeedForward | ExpertFeedForward:
    if spec.family.experts and not hasattr(mlp, "down_proj"):  # some layers of a mixture may be plain
        return ExpertFeedForward(mlp)
    names = ["gate_up_proj"] if spec.family.fused_projections else ["gate_proj", "up_proj"]
    _refuse_leftovers(mlp, {*names, "down_proj"})
    return GatedFeedForward(_fuse([mlp.get_submodule(name) for name in names]), _linear(mlp.down_proj))


def _fuse(modules: Sequence[nn.Module]) -> Linear:
    """One matrix over the outputs of all modules. Afterwards their parameters are views of its rows."""
    if len(modules) == 1:
        return _linear(modules[0])
    weights, biases = zip(*(_weight_and_bias(module) for module in modules), strict=True)
    if len({bias is None for bias in biases}) > 1:
        raise UnsupportedModel("only some of the matrices to be fused have a bias")
    fused_bias = None if biases[0] is None else torch.cat(biases)
    fused = torch.cat(weights)
    at = 0
    for module, weight in zip(modules, weights, strict=True):
        rows = slice(at, at := at + weight.shape[0])
        module.weight.data = fused[rows]
        if fused_bias is not None:
            module.bias.data = fused_bias[rows]
    return make_linear(fused, fused_bias)


def _linear(module: nn.Module) -> Linear:
    return make_linear(*_weight_and_bias(module))


def _weight_and_bias(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    if type(module) is not nn.Linear:
        raise UnsupportedModel(f"a {type(module).__name__} where a linear layer was expected")
    return module.weight.detach(), None if module.bias is None else module.bias.detach()


def _norm(module: Any, spec: LeanSpec) -> torch.Tensor:
    """The factor of a norm in float32."""
    weight: torch.Tensor = module.weight.detach().float().contiguous()
    return 1.0 + weight if spec.family.unit_offset_norms else weight


def _ropes(module: Any, names: Sequence[str]) -> tuple[Rope, ...]:
    """The rotary embedding of each layer; equal names share one object."""
    prefix = {name: f"{name}_" if name else "" for name in names}
    ropes = {
        name: Rope(getattr(module, f"{start}inv_freq").float(), float(getattr(module, f"{start}attention_scaling")))
        for name, start in prefix.items()
    }
    return tuple(ropes[name] for name in names)


def _refuse_leftovers(module: nn.Module, used: set[str]) -> None:
    """Raises `UnsupportedModel` for an unused parameter: the module computes something unknown."""
    left = sorted(name for name, _ in module.named_parameters() if name.split(".")[0] not in used)
    if left:
        raise UnsupportedModel(f"the stock module has {left[0]}, which the lean decoder does not use")
