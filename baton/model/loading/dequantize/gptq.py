"""GPTQ (arXiv 2210.17323), in the layout of AutoGPTQ and GPTQModel: `quant_method: gptq`.

`X.qweight` [inputs * bits / 32, outputs] has several inputs a word, `X.qzeros` [groups, outputs * bits / 32] several
outputs, the lowest bits first. `X.scales` is [groups, outputs]. `X.g_idx` [inputs] has the group of each input: in
order, or by activation (`desc_act`). A weight is `(value - zero) * scale`. The first version of the format stores
`zero - 1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.errors import UnsupportedModel
from baton.model.loading.dequantize.packing import (
    WORD_BITS,
    check_groups,
    dequantize_groups,
    group_of_columns,
    unpack,
)
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

SUPPORTED_BITS = (2, 4, 8)
STORED_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What was subtracted from zero points, by `checkpoint_format`."""
WORDS, ZEROS, SCALES, GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """`group_size`: inputs that share a scale; None for one group. `zero_offset`: what to add to stored zero points."""

    bits: int
    group_size: int | None
    zero_offset: int
    method: str = "gptq"

    def plan(self, stored: StoredTensors, dtype: torch.dtype) -> CheckpointPlan:
        """See `WeightFormat`. Weights come out in float32."""
        modules = [name.removesuffix(WORDS) for name in stored if name.endswith(WORDS)]
        weights = [self._weight(stored, module) for module in modules]
        return finish_plan(stored, weights, self.method, (WORDS, ZEROS, SCALES, GROUPS))

    def _weight(self, stored: StoredTensors, module: str) -> WeightPlan:
        words, zeros, scales, groups = (module + part for part in (WORDS, ZEROS, SCALES, GROUPS))
        num_words, num_outputs = check_matrix(words, stored[words], ("I32",))
        per_word = WORD_BITS // self.bits
        num_inputs = num_words * per_word
        group_size = self.group_size or num_inputs
        num_groups = ceil_div(num_inputs, group_size)
        check(zeros, require(stored, zeros, words), ("I32",), (num_groups, ceil_div(num_outputs, per_word)))
        check(scales, require(stored, scales, words), SCALE_DTYPES, (num_groups, num_outputs))
        sources: tuple[str, ...] = (words, zeros, scales)
        if groups in stored:
            check(groups, stored[groups], ("I32", "I64"), (num_inputs,))
            sources = (*sources, groups)
        compute = partial(dequantize_gptq, bits=self.bits, group_size=group_size, zero_offset=self.zero_offset)
        return WeightPlan(f"{module}.weight", sources, compute)


def read_gptq(config: Mapping[str, Any]) -> GptqFormat:
    """The format of a `quantization_config`. Raises `UnsupportedModel`."""
    bits = require_one_of("gptq", "bits", config.get("bits"), SUPPORTED_BITS)
    layout = config.get("checkpoint_format") or "gptq"
    require_one_of("gptq", "checkpoint_format", layout, tuple(STORED_ZERO_OFFSETS))
    if config.get("dynamic"):
        raise UnsupportedModel("gptq: other parameters for some modules (dynamic) are not supported")
    group_size = read_group_size("gptq", config.get("group_size", 128))
    return GptqFormat(bits, group_size, STORED_ZERO_OFFSETS[layout])


def dequantize_gptq(
    words: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    zero_offset: int,
) -> torch.Tensor:
    """The weight [outputs, inputs] in float32 from the stored tensors of a module. `groups` None: in order.

    Raises `ValueError` for a group that does not exist. Zero points wrap around as their fields do: a stored
    -1 is all ones, and means 0.
    """
    values = unpack(words.t().contiguous(), bits)
    offsets = (unpack(zeros, bits)[:, : words.shape[1]] + zero_offset) & (2**bits - 1)
    if groups is None:
        groups = group_of_columns(values.shape[1], group_size)
    return dequantize_groups(values, scales.t(), offsets.t(), check_groups(groups, len(scales)))
