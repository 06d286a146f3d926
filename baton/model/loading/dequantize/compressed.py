"""compressed-tensors (vLLM's llm-compressor): `float-quantized`, `int-quantized`, `naive-quantized`, `pack-quantized`.

A weight is `(value - zero) * scale`. Values are float8 or int8 matrices (`X.weight`), or integers of 4 or 8 bits
(`X.weight_packed`), several inputs in a 32-bit word, the lowest bits first, shifted to be unsigned. Scales and zero
points (`X.weight_scale`, `X.weight_zero_point`) have a number for the matrix, each output, each group of inputs, or a
block; packed zero points have several outputs a word. `X.weight_g_idx` has the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.errors import UnreadableModel
from baton.model.loading.dequantize.compressed_config import METHOD, SchemeSelection, read_schemes
from baton.model.loading.dequantize.packing import WORD_BITS, check_groups, dequantize_groups, group_of_columns, unpack
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

PACKED, PLAIN = ".weight_packed", ".weight"
SCALE, ZERO, GROUPS, SHAPE = ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
VALUE_DTYPES = {"float": "F8_E4M3", "int": "I8"}


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """The schemes of its config groups."""

    schemes: SchemeSelection
    method: str = METHOD

    def plan(self, stored: StoredTensors, dtype: torch.dtype) -> CheckpointPlan:
        """See `WeightFormat`. Weights come out in float32."""
        weights = []
        for name, tensor in stored.items():
            if name.endswith(PACKED):
                weights.append(self._packed(stored, name.removesuffix(PACKED)))
            elif name.endswith(PLAIN) and tensor.dtype in VALUE_DTYPES.values():
                weights.append(self._unpacked(stored, name.removesuffix(PLAIN)))
        return finish_plan(stored, weights, self.method, (PACKED, SCALE, ZERO, GROUPS, SHAPE))

    def _unpacked(self, stored: StoredTensors, module: str) -> WeightPlan:
        scheme, values = self.schemes.of(module), module + PLAIN
        rows, columns = check_matrix(values, stored[values], (VALUE_DTYPES[scheme.kind],))
        if scheme.packed:
            raise UnreadableModel(
                f"tensor {values} is stored as {stored[values].dtype}, and not packed as its config says"
            )
        layout = scheme.layout(rows, columns)
        sources = {"values": values, "scales": module + SCALE}
        check(sources["scales"], require(stored, sources["scales"], values), SCALE_DTYPES, *layout.shapes)
        zero = module + ZERO
        if zero in stored or not scheme.symmetric:
            check(zero, require(stored, zero, values), ("I8", "I32"), *layout.shapes)
            sources["zeros"] = zero
        return _weight_plan(module, sources, partial(dequantize_values, block=layout.block))

    def _packed(self, stored: StoredTensors, module: str) -> WeightPlan:
        scheme, words = self.schemes.of(module), module + PACKED
        rows, num_words = check_matrix(words, stored[words], ("I32",))
        if not scheme.packed:
            raise UnreadableModel(f"tensor {words} is packed, and its config says {scheme.kind} values")
        per_word = WORD_BITS // scheme.num_bits
        layout = scheme.layout(rows, num_words * per_word)
        sources = {"words": words, "scales": module + SCALE, "shape": module + SHAPE}
        check(sources["scales"], require(stored, sources["scales"], words), SCALE_DTYPES, *layout.shapes)
        check(sources["shape"], require(stored, sources["shape"], words), ("I64", "I32"), (2,))
        zero, groups = module + ZERO, module + GROUPS
        if zero in stored or not scheme.symmetric:
            num_groups = layout.shapes[0][-1]
            check(zero, require(stored, zero, words), ("I32",), (ceil_div(rows, per_word), num_groups))
            sources["zeros"] = zero
        if groups in stored:
            check(groups, stored[groups], ("I32", "I64"))
            sources["groups"] = groups
        compute = partial(dequantize_words, bits=scheme.num_bits, group_size=layout.block[1])
        return _weight_plan(module, sources, compute)


def _weight_plan(module: str, sources: Mapping[str, str], compute: Any) -> WeightPlan:
    """A plan whose `compute` gets its tensors by keyword."""

    def by_keyword(*tensors: torch.Tensor) -> torch.Tensor:
        weight = compute(**dict(zip(sources, tensors, strict=True)))
        assert isinstance(weight, torch.Tensor)
        return weight

    return WeightPlan(f"{module}.weight", tuple(sources.values()), by_keyword)


def read_compressed(config: Mapping[str, Any]) -> CompressedFormat:
    """The format of a `quantization_config`. Raises `UnsupportedModel`."""
    return CompressedFormat(read_schemes(config))


def dequantize_values(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None, *, block: tuple[int, int]
) -> torch.Tensor:
    """The weight [rows, columns] in float32. `block`: the rows and columns that share a factor."""
    rows, columns = values.shape
    across, down = group_of_columns(columns, block[1]), group_of_columns(rows, block[0])
    scales = _matrix(scales).index_select(0, down)
    if zeros is not None:
        zeros = _matrix(zeros).index_select(0, down)
    return dequantize_groups(values, scales, zeros, across)


def dequantize_words(
    words: torch.Tensor,
    scales: torch.Tensor,
    shape: torch.Tensor,
    zeros: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    *,
    bits: int,
    group_size: int,
) -> torch.Tensor:
    """The weight of `shape` in float32. `zeros` None: symmetric. Raises `ValueError` for a shape that does not fit."""
    rows, columns = (int(size) for size in shape)
    fields = unpack(words, bits)
    if rows != len(words) or not 0 <= fields.shape[1] - columns < WORD_BITS // bits:
        raise ValueError(f"its weight_shape is {[rows, columns]}, and its words hold {list(fields.shape)}")
    if groups is None:
        groups = group_of_columns(columns, group_size)
    if len(groups) != columns:
        raise ValueError(f"its g_idx has {len(groups)} columns of {columns}")
    factors = _matrix(scales).expand(rows, -1)
    if zeros is None:
        offsets = torch.full_like(factors, 2 ** (bits - 1))
    else:  # both were shifted by the same number
        offsets = unpack(zeros.t().contiguous(), bits).t()[:rows]
    return dequantize_groups(fields[:, :columns], factors, offsets, check_groups(groups, factors.shape[1]))


def _matrix(factor: torch.Tensor) -> torch.Tensor:
    return factor.reshape(1, 1) if factor.numel() == 1 else factor
