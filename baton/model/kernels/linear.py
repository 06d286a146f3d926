"""Products of few rows with a weight as the model keeps it: for how many rows the native one pays, and the call.

Called by `baton.model.linear` and by the modules that `baton.model.packed` puts into stock models. Knows no layer.
"""

from __future__ import annotations

import torch

from baton.model.config import has_bfloat16_arithmetic
from baton.model.kernels.library import Kernels, takes

MAX_FLOAT32_ROWS = 48
"""Above it MKL's matrix product is faster; measured by `bench/kernels.py`."""


class NativeProduct:
    """`x @ weight.T + bias` for up to `max_rows` rows (None: any number). Keeps nothing but the kernels."""

    __slots__ = ("_kernels", "max_rows")

    def __init__(self, kernels: Kernels, max_rows: int | None) -> None:
        self._kernels = kernels
        self.max_rows = max_rows

    def takes(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether the kernel can multiply with `weight` [out_features, in_features]."""
        fits = weight.shape[1] % self._kernels.span_elements == 0
        plain = all(part.is_contiguous() and part.dtype is weight.dtype for part in (weight, bias) if part is not None)
        return weight.is_cpu and takes(weight.dtype) and plain and fits

    def pays(self, num_rows: int) -> bool:
        """Whether it was measured to be the fastest for so many rows."""
        return self.max_rows is None or num_rows <= self.max_rows

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x` [*, in_features] -> [*, out_features], contiguous. `weight` and `bias` must be such as it `takes`."""
        x = x.contiguous()
        num_out, num_in = weight.shape
        if x.dtype is not weight.dtype or x.shape[-1] != num_in:
            raise ValueError(f"{tuple(x.shape)} {x.dtype} does not go with a weight of {(num_out, num_in)}")
        out = x.new_empty(*x.shape[:-1], num_out)
        num_rows = x.numel() // num_in
        self._kernels.linear(
            *(x.dtype is torch.bfloat16, x.data_ptr(), weight.data_ptr()),
            *(None if bias is None else bias.data_ptr(), out.data_ptr()),
            *(num_rows, num_in, num_out),
        )
        return out


def product_that_pays(kernels: Kernels, dtype: torch.dtype) -> NativeProduct | None:
    """For weights of `dtype`: None where torch is faster at every number of rows, or may use several threads."""
    if not takes(dtype) or torch.get_num_threads() > 1:
        return None
    if dtype is torch.bfloat16:  # torch emulates it on CPUs without bfloat16 arithmetic; with it, it was not measured
        return None if has_bfloat16_arithmetic() else NativeProduct(kernels, max_rows=None)
    return NativeProduct(kernels, MAX_FLOAT32_ROWS)
