"""AWQ's four bits with zero points (arXiv 2306.00978), in the layout of AutoAWQ's `gemm` kernels: `quant_method: awq`.

`X.qweight` [inputs, outputs / 8] and `X.qzeros` [groups, outputs / 8] have eight outputs a word, in the order 0, 2, 4,
6, 1, 3, 5, 7 from the lowest bits. `X.scales` is [groups, outputs]. A weight is `(value - zero) * scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.loading.dequantize.packing import WORD_BITS, dequantize_groups, group_of_columns, unpack
from baton.model.loading.dequantize.parameters import read_group_size, require_one_of
from baton.model.loading.dequantize.plan import (
    SCALE_DTYPES,
    CheckpointPlan,
    StoredTensors,
    WeightPlan,
    check,
    check_matrix,
    finish_plan,
    require,
)

BITS = 4
PER_WORD = WORD_BITS // BITS
FIELD_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""The field of a word that has output 0, 1, ..."""
WORDS, ZEROS, SCALES = ".qweight", ".qzeros", ".scales"


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """`group_size`: inputs that share a scale; None for one group."""

    group_size: int | None
    method: str = "awq"

    def plan(self, stored: StoredTensors, dtype: torch.dtype) -> CheckpointPlan:
        """See `WeightFormat`. Weights come out in float32."""
        modules = [name.removesuffix(WORDS) for name in stored if name.endswith(WORDS)]
        weights = [self._weight(stored, module) for module in modules]
        return finish_plan(stored, weights, self.method, (WORDS, ZEROS, SCALES))

    def _weight(self, stored: StoredTensors, module: str) -> WeightPlan:
        words, zeros, scales = module + WORDS, module + ZEROS, module + SCALES
        num_inputs, num_words = check_matrix(words, stored[words], ("I32",))
        num_groups = ceil_div(num_inputs, self.group_size or num_inputs)
        check(zeros, require(stored, zeros, words), ("I32",), (num_groups, num_words))
        check(scales, require(stored, scales, words), SCALE_DTYPES, (num_groups, num_words * PER_WORD))
        compute = partial(dequantize_awq, group_size=self.group_size or num_inputs)
        return WeightPlan(f"{module}.weight", (words, zeros, scales), compute)


def read_awq(config: Mapping[str, Any]) -> AwqFormat:
    """The format of a `quantization_config`. Raises `UnsupportedModel`."""
    require_one_of("awq", "bits", config.get("bits", config.get("w_bit", BITS)), (BITS,))
    version = config.get("version", "gemm")
    require_one_of("awq", "version", version.lower() if isinstance(version, str) else version, ("gemm",))
    require_one_of("awq", "zero_point", config.get("zero_point", True), (True,))
    return AwqFormat(read_group_size("awq", config.get("group_size", config.get("q_group_size", 128))))


def dequantize_awq(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """The weight [outputs, inputs] in float32 from the three stored tensors of a module."""
    values, offsets = (_in_order(unpack(packed, BITS)).t() for packed in (words, zeros))
    return dequantize_groups(values.contiguous(), scales.t(), offsets, group_of_columns(len(words), group_size))


def _in_order(fields: torch.Tensor) -> torch.Tensor:
    rows = len(fields)
    return fields.view(rows, -1, PER_WORD)[..., list(FIELD_OF_OUTPUT)].view(rows, -1)
