"""FP8 weights with a scale for each block, matrix, row or expert: `quant_method: fp8` (DeepSeek-V3, arXiv 2412.19437).

A weight is `value * scale`, where the checkpoint calls the factor `weight_scale_inv` or `weight_scale`. Blocks at the
right and lower edge are cut off where a matrix is no multiple of the block. The stored dtypes tell which modules are
quantised, so that `modules_to_not_convert` needs no reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.dequantize.plan import (
    SCALE_DTYPES,
    CheckpointPlan,
    StoredTensor,
    StoredTensors,
    WeightPlan,
    check,
    finish_plan,
)

FLOAT8_DTYPES = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
PARTS = ("_scale_inv", ".weight_scale")
NUM_BLOCK_SIDES = 2

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """`block`: rows and columns that share a scale; None for a scale for each matrix or row."""

    block: Block | None
    method: str = "fp8"

    def plan(self, stored: StoredTensors, dtype: torch.dtype) -> CheckpointPlan:
        """See `WeightFormat`. Weights come out in float32."""
        weights = [
            self._weight(stored, name)
            for name, tensor in stored.items()
            if tensor.dtype in FLOAT8_DTYPES and len(tensor.shape) >= NUM_BLOCK_SIDES
        ]
        return finish_plan(stored, weights, self.method, PARTS)

    def _weight(self, stored: StoredTensors, name: str) -> WeightPlan:
        scales = [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in stored]
        if len(scales) != 1:
            found = "no scale" if not scales else "two scales"
            raise UnreadableModel(f"tensor {name} is stored as {stored[name].dtype} with {found}; download it again")
        (scale,) = scales
        check(scale, stored[scale], (*SCALE_DTYPES, "F8_E8M0"), *self._scale_shapes(stored[name]))
        block = self.block or (1, 1)
        return WeightPlan(name, (name, scale), lambda values, factors: dequantize_blocks(values, factors, block))

    def _scale_shapes(self, weight: StoredTensor) -> list[tuple[int, ...]]:
        *outer, rows, columns = weight.shape
        if self.block is not None:
            return [(*outer, ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1]))]
        return [(), (1,), (rows, 1), (*outer, 1, 1), (*outer, rows, 1)]


def read_fp8(config: Mapping[str, Any]) -> Fp8Format:
    """The format of a `quantization_config`. Raises `UnsupportedModel`."""
    block = config.get("weight_block_size")
    if block is None:
        return Fp8Format(None)
    valid = isinstance(block, list | tuple) and len(block) == NUM_BLOCK_SIDES
    if not valid or not all(type(side) is int and side > 0 for side in block):
        raise UnsupportedModel(f"fp8: weight_block_size {block!r} is not two positive numbers")
    return Fp8Format((block[0], block[1]))


def dequantize_blocks(values: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """`values` [..., rows, columns] times the scale of their block, in float32.

    `scales`: [..., ceil(rows / block[0]), ceil(columns / block[1])], or a shape that broadcasts to it.
    """
    weight, factors = values.to(torch.float32), scales.to(torch.float32)
    if block == (1, 1) or factors.dim() < NUM_BLOCK_SIDES:
        return weight.mul_(factors)
    rows, columns = weight.shape[-2:]
    factors = factors.repeat_interleave(block[1], -1)[..., :columns]
    for first in range(0, rows, block[0]):  # one row of blocks at a time: a few MB beside the weight
        index = first // block[0]
        weight[..., first : first + block[0], :] *= factors[..., index : index + 1, :]
    return weight
