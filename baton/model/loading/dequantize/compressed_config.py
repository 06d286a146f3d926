"""Reads the config of compressed-tensors: which scheme stores the weights of which module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.domain.arithmetic import ceil_div
from baton.model.errors import UnsupportedModel
from baton.model.loading.dequantize.packing import WORD_BITS
from baton.model.loading.dequantize.parameters import require_one_of

METHOD = "compressed-tensors"
PACKED_FORMAT = "pack-quantized"
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", PACKED_FORMAT)
STRATEGIES = {False: ("tensor", "channel", "group", "block"), True: ("channel", "group")}
"""By whether values are packed."""
BITS = {False: (8,), True: (4, 8)}
"""By whether values are packed."""
REGULAR_EXPRESSION = "re:"
NUM_BLOCK_SIDES = 2


@dataclass(frozen=True, slots=True)
class FactorLayout:
    """`block`: rows and columns that share a factor; `shapes`: those that the factors of a matrix may have."""

    block: tuple[int, int]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CompressedVariant:
    """How the weights of a config group are stored. `kind`: `float` or `int`; `block`: sides of a group or a block."""

    kind: str
    num_bits: int
    packed: bool
    symmetric: bool
    strategy: str
    block: tuple[int, int]

    def layout(self, rows: int, columns: int) -> FactorLayout:
        """The layout of the factors of a matrix [rows, columns]."""
        if self.strategy == "tensor":
            return FactorLayout((rows, columns), ((1,), (), (1, 1)))
        block = (1, columns) if self.strategy == "channel" else self.block
        return FactorLayout(block, ((ceil_div(rows, block[0]), ceil_div(columns, block[1])),))


@dataclass(frozen=True, slots=True)
class SchemeSelection:
    """Schemes by the targets that they are for: module names, patterns of them, or names of classes."""

    schemes: tuple[tuple[tuple[str, ...], CompressedVariant], ...]

    def of(self, module: str) -> CompressedVariant:
        """The scheme of a module: by its name or a pattern, or else the one for `Linear`. Raises `UnsupportedModel`."""
        for targets, scheme in self.schemes:
            if any(_names(target, module) for target in targets):
                return scheme
        for targets, scheme in self.schemes:
            if "Linear" in targets:
                return scheme
        raise UnsupportedModel(f"compressed-tensors: no config group has a target for {module}")


def _names(target: str, module: str) -> bool:
    if target.startswith(REGULAR_EXPRESSION):
        return re.match(target.removeprefix(REGULAR_EXPRESSION), module) is not None
    return module == target or module.endswith(f".{target}")


def read_schemes(config: Mapping[str, Any]) -> SchemeSelection:
    """The schemes of a `quantization_config`. Raises `UnsupportedModel` for what is not supported."""
    require_one_of(METHOD, "status", config.get("quantization_status") or "compressed", ("compressed",))
    sparsity = config.get("sparsity_config") or {}
    sparse = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    require_one_of(METHOD, "sparsity", sparse, ("dense",))
    if config.get("transform_config"):
        raise UnsupportedModel("compressed-tensors: transforms of weights are not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedModel("compressed-tensors: config_groups is missing")
    return SchemeSelection(tuple(_read_group(name, group, config) for name, group in groups.items()))


def _read_group(name: str, group: Any, config: Mapping[str, Any]) -> tuple[tuple[str, ...], CompressedVariant]:
    where = f"{METHOD}: {name}"
    if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights"), Mapping):
        raise UnsupportedModel(f"{where} has no weights")
    layout = require_one_of(where, "format", group.get("format") or config.get("format"), FORMATS)
    packed = layout == PACKED_FORMAT
    kinds = ("int",) if packed else ("float", "int")
    kind = require_one_of(where, "type", weights.get("type") or "int", kinds)
    bits = require_one_of(where, "num_bits", weights.get("num_bits"), BITS[packed])
    default = "group" if weights.get("group_size") else "tensor"
    strategy = require_one_of(where, "strategy", weights.get("strategy") or default, STRATEGIES[packed])
    block = _block(where, strategy, weights, WORD_BITS // bits if packed else 1)
    scheme = CompressedVariant(kind, bits, packed, weights.get("symmetric", True) is True, strategy, block)
    return _targets(where, group.get("targets") or ["Linear"]), scheme


def _targets(where: str, targets: Any) -> tuple[str, ...]:
    valid = isinstance(targets, list | tuple) and all(isinstance(target, str) for target in targets)
    try:
        if not valid:
            raise UnsupportedModel(f"{where}: targets {targets!r} are not names and patterns")
        for target in targets:
            if target.startswith(REGULAR_EXPRESSION):
                re.compile(target.removeprefix(REGULAR_EXPRESSION))
    except re.error as error:
        raise UnsupportedModel(f"{where}: target {target!r} is no regular expression: {error}") from error
    return tuple(targets)


def _block(where: str, strategy: str, weights: Mapping[str, Any], divisor: int) -> tuple[int, int]:
    """Rows and columns of a group or block; (1, 1) where there are none. Raises `UnsupportedModel`."""
    if strategy == "group":
        sides: Any = (1, weights.get("group_size"))
    elif strategy == "block":
        sides = weights.get("block_structure")
    else:
        sides = (1, 1)
    valid = isinstance(sides, list | tuple) and len(sides) == NUM_BLOCK_SIDES
    if not valid or not all(type(side) is int and side > 0 for side in sides):
        raise UnsupportedModel(f"{where}: {sides!r} is no size of a {strategy}")
    if strategy == "group" and sides[1] % divisor:
        raise UnsupportedModel(f"{where}: a group of {sides[1]} is not a number of whole words")
    return sides[0], sides[1]
