"""Matrix products with weights that stay: what the lean decoder calls its projections through.

One object a weight matrix, made by `make_linear`; which arithmetic answers a call is decided here and nowhere else.
Called by `baton.model.lean`. Knows no layer and no model.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from baton.model.huge_pages import to_huge_pages
from baton.model.kernels.library import Kernels
from baton.model.linears.int8 import Int8Linear
from baton.model.linears.packing import PackedLinear, WeightPacker


class Linear:
    """`x @ weight.T + bias`: [tokens, in_features] -> [tokens, out_features], contiguous, of its dtype."""

    __slots__ = ("_bias", "_packed", "_quantized", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight  # [out_features, in_features], rows adjacent; empty while a product keeps it
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
        """Keep the weight so, if it is taken, and the plain one no more; whether it is. Restore it before another."""
        if self._packed is not None:
            return True
        if not packer.accepts(self._weight, self._bias):
            return False
        self._packed = packer.pack(self._weight, self._bias)
        self._weight = self._weight.new_empty(0)
        return True

    def unpack(self) -> None:
        """Undo `pack`."""
        if self._packed is not None:
            self._weight, self._packed = self._packed.weight(), None

    def tensors(self) -> list[torch.Tensor]:
        """What a call reads of the weight."""
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
        """Keep the weight as int8 from now on; the float one is dropped. Raises `ValueError` if it is not finite."""
        self._quantized = Int8Linear(kernels, self._weight, self._bias)
        self._weight, self._bias = self._weight.new_empty(0), None


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A product with `weight` [out_features, in_features], which is kept and not copied."""
    return Linear(weight, bias)
