"""Says if steps can verify trees of drafts with a loaded model. Called once, by the runner."""

from __future__ import annotations

from baton.kv.geometry import LatentGeometry
from baton.model.loading.loader import LoadedModel


def tree_refusal(model: LoadedModel) -> str:
    """Why a tree cannot be verified, naming the part of the model; empty: it can.

    Siblings lie in different slots at one position, so what counts slots instead of positions has no trees.
    """
    if any(layer.window is not None for layer in model.layers):
        return "layers with a sliding window"
    if any(isinstance(layer.geometry, LatentGeometry) for layer in model.layers):
        return "layers that keep latents"
    if model.config.media is not None and model.config.media.block_rows is not None:
        return "images whose tokens see each other"
    if len(model.head) > 1:
        return "a head of several MTP layers"
    inner = "" if model.draft is None else tree_refusal(model.draft)
    return f"the draft model: {inner}" if inner else ""
