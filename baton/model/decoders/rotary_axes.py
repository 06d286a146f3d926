"""Rotary embedding by three axes of positions (M-RoPE, arXiv 2409.12191). Called by the lean decoder.

Each pair of features rotates by the position on one axis. A token whose positions are equal on all axes rotates as with
one axis: only chunks with rows of images come here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from baton.model.decoders.ops import RopeTable
from baton.model.errors import UnsupportedModel

INTERLEAVED = frozenset({"qwen3_vl_text"})
"""Types whose axes take turns; in others each axis has a section."""


def feature_axes(config: Mapping[str, Any], num_features: int) -> tuple[int, ...] | None:
    """The axis of each of `num_features` pairs of features; None for models with one axis.

    Raises `UnsupportedModel` for sections that do not fit.
    """
    sections = (config.get("rope_parameters") or {}).get("mrope_section")
    if sections is None:
        return None
    if len(sections) != 3 or sum(sections) != num_features:
        raise UnsupportedModel(f"sections {sections} of three axes do not make {num_features} pairs of features")
    if config.get("model_type") not in INTERLEAVED:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    axes = [0] * num_features
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], num_features), 3):
            axes[place] = axis
    return tuple(axes)


def rows_by_axes(rope: RopeTable, positions: torch.Tensor, axes: torch.Tensor) -> RopeTable:
    """A table with a row for each token: cosines and sines at `positions` [3, tokens] of each feature's axis."""
    places = positions[axes].T  # [tokens, num_features]
    return RopeTable(rope.cos.gather(0, places), rope.sin.gather(0, places))
