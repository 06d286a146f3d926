"""Lets stock modules multiply with weights in another order: their `nn.Linear` modules are swapped in place.

Called at load, after the model has proved itself without. A tied output head gets a copy of its own and the embedding
keeps the weight. Expert weights of mixture models are parameters of three axes and are left alone.
"""

from __future__ import annotations

import torch
from torch import nn

from baton.model.layouts import Arrangement


class ArrangedLinear(nn.Module):
    """`nn.Linear` with its weight kept by a product; [.., in_features] -> [.., out_features]."""

    bias: torch.Tensor | None

    def __init__(self, source: nn.Linear, arrangement: Arrangement) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        bias = None if source.bias is None else source.bias.detach()
        self.register_buffer("bias", bias, persistent=False)
        self._product = arrangement.arrange(source.weight.detach(), bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._product(inputs)

    def plain(self) -> nn.Linear:
        """A stock module with the same weight."""
        module = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        module.weight = nn.Parameter(self._product.weight(), requires_grad=False)
        if self.bias is not None:
            module.bias = nn.Parameter(self.bias, requires_grad=False)
        return module.eval()


def arrange_linears(model: nn.Module, arrangement: Arrangement) -> int:
    """Swap every plain `nn.Linear` whose weight is taken; returns how many. Their own weights are dropped."""
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and arrangement.takes(module.weight, module.bias)
    ]
    for name in found:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        model.set_submodule(name, ArrangedLinear(module, arrangement))
    return len(found)


def restore_linears(model: nn.Module) -> None:
    """Undo `arrange_linears`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, ArrangedLinear):
            model.set_submodule(name, module.plain())
