"""Derives a model's cache geometry from one observed forward pass instead of from its config.

A recording handler notes the shapes of K and V. Called once at load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from baton.kv.geometry import CacheLayer, KVGeometry, LatentGeometry, LayerGeometry
from baton.model.attention.base import AttentionCall
from baton.model.attention.hf_hook import use_handler
from baton.model.errors import UnsupportedModel

NUM_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class ObservedLayer:
    """One layer as the model called it. `window`: positions that it attends to; None: all."""

    geometry: CacheLayer
    num_heads: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(slots=True)
class _Recorder:
    """Records shapes and returns zeros of the right shape."""

    layers: dict[int, ObservedLayer] = field(default_factory=dict)
    num_calls: int = 0

    def attend(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        rank = values.shape[2]
        self.layers[call.layer] = ObservedLayer(
            geometry=(
                LayerGeometry(keys.shape[1], keys.shape[2], rank)
                if call.latent is None
                else LatentGeometry(rank, keys.shape[2] - rank)
            ),
            num_heads=call.query.shape[1],
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
        )
        v_head_dim = rank if call.latent is None else call.latent.v_head_dim
        return call.query.new_zeros(*call.query.shape[:2], v_head_dim)


def observe_layers(model: torch.nn.Module, num_layers: int, device: str) -> tuple[ObservedLayer, ...]:
    """The model's layers in order, as they call attention. The model must use the paged hook.

    Raises `UnsupportedModel` unless each of `num_layers` layers called it exactly once.
    """
    recorder = _Recorder()
    ids = torch.arange(NUM_PROBE_TOKENS, device=device)[None]
    with use_handler(recorder), torch.inference_mode():
        model(input_ids=ids, position_ids=ids, use_cache=False)
    seen = sorted(recorder.layers)
    if seen != list(range(num_layers)) or recorder.num_calls != num_layers:
        raise UnsupportedModel(
            f"{recorder.num_calls} attention calls from layers {seen} were seen where {num_layers} layers should call "
            "once each: part of this model does not use the attention interface, so its state cannot be paged"
        )
    return tuple(recorder.layers[index] for index in seen)


def kv_geometry(layers: tuple[ObservedLayer, ...], dtype: str, page_size: int, head_groups: int = 1) -> KVGeometry:
    """The page geometry of observed layers, with a window part if some of them, not all, have a sliding window.

    Raises `UnsupportedModel` for head groups that do not divide the heads.
    """
    latent = [layer for layer in layers if isinstance(layer.geometry, LatentGeometry)]
    if latent and (len(latent) < len(layers) or any(_is_special(layer) for layer in layers)):
        raise UnsupportedModel("only some layers keep latents, or these with a window, a softcap or sinks")
    common = math.gcd(*(layer.geometry.num_kv_heads for layer in layers))
    if common % head_groups:
        possible = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise UnsupportedModel(f"this model's KV heads cannot be cut into {head_groups} groups, only into {possible}")
    geometry = KVGeometry.of_layers(tuple(layer.geometry for layer in layers), dtype, page_size, head_groups)
    windows = {number: layer.window for number, layer in enumerate(layers) if layer.window is not None}
    if not 0 < len(windows) < len(layers) or head_groups > 1:
        return geometry
    return geometry.with_window_part(max(windows.values()), tuple(windows))


def _is_special(layer: ObservedLayer) -> bool:
    return layer.window is not None or layer.softcap is not None or layer.has_sinks
