"""The lean decoder's projections: one object a weight matrix, which chooses how to multiply.

Made by `make_linear`. Called by the lean decoder. Knows no layer and no model.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from baton.model.huge_pages import to_huge_pages
from baton.model.kernels.library import Kernels
from baton.model.linears.int8 import Int8Linear
from baton.model.linears.packing import PackedLinear, WeightPacker


class Linear:
    """`x @ weight.T + bias`: [tokens, in_features] -> [tokens, out_features], contiguous, in the weight's dtype."""

    __slots__ = ("_bias", "_packed", "_quantized", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight  # [out_features, in_features], contiguous; empty while the weight is packed or quantised
        self._bias = bias
        self._packed: PackedLinear | None = None
        self._quantized: Int8Linear | None = None

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
