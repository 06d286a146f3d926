"""MXFP4 experts of gpt-oss: `quant_method: mxfp4` (OCP Microscaling Formats, version 1.0, sections 5.2 to 5.4).

`X_blocks` [experts, outputs, groups, 16] has two e2m1 values a byte, the low four bits first; `X_scales`
[experts, outputs, groups] an e8m0 exponent for 32 values. The architecture multiplies from the left and wants
[experts, inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baton.model.errors import UnsupportedModel
from baton.model.loading.dequantize.plan import CheckpointPlan, StoredTensors, WeightPlan, check, finish_plan, require

BLOCKS, SCALES = "_blocks", "_scales"
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
BLOCK_BYTES = 16
NUM_DIMENSIONS = 4
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """It has no parameters: groups of 32 values, and names that say what is packed."""

    method: str = "mxfp4"

    def plan(self, stored: StoredTensors, dtype: torch.dtype) -> CheckpointPlan:
        """See `WeightFormat`. Experts come out in `dtype`, since float32 copies of all of them would be large."""
        names = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
        return finish_plan(stored, [self._weight(stored, name, dtype) for name in names], self.method, (BLOCKS, SCALES))

    def _weight(self, stored: StoredTensors, name: str, dtype: torch.dtype) -> WeightPlan:
        blocks, scales = name + BLOCKS, name + SCALES
        if not name.endswith(EXPERTS):
            raise UnsupportedModel(f"tensor {blocks} is no gate_up_proj or down_proj of experts: its layout is unknown")
        shape = stored[blocks].shape
        if len(shape) != NUM_DIMENSIONS:
            raise UnsupportedModel(f"tensor {blocks} has shape {list(shape)}, and not [experts, outputs, groups, 16]")
        check(blocks, stored[blocks], ("U8",), (*shape[:-1], BLOCK_BYTES))
        check(scales, require(stored, scales, blocks), ("U8", "F8_E8M0"), shape[:-1])
        return WeightPlan(name, (blocks, scales), partial(dequantize_experts, dtype=dtype))


def read_mxfp4(config: Mapping[str, Any]) -> Mxfp4Format:
    """The format of a `quantization_config`."""
    return Mxfp4Format()


def dequantize_experts(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`blocks` [experts, outputs, groups, 16] and `scales` [experts, outputs, groups], both uint8: the weights
    [experts, 32 * groups, outputs] in `dtype`. A scale of 255 is NaN.
    """
    pairs, factors, exponents = _byte_values(), _factors(), scales.view(torch.uint8)
    num_experts, num_outputs, num_groups, _ = blocks.shape
    weight = torch.empty(num_experts, num_groups * 2 * BLOCK_BYTES, num_outputs, dtype=dtype)
    for expert in range(num_experts):
        values = pairs[blocks[expert].int()].flatten(-2)
        values *= factors[exponents[expert].int()].unsqueeze(-1)
        weight[expert] = values.flatten(1).t()
    return weight


def _byte_values() -> torch.Tensor:
    """The two values of every byte: [256, 2]."""
    values = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)])
    codes = torch.arange(256)
    return torch.stack((values[codes % 16], values[codes // 16]), -1)


def _factors() -> torch.Tensor:
    """The power of two of every e8m0 byte: [256]."""
    factors = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - E8M0_BIAS).float()
    factors[E8M0_NAN] = torch.nan
    return factors
