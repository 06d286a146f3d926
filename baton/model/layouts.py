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

from baton.model.kernels.library import Kernels, takes
from baton.model.kernels.panels import PanelProduct, panels_take
from baton.model.onednn import PackedProduct, onednn_pays, onednn_takes, onednn_works


class Layout(enum.Enum):
    """How weights are kept. `AUTO`: the fastest that this machine has; one that it lacks leaves them plain."""

    AUTO = "auto"
    PANELS = "panels"
    ONEDNN = "onednn"
    PLAIN = "plain"


class Product(Protocol):
    """`x @ weight.T + bias` with a weight that is kept in an order of its own."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[*, in_features] -> [*, out_features], of the weight's dtype. Raises for rows that do not go with it."""

    def weight(self) -> torch.Tensor:
        """A plain copy [out_features, in_features], bit for bit."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A layout, which weights with which biases it takes, and how it keeps one."""

    layout: Layout
    takes: Callable[[torch.Tensor, torch.Tensor | None], bool]
    arrange: Callable[[torch.Tensor, torch.Tensor | None], Product]


def choose_arrangement(wanted: Layout, kernels: Kernels | None, dtype: torch.dtype, device: str) -> Arrangement | None:
    """How to keep weights of `dtype`; None: as they are."""
    if wanted is Layout.PLAIN or device != "cpu":
        return None
    if wanted in (Layout.AUTO, Layout.PANELS) and kernels is not None and takes(dtype):
        return in_panels(kernels)
    if (wanted is Layout.ONEDNN or (wanted is Layout.AUTO and onednn_pays())) and onednn_works(dtype):
        return Arrangement(Layout.ONEDNN, lambda weight, _: onednn_takes(weight), PackedProduct)
    return None


def in_panels(kernels: Kernels) -> Arrangement:
    """For `kernels`."""
    return Arrangement(Layout.PANELS, panels_take, lambda weight, bias: PanelProduct(kernels, weight, bias))
