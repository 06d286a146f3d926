"""Chooses the attention backend of a model on this machine. Called when a decoder is made."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kv.geometry import LatentGeometry
from baton.model.attention.base import AttentionBackend
from baton.model.attention.flashinfer_backend import FlashinferAttention, flashinfer_supports
from baton.model.attention.latent import LatentAttention
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.native_backend import NativeAttention, max_native_segment_tokens, native_supports
from baton.model.attention.torch_backend import TorchAttention
from baton.model.kernels.library import Kernels
from baton.model.storage import PageStorage


def choose_backend(
    layers: Sequence[ObservedLayer], storage: PageStorage, kernels: Kernels | None = None
) -> AttentionBackend:
    """flashinfer or the native kernels where they support every layer, otherwise torch; over latents if there are."""
    backend = _choose(layers, storage, kernels)
    return LatentAttention(storage, backend) if isinstance(layers[0].geometry, LatentGeometry) else backend


def _choose(layers: Sequence[ObservedLayer], storage: PageStorage, kernels: Kernels | None) -> AttentionBackend:
    if flashinfer_supports(layers, storage):
        return FlashinferAttention(layers, storage)
    if kernels is not None and native_supports(kernels, layers, storage):
        return NativeAttention(kernels, storage, max_native_segment_tokens(kernels, storage.dtype))
    return TorchAttention(storage)
