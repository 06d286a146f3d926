"""Lets stock modules multiply natively: `nn.Linear` modules are swapped in place, on the same parameters.

Called at load, after the model has proved itself without. Expert weights of mixture models are parameters of three axes
and are left alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from baton.model.kernels.linear import NativeProduct


class NativeLinear(nn.Module):
    """`nn.Linear` on `stock`'s parameters, by `product` where that pays: [.., in_features] -> [.., out_features]."""

    def __init__(self, stock: nn.Linear, product: NativeProduct) -> None:
        super().__init__()
        self.in_features = stock.in_features
        self.out_features = stock.out_features
        self.weight, self.bias = stock.weight, stock.bias
        self._product = product

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.dtype is self.weight.dtype and self._product.pays(inputs.numel() // self.in_features):
            return self._product(inputs, self.weight, self.bias)
        return linear(inputs, self.weight, self.bias)

    def stock(self) -> nn.Linear:
        """A stock module on the same parameters."""
        module = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        module.weight, module.bias = self.weight, self.bias
        return module.eval()


def use_product(model: nn.Module, product: NativeProduct) -> int:
    """Swap every plain `nn.Linear` whose weight `product` takes; returns how many."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and product.takes(module.weight, module.bias)
    ]
    for name, module in found:
        model.set_submodule(name, NativeLinear(module, product))
    return len(found)


def use_torch(model: nn.Module) -> None:
    """Undo `use_product`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, NativeLinear):
            model.set_submodule(name, module.stock())
