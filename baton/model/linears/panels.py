"""Products with weights in panels, multiplied by `kernels/src/panels.cpp` for any number of rows.

Called by `baton.model.linears.packing`. Knows no layer.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from baton.model.huge_pages import huge_empty
from baton.model.kernels.library import Kernels, supports_dtype

STEP_INPUTS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}


class PanelLinear:
    """`x @ weight.T + bias`: [*, in_features] -> [*, out_features], contiguous.

    A row's result has the same bits in every batch.
    """

    __slots__ = ("_bias", "_kernels", "_panels", "_shape")

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Packs a copy of `weight` [out_features, in_features], which must pass `panels_support`."""
        self._kernels = kernels
        self._shape = (weight.shape[0], weight.shape[1])
        self._panels = pack_panels(weight, kernels.panel_outputs)
        self._bias = None if bias is None else bias.contiguous()

    @classmethod
    def of_parts(
        cls, kernels: Kernels, shape: tuple[int, int], panels: torch.Tensor, bias: torch.Tensor | None
    ) -> PanelLinear:
        """A product with packed `panels`, which are referenced. `shape`: that of the plain weight."""
        made = cls.__new__(cls)
        made._kernels, made._shape, made._panels, made._bias = kernels, shape, panels, bias
        return made

    def parts(self) -> dict[str, torch.Tensor]:
        """What `of_parts` takes; no bias: no entry."""
        return {"panels": self._panels} | ({} if self._bias is None else {"bias": self._bias})

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features] of the plain weight."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight, and of rows."""
        return self._panels.dtype

    def weight(self) -> torch.Tensor:
        """A plain copy, bit for bit."""
        return unpack_panels(self._panels, self._shape[0])

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the weight that a call reads."""
        return [self._panels]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises `ValueError` for rows that do not match the weight."""
        num_out, num_in = self._shape
        if x.dtype is not self._panels.dtype or x.shape[-1] != num_in or not x.is_cpu:
            raise ValueError(f"{tuple(x.shape)} {x.dtype} on {x.device} does not go with a weight of {self._shape}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], num_out)
        self._kernels.linear(
            *(x.dtype is torch.bfloat16, x.data_ptr(), self._panels.data_ptr()),
            *(None if self._bias is None else self._bias.data_ptr(), out.data_ptr()),
            *(x.numel() // num_in, num_in, num_out),
        )
        return out


def panels_support(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True if a weight [out_features, in_features] can be packed and multiplied with `bias` [out_features]."""
    same = bias is None or bias.dtype is weight.dtype
    return weight.is_cpu and supports_dtype(weight.dtype) and same and weight.shape[1] % STEP_INPUTS[weight.dtype] == 0


def pack_panels(weight: torch.Tensor, panel_outputs: int) -> torch.Tensor:
    """Packs `weight` [out_features, in_features] as [panels, steps, panel_outputs, inputs of a step], zero-padded."""
    inputs = STEP_INPUTS[weight.dtype]
    missing = -weight.shape[0] % panel_outputs
    filled = pad(weight, (0, 0, 0, missing)) if missing else weight.contiguous()
    panels = filled.view(-1, panel_outputs, weight.shape[1] // inputs, inputs).transpose(1, 2)
    return huge_empty(panels.shape, panels.dtype).copy_(panels)


def unpack_panels(panels: torch.Tensor, num_out: int) -> torch.Tensor:
    """Undoes `pack_panels`."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:num_out].contiguous()
