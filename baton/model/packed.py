"""Linear layers with weights laid out for oneDNN: the largest single gain on AVX512 CPUs, and optional everywhere.

Swaps `nn.Linear` modules in place, after load. The operator is private to torch, so it is tried on numbers first; where
it is missing, wrong or known not to pay, the stock modules stay. A tied output head gets a packed copy and the
embedding keeps its own weight. Expert weights of mixture models are parameters of three axes and are left alone.
"""

from __future__ import annotations

import enum

import torch
from torch import nn
from torch.nn.functional import linear

BATCH_HINT = 16  # float32 needs at least this to be laid out well for every batch size; bfloat16 does not care
_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Packing(enum.Enum):
    """Whether to pack. `AUTO`: where it was measured to pay, on AVX512; on AVX2 it loses at small batches."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class PackedLinear(nn.Module):
    """`nn.Linear` over a packed weight; [.., in_features] -> [.., out_features]."""

    packed: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        bias = None if source.bias is None else source.bias.detach()
        self.register_buffer("packed", pack_weight(source.weight.detach()), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return packed_product(inputs, self.packed, self.bias)

    def unpacked(self) -> nn.Linear:
        """A stock module with the same weight."""
        module = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        module.weight = nn.Parameter(unpack_weight(self.packed), requires_grad=False)
        if self.bias is not None:
            module.bias = nn.Parameter(self.bias, requires_grad=False)
        return module.eval()


def packing_pays(dtype: torch.dtype, device: str, packing: Packing) -> bool:
    """Whether to pack weights of `dtype` on this machine: wanted, present, and right on numbers."""
    if packing is Packing.NEVER or device != "cpu" or dtype not in _RELATIVE_ERROR:
        return False
    if packing is Packing.AUTO and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    return _operator_works(dtype)


def pack_linears(model: nn.Module) -> int:
    """Replace every plain `nn.Linear` in `model`; returns how many. Their own weights are dropped."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        _replace(model, name, PackedLinear(module))
    return len(names)


def unpack_linears(model: nn.Module) -> None:
    """Undo `pack_linears`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            _replace(model, name, module.unpacked())


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of `weight` [out_features, in_features] in an order of oneDNN's choice."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH_HINT)
    return packed


def unpack_weight(packed: torch.Tensor) -> torch.Tensor:
    """A plain copy again, bit for bit."""
    return packed.to_dense()


def packed_product(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` of a packed weight; [.., in_features] -> [.., out_features]."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return out


def _operator_works(dtype: torch.dtype) -> bool:
    """Whether the private operators exist, accept `dtype` on this CPU, and agree with `F.linear`."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Linear(48, 80).to(dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    try:
        packed = PackedLinear(module)
        for num_tokens in (1, 5, 33):
            inputs = torch.randn(1, num_tokens, 48, generator=generator).to(dtype)
            exact = linear(inputs.double(), module.weight.double(), module.bias.double())
            error = (packed(inputs).double() - exact).abs().max() / exact.abs().max()
            if not error <= _RELATIVE_ERROR[dtype]:
                return False
        return bool(torch.equal(packed.unpacked().weight, module.weight))
    except (AttributeError, RuntimeError):
        return False
