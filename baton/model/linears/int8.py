"""int8 weights and products with them: symmetric, one scale an output channel and one a row of x.

A row is quantised by its own maximum, and integer sums are exact. So a row's result has the same bits in every batch,
chunk and replay. Called by `baton.model.linears.linear`. Knows no layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from baton.model.int8_rows import quantize_rows
from baton.model.kernels.library import Kernels, supports_dtype
from baton.model.linears.panels import STEP_INPUTS, pack_panels

MAX_INPUTS = 2**16
"""Longest sum of u8 times s8 products that fits an int32."""


class _Int8Weight(ctypes.Structure):
    """`Int8Weight` of kernels/src/int8.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "sums", "bias")),
        *((name, ctypes.c_int64) for name in ("num_in", "num_padded", "num_out")),
    )


_CHANNELS_PER_CHUNK = 256  # intermediates are float64, and an output head is large


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises `weight` [out_features, in_features] to int8 of that shape and float32 scales [out_features].

    A channel's maximum becomes 127. A channel of zeros or nearly zeros becomes zeros with scale 0. Raises `ValueError`
    for a weight that is not finite.
    """
    values = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for first in range(0, weight.shape[0], _CHANNELS_PER_CHUNK):
        channels = slice(first, first + _CHANNELS_PER_CHUNK)
        values[channels], scales[channels] = quantize_rows(weight[channels])
    if not torch.isfinite(scales).all():
        raise ValueError("the weight has numbers that are not finite")
    return values, scales


class Int8Linear:
    """`x @ weight.T + bias` with an int8 weight: [rows, in_features] -> [rows, out_features], in the dtype of `x`."""

    __slots__ = ("_bias", "_call", "_kernels", "_panels", "_scales", "_shape", "_sums")

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keeps no reference to its arguments. Raises `ValueError` for a weight that is not finite, or too wide."""
        num_out, num_in = weight.shape
        if num_in > MAX_INPUTS:
            raise ValueError(f"sums over {num_in} inputs may not fit an int32")
        values, self._scales = quantize_weight(weight)
        padding = -num_in % STEP_INPUTS[torch.int8]
        self._shape = (num_out, num_in)
        self._kernels = kernels
        self._panels = pack_panels(pad(values, (0, padding)), kernels.panel_outputs)
        self._sums = values.sum(1, dtype=torch.int32)
        self._bias = None if bias is None else bias.float().clone()
        self._call = self._prepare()

    @classmethod
    def of_parts(cls, kernels: Kernels, shape: tuple[int, int], parts: Mapping[str, torch.Tensor]) -> Int8Linear:
        """A product with what `parts` of another one returned, which is referenced. `shape`: of the float weight."""
        made = cls.__new__(cls)
        made._kernels, made._shape = kernels, shape
        made._panels, made._scales, made._sums = parts["panels"], parts["scales"], parts["sums"]
        made._bias = parts.get("bias")
        made._call = made._prepare()
        return made

    def parts(self) -> dict[str, torch.Tensor]:
        """Panels, scales, sums and, if there is one, the bias."""
        parts = {"panels": self._panels, "scales": self._scales, "sums": self._sums}
        return parts | ({} if self._bias is None else {"bias": self._bias})

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features] of the float weight."""
        return self._shape

    def _prepare(self) -> _Int8Weight:
        num_out, num_in = self._shape
        tensors = (self._panels, self._scales, self._sums, self._bias)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        return _Int8Weight(*addresses, num_in, num_in + -num_in % STEP_INPUTS[torch.int8], num_out)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the weight that a call reads."""
        return [self._panels]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and its scales, sums and bias."""
        tensors = (self._panels, self._scales, self._sums, self._bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises `ValueError` for rows that do not match the weight."""
        num_out, num_in = self._shape
        if not supports_dtype(x.dtype) or x.dim() != 2 or x.shape[1] != num_in or not x.is_cpu:
            raise ValueError(f"{tuple(x.shape)} {x.dtype} on {x.device} does not go with a weight of {self._shape}")
        x = x.contiguous()
        out = x.new_empty(x.shape[0], num_out)
        address = ctypes.addressof(self._call)
        self._kernels.linear_int8(x.dtype is torch.bfloat16, x.data_ptr(), address, out.data_ptr(), x.shape[0])
        return out
