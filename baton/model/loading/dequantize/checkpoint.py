"""Opens a packed checkpoint as tensors that the loader of transformers reads one by one, dequantised on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from baton.model.errors import UnreadableModel
from baton.model.loading.dequantize.plan import CheckpointPlan, WeightPlan


class DequantizedTensor:
    """A weight that is computed when it is indexed, and then forgotten. Like a safetensors slice."""

    def __init__(self, plan: WeightPlan, read: Callable[[str], torch.Tensor]) -> None:
        self._plan = plan
        self._read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensors = (self._read(name) for name in self._plan.sources)
        try:
            return self._plan.compute(*tensors)[index]
        except ValueError as error:
            raise UnreadableModel(f"the tensors of {self._plan.name} do not fit: {error}") from error


def lazy_tensors(files: Mapping[str, Path], plan: CheckpointPlan) -> dict[str, Any]:
    """Weights by name, unread: what `plan` computes, and every stored tensor that it does not consume.

    `files`: the file of each stored tensor. They stay mapped while a weight is referenced.
    """
    handles: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in set(files.values())}

    def read(name: str) -> torch.Tensor:
        tensor = handles[files[name]].get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    consumed = plan.consumed
    plain = {name: handles[path].get_slice(name) for name, path in files.items() if name not in consumed}
    return plain | {weight.name: DequantizedTensor(weight, read) for weight in plan.weights}
