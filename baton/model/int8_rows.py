"""Rounds rows of numbers to int8, each by its own maximum. Used for weights, their inputs, and K and V in pages."""

from __future__ import annotations

import torch

INT8_MAX = 127
"""Bound on both sides. -128 is excluded: it has no negative, and the AVX2 product is exact only without it."""

_TINY = 1e-30  # below it, the inverse of the scale would be infinite


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises every row of `x` [rows, features] by its own scale, as the kernel does: int8, and float32 [rows].

    The scale of a row that is not finite is NaN.
    """
    wide = x.double()  # products are exact in float64, so they are rounded once
    size = x.float().abs().amax(1)
    size = torch.where(torch.isfinite(size), size, torch.nan)
    size = torch.where(size < _TINY, 0.0, size)
    factor = torch.where(size > 0, INT8_MAX / size, 0.0)[:, None]
    return torch.round(wide * factor).nan_to_num(0.0).to(torch.int8), size / INT8_MAX
