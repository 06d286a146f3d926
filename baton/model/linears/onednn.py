"""Products with weights packed by oneDNN, for CPUs without native kernels.

The operators are private to torch, so they are tested on numbers first. Where they are missing, wrong or slow, weights
stay plain. Called by `baton.model.linears.packing`. Knows no layer.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

BATCH_HINT = 16  # float32 needs at least 16 to be packed well for every batch size
_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class OneDnnLinear:
    """`F.linear` of a packed weight: [*, in_features] -> [*, out_features]."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Packs a copy of `weight` [out_features, in_features]."""
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH_HINT)
        self._bias = bias

    def weight(self) -> torch.Tensor:
        """A plain copy, bit for bit."""
        return self._packed.to_dense()

    def tensors(self) -> list[torch.Tensor]:
        """The packed weight, in oneDNN's opaque layout."""
        return [self._packed]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def onednn_supports(weight: torch.Tensor) -> bool:
    """True if the weight can be packed."""
    return weight.is_cpu and weight.dtype in _RELATIVE_ERROR


def onednn_is_faster() -> bool:
    """True on CPUs where packing was measured to be faster: AVX512. On AVX2 it loses at small batches."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def onednn_is_correct(dtype: torch.dtype) -> bool:
    """True if the private operators exist, accept `dtype` on this CPU and agree with `F.linear`."""
    if dtype not in _RELATIVE_ERROR:
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((80, 48), (80,)))
    try:
        product = OneDnnLinear(weight, bias)
        for num_tokens in (1, 5, 33):
            x = torch.randn(1, num_tokens, 48, generator=generator).to(dtype)
            exact = linear(x.double(), weight.double(), bias.double())
            error = (product(x).double() - exact).abs().max() / exact.abs().max()
            if not error <= _RELATIVE_ERROR[dtype]:
                return False
        return torch.equal(product.weight(), weight)
    except (AttributeError, RuntimeError):
        return False
