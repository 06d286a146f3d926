"""Matrix products with weights that stay: what the lean decoder calls its projections through.

One object a weight matrix, made by `make_linear`; which arithmetic answers a call is decided here and nowhere else.
Called by `baton.model.lean`. Knows no layer and no model.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from baton.model.kernels.library import Kernels
from baton.model.kernels.linear import NativeProduct
from baton.model.packed import pack_weight, packed_product, unpack_weight
from baton.model.quantized import QuantizedProduct


class Linear:
    """`x @ weight.T + bias`: [tokens, in_features] -> [tokens, out_features], contiguous, of its dtype."""

    __slots__ = ("_bias", "_product", "_quantized", "_weight", "packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight  # [out_features, in_features], rows adjacent
        self._bias = bias
        self._product: NativeProduct | None = None
        self._quantized: QuantizedProduct | None = None
        self.packed = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._quantized is not None:
            return self._quantized(x)
        if self.packed:
            return packed_product(x, self._weight, self._bias)
        if self._product is not None and self._product.pays(x.shape[0]):
            return self._product(x, self._weight, self._bias)
        return linear(x, self._weight, self._bias)

    def pack(self) -> None:
        """Lay the weight out for oneDNN; the plain one is dropped. Whether that pays: `packed.packing_pays`."""
        self._weight = pack_weight(self._weight)
        self.packed = True

    def unpack(self) -> None:
        """Undo `pack`."""
        self._weight = unpack_weight(self._weight)
        self.packed = False

    def quantize(self, kernels: Kernels) -> None:
        """Keep the weight as int8 from now on; the float one is dropped. Raises `ValueError` if it is not finite."""
        self._quantized = QuantizedProduct(kernels, self._weight, self._bias)
        self._weight, self._bias = self._weight.new_empty(0), None

    def use(self, product: NativeProduct | None) -> bool:
        """Let `product` answer where it pays, if it takes this weight, or torch alone (None); whether it does now."""
        self._product = product if product is not None and product.takes(self._weight, self._bias) else None
        return self._product is not None


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A product with `weight` [out_features, in_features], which is kept and not copied."""
    return Linear(weight, bias)
