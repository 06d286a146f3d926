"""In what order weights lie in memory, and which order pays on this machine.

Called at load, once a model has proved itself with plain weights; what multiplies decides the order. Panels for the
native kernels were measured to be the fastest for every number of rows, oneDNN's order is next where it pays.
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
    """How weights are kept. `AUTO`: the fastest that this machine has; one that it lacks leaves them plain."""

    AUTO = "auto"
    PANELS = "panels"
    ONEDNN = "onednn"
    PLAIN = "plain"


class PackedLinear(Protocol):
    """`x @ weight.T + bias` with a weight that is kept in an order of its own."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[*, in_features] -> [*, out_features], of the weight's dtype. Raises for rows that do not go with it."""

    def weight(self) -> torch.Tensor:
        """A plain copy [out_features, in_features], bit for bit."""

    def tensors(self) -> list[torch.Tensor]:
        """What a call reads of the weight."""


@dataclass(frozen=True, slots=True)
class WeightPacker:
    """A layout, which weights with which biases it takes, and how it keeps one."""

    layout: WeightLayout
    accepts: Callable[[torch.Tensor, torch.Tensor | None], bool]
    pack: Callable[[torch.Tensor, torch.Tensor | None], PackedLinear]


def choose_packer(
    wanted: WeightLayout, kernels: Kernels | None, dtype: torch.dtype, device: str
) -> WeightPacker | None:
    """How to keep weights of `dtype`; None: as they are."""
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
    """For `kernels`."""
    return WeightPacker(WeightLayout.PANELS, panels_support, lambda weight, bias: PanelLinear(kernels, weight, bias))
