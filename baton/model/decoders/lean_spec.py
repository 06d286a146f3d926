"""Reads from a model's config what the lean decoder must compute, or why it cannot.

A pure function of values, called at load. It knows how families differ from Llama and refuses everything else. The
self-check then compares the result with the stock model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.model.attention.layers import ObservedLayer
from baton.model.decoders.ops import Activation, HeadShape

SUPPORTED_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angle is a position times a constant. The stock module computes the constants."""

ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of a model family from Llama.

    - `qk_norm`: query and key heads are normalised before rotation.
    - `fused_projections`: the checkpoint has one matrix for Q, K and V, and one for gate and up.
    - `experts`: the feed-forward part is a mixture of experts, run by the stock module.
    - `unit_offset_norms`: norms multiply by 1 + weight.
    - `sandwich_norms`: norms also follow attention and feed-forward.
    - `scaled_embedding`: embeddings are multiplied by the square root of their size.
    """

    qk_norm: bool = False
    fused_projections: bool = False
    experts: bool = False
    unit_offset_norms: bool = False
    sandwich_norms: bool = False
    scaled_embedding: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(experts=True),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "phi3": Family(fused_projections=True),
    "qwen2_vl_text": Family(),
    "qwen2_5_vl_text": Family(),
    "qwen3_vl_text": Family(qk_norm=True),
    "gemma2": Family(unit_offset_norms=True, sandwich_norms=True, scaled_embedding=True),
    "gemma3_text": Family(unit_offset_norms=True, sandwich_norms=True, scaled_embedding=True, qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class LeanSpec:
    """One model's parameters. `rope_names[layer]` names a rotary embedding of the stock module; "" if it has only one.

    `embedding_scale` and `logit_softcap` are None where nothing is scaled or capped.
    """

    family: Family
    heads: HeadShape
    eps: float
    activation: Activation
    rope_names: tuple[str, ...]
    embedding_scale: float | None
    logit_softcap: float | None


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A reason for the stock decoder, to end a sentence."""

    reason: str


def lean_spec(config: Mapping[str, Any], layers: Sequence[ObservedLayer]) -> LeanSpec | Unsupported:
    """The spec of a text config and its observed `layers`, or the reason why there is none."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        return Unsupported(f"{model_type} is none of {', '.join(sorted(FAMILIES))}")
    name = config.get("hidden_activation") or config.get("hidden_act")
    if name not in ACTIVATIONS:
        return Unsupported(f"its activation is {name}")
    ropes = _ropes(config, len(layers))
    if foreign := sorted({rope for _, rope in ropes} - SUPPORTED_ROPES):
        return Unsupported(f"its rotary scaling is {', '.join(foreign)}")
    shapes = {(layer.num_heads, layer.geometry) for layer in layers}
    if len(shapes) > 1:
        return Unsupported("its layers are of different shapes")
    num_heads, cache = shapes.pop()
    if cache.k_head_dim != cache.v_head_dim or any(layer.has_sinks for layer in layers):
        return Unsupported("its attention has sinks, or values of another size than keys")
    return LeanSpec(
        family=family,
        heads=HeadShape(num_heads, cache.num_kv_heads, cache.k_head_dim),
        eps=float(config["rms_norm_eps"]),
        activation=ACTIVATIONS[name],
        rope_names=tuple(rope_name for rope_name, _ in ropes),
        embedding_scale=float(config["hidden_size"]) ** 0.5 if family.scaled_embedding else None,
        logit_softcap=config.get("final_logit_softcapping") or None,
    )


def _ropes(config: Mapping[str, Any], num_layers: int) -> list[tuple[str, str]]:
    """Name and type of every layer's rotary embedding. Some families have a record for each layer type."""
    parameters = config.get("rope_parameters") or {}
    kinds = config.get("layer_types") or []
    if any(isinstance(parameters.get(kind), Mapping) for kind in kinds):
        return [(kind, _rope_type(parameters.get(kind))) for kind in kinds[:num_layers]]
    return [("", _rope_type(parameters))] * num_layers


def _rope_type(parameters: object) -> str:
    if not isinstance(parameters, Mapping):
        return "missing"
    return str(parameters.get("rope_type", "default"))
