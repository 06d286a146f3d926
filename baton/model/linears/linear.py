"""The lean decoder's projections: one object a weight matrix, which chooses how to multiply.

Made by `make_linear`. Called by the lean decoder. Knows no layer and no model.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from baton.model.huge_pages import to_huge_pages
from baton.model.kernels.library import Kernels
from baton.model.linears.int8 import Int8Linear
from baton.model.linears.packing import PackedLinear, WeightPacker
from baton.model.linears.panels import PanelLinear


class LinearLayout(enum.Enum):
    """Layouts of the native kernels, whose results have the same bits wherever the weight lies."""

    PANELS = "panels"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class LinearState:
    """All that a `Linear` is made of. `shape`: of the plain weight; `parts`: tensors by name."""

    layout: LinearLayout
    shape: tuple[int, int]
    parts: dict[str, torch.Tensor]


class Linear:
    """`x @ weight.T + bias`: [tokens, in_features] -> [tokens, out_features], contiguous, in the weight's dtype."""

    __slots__ = ("_bias", "_packed", "_quantized", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight  # [out_features, in_features], contiguous; empty while the weight is packed or quantised
        self._bias = bias
        self._packed: PackedLinear | None = None
        self._quantized: Int8Linear | None = None

    @property
    def panels(self) -> PanelLinear | None:
        """The product that a call computes, if it is the native kernels' with panels."""
        return self._packed if isinstance(self._packed, PanelLinear) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x)
        if self._quantized is not None:
            return self._quantized(x)
        return linear(x, self._weight, self._bias)

    def pack(self, packer: WeightPacker) -> bool:
        """Packs the weight if `packer` accepts it and drops the plain one. Returns True if the weight is packed."""
        if self._packed is not None:
            return True
        if not packer.accepts(self._weight, self._bias):
            return False
        self._packed = packer.pack(self._weight, self._bias)
        self._weight = self._weight.new_empty(0)
        return True

    def unpack(self) -> None:
        """Undoes `pack`."""
        if self._packed is not None:
            self._weight, self._packed = self._packed.weight(), None

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the weight that a call reads."""
        kept = self._packed or self._quantized
        return [self._weight] if kept is None else kept.tensors()

    def to_huge_pages(self) -> None:
        """Moves a plain weight; a packed one is on huge pages from the start."""
        self._weight = to_huge_pages(self._weight)

    def state(self) -> LinearState | None:
        """What `of_state` restores; None if torch multiplies, whose rounding depends on the weight's address."""
        if isinstance(self._packed, PanelLinear):
            return LinearState(LinearLayout.PANELS, self._packed.shape, self._packed.parts())
        if self._quantized is not None:
            return LinearState(LinearLayout.INT8, self._quantized.shape, self._quantized.parts())
        return None

    @classmethod
    def of_state(cls, kernels: Kernels, state: LinearState) -> Linear:
        """A product with the tensors of `state`, which are referenced. `kernels`: those that its layout is for."""
        panels = state.parts["panels"]
        made = cls(panels.new_empty(0), None)
        if state.layout is LinearLayout.INT8:
            made._quantized = Int8Linear.of_parts(kernels, state.shape, state.parts)
        else:
            made._bias = state.parts.get("bias")
            made._packed = PanelLinear.of_parts(kernels, state.shape, panels, made._bias)
        return made

    def shares(self, weight: torch.Tensor) -> bool:
        """True if this is the plain weight of a tied embedding."""
        return self._weight.data_ptr() == weight.data_ptr()

    def tie(self, weight: torch.Tensor) -> None:
        """Replaces a plain weight by an equal one."""
        self._weight = weight

    def quantize(self, kernels: Kernels) -> None:
        """Quantises the weight to int8 for good and drops the float one. Raises `ValueError` if it is not finite."""
        self._quantized = Int8Linear(kernels, self._weight, self._bias)
        self._weight, self._bias = self._weight.new_empty(0), None


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A product with `weight` [out_features, in_features], which is referenced, not copied."""
    return Linear(weight, bias)
