"""Chooses the memory layout of weights on this machine.

Called at load, after the model passed the self-check with plain weights. Panels for the native kernels were measured to
be fastest for every number of rows; oneDNN's layout comes next where it is faster than plain.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.model.kernels.library import Kernels, supports_dtype
from baton.model.linears.onednn import OneDnnLinear, onednn_is_correct, onednn_is_faster, onednn_supports
from baton.model.linears.panels import PanelLinear, panels_support


class WeightLayout(enum.Enum):
    """Memory layout of weights. `AUTO`: the fastest on this machine. An unavailable layout leaves weights plain."""

    AUTO = "auto"
    PANELS = "panels"
    ONEDNN = "onednn"
    PLAIN = "plain"


class PackedLinear(Protocol):
    """`x @ weight.T + bias` with a weight in a packed layout."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[*, in_features] -> [*, out_features] in the weight's dtype. Raises for rows that do not match the weight."""

    def weight(self) -> torch.Tensor:
        """A plain copy [out_features, in_features], bit for bit."""

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the weight that a call reads."""


@dataclass(frozen=True, slots=True)
class WeightPacker:
    """A layout, a test whether it accepts a weight and bias, and the function that packs them."""

    layout: WeightLayout
    accepts: Callable[[torch.Tensor, torch.Tensor | None], bool]
    pack: Callable[[torch.Tensor, torch.Tensor | None], PackedLinear]


def choose_packer(
    wanted: WeightLayout, kernels: Kernels | None, dtype: torch.dtype, device: str
) -> WeightPacker | None:
    """The packer for weights of `dtype`; None leaves them plain."""
    if wanted is WeightLayout.PLAIN or device != "cpu":
        return None
    if wanted in (WeightLayout.AUTO, WeightLayout.PANELS) and kernels is not None and supports_dtype(dtype):
        return panel_packer(kernels)
    if (wanted is WeightLayout.ONEDNN or (wanted is WeightLayout.AUTO and onednn_is_faster())) and onednn_is_correct(
        dtype
    ):
        return WeightPacker(WeightLayout.ONEDNN, lambda weight, _: onednn_supports(weight), OneDnnLinear)
    return None


def panel_packer(kernels: Kernels) -> WeightPacker:
    """The packer for the panels of `kernels`."""
    return WeightPacker(WeightLayout.PANELS, panels_support, lambda weight, bias: PanelLinear(kernels, weight, bias))
