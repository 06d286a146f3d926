"""Plans which stored tensors make which weights, from names, dtypes and shapes alone: no tensor is read.

Every format is a pure function from stored tensors to a `WeightPlan` for each packed weight. Errors of a checkpoint are
found here, before its gigabytes are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.model.errors import UnreadableModel, UnsupportedModel

SCALE_DTYPES = ("F32", "BF16", "F16")
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_zero_point", ".input_global_scale")
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".output_scale", ".prob_scale")
IGNORED_SUFFIXES = ACTIVATION_SCALES + KV_SCALES
"""Scales of activations and of cached keys and values. Both keep the dtype that the worker computes with, which is more
precise than what these scales are for."""


NUM_MATRIX_SIDES = 2


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, unread. `dtype` is its safetensors name, such as `F8_E4M3`."""

    dtype: str
    shape: tuple[int, ...]


StoredTensors = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """A weight of the architecture and the stored tensors that `compute` makes it from, in the order of `sources`.

    `compute` raises `ValueError` for numbers in them that mean nothing.
    """

    name: str
    sources: tuple[str, ...]
    compute: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """All packed weights of a checkpoint. `ignored`: stored tensors that the weights do not depend on."""

    weights: tuple[WeightPlan, ...]
    ignored: tuple[str, ...]

    @property
    def consumed(self) -> frozenset[str]:
        """Stored tensors that the architecture must not see."""
        return frozenset(self.ignored).union(*(weight.sources for weight in self.weights))


class WeightFormat(Protocol):
    """How one quantisation method stores weights, with the parameters of one config."""

    @property
    def method(self) -> str:
        """The `quant_method`."""
        ...

    def plan(self, stored: StoredTensors, dtype: torch.dtype) -> CheckpointPlan:
        """The plan for a checkpoint that is served in `dtype`.

        Raises `UnreadableModel` for tensors that are missing or of a wrong shape, `UnsupportedModel` for others.
        """
        ...


def finish_plan(
    stored: StoredTensors,
    weights: Iterable[WeightPlan],
    method: str,
    parts: tuple[str, ...],
    unused: Iterable[str] = (),
) -> CheckpointPlan:
    """The plan, after no stored tensor whose name ends in one of `parts` was left over.

    `unused`: further tensors that weights come with and that carry no numbers. Raises `UnsupportedModel`.
    """
    unused = set(unused)
    ignored = unused.union(name for name in stored if name.endswith(IGNORED_SUFFIXES))
    plan = CheckpointPlan(tuple(weights), tuple(sorted(ignored)))
    consumed = plan.consumed
    for weight in plan.weights:
        if weight.name in stored and weight.name not in consumed:
            raise UnsupportedModel(f"tensor {weight.name} is there twice: plain, and as {weight.sources[0]}")
    for name in sorted(stored):
        if name.endswith(parts) and name not in consumed:
            raise UnsupportedModel(f"tensor {name} belongs to no weight that is stored as {method}")
    return plan


def require(stored: StoredTensors, name: str, owner: str) -> StoredTensor:
    """The tensor `name`. Raises `UnreadableModel` if it is missing."""
    if name not in stored:
        raise UnreadableModel(f"tensor {name} is missing, and {owner} means nothing without it; download it again")
    return stored[name]


def check(name: str, tensor: StoredTensor, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Raises `UnreadableModel` unless it has one of `dtypes` and one of `shapes` (any shape, if none is given)."""
    if tensor.dtype not in dtypes:
        raise UnreadableModel(f"tensor {name} is stored as {tensor.dtype}, and not as {' or '.join(dtypes)}")
    if shapes and tensor.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise UnreadableModel(f"tensor {name} has shape {list(tensor.shape)}, and its weight needs {wanted}")


def check_matrix(name: str, tensor: StoredTensor, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """The rows and columns of a matrix that has one of `dtypes`. Raises `UnreadableModel`."""
    check(name, tensor, dtypes)
    if len(tensor.shape) != NUM_MATRIX_SIDES or 0 in tensor.shape:
        raise UnreadableModel(f"tensor {name} has shape {list(tensor.shape)}, and is no matrix")
    return tensor.shape[0], tensor.shape[1]
