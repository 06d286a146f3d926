"""Packs the weights of stock modules: swaps their `nn.Linear` modules in place.

Called at load, after the model passed the self-check with plain weights. A tied output head gets a packed copy; the
embedding keeps the plain weight. Expert weights of three axes stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from baton.model.linears.packing import WeightPacker


class PackedModule(nn.Module):
    """An `nn.Linear` with a packed weight: [.., in_features] -> [.., out_features]."""

    bias: torch.Tensor | None

    def __init__(self, source: nn.Linear, packer: WeightPacker) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        bias = None if source.bias is None else source.bias.detach()
        self.register_buffer("bias", bias, persistent=False)
        self._packed = packer.pack(source.weight.detach(), bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._packed(inputs)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the weight that a call reads."""
        return self._packed.tensors()

    def unpacked(self) -> nn.Linear:
        """A stock module with the same weight."""
        module = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        module.weight = nn.Parameter(self._packed.weight(), requires_grad=False)
        if self.bias is not None:
            module.bias = nn.Parameter(self.bias, requires_grad=False)
        return module.eval()


def pack_modules(model: nn.Module, packer: WeightPacker, left: Collection[nn.Module] = ()) -> int:
    """Swaps every plain `nn.Linear` that `packer` accepts and drops its weight. Returns their number.

    `left`: modules whose weight is read as it is, and which stay.
    """
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module not in left and packer.accepts(module.weight, module.bias)
    ]
    for name in found:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        model.set_submodule(name, PackedModule(module, packer))
    return len(found)


def module_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors that a step of a stock module reads: parameters and packed weights."""
    packed = [tensor for module in model.modules() if isinstance(module, PackedModule) for tensor in module.tensors()]
    return [*(parameter.detach() for parameter in model.parameters()), *packed]


def unpack_modules(model: nn.Module) -> None:
    """Undoes `pack_modules`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedModule):
            model.set_submodule(name, module.unpacked())
