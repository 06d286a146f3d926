"""Files of a published drafting head: its config, and its tensors under the names of EAGLE-3. Read at load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from baton.model.errors import UnreadableModel
from baton.model.loading.config import read_raw_config


def is_eagle_head(directory: Path) -> bool:
    """True if the weights in `directory` are a head's: no model has a matrix `fc` beside its layers."""
    return "fc.weight" in {_name(name) for name in _names(directory)}


def read_config_of_head(directory: Path) -> Mapping[str, Any]:
    """Its config.json. Raises `UnreadableModel`."""
    config = read_raw_config(directory)
    if "hidden_size" not in config:
        raise UnreadableModel(f"{directory}/config.json is no config of a head: it has no hidden_size")
    return config


def read_tensors_of_head(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors by the names of EAGLE-3, whose one layer is `midlayer`. Raises `UnreadableModel`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            tensors |= {_name(name): tensor for name, tensor in load_file(path).items()}
        except (OSError, SafetensorError) as error:
            raise UnreadableModel(f"{path} cannot be read: {error}; download it again") from error
    return tensors


def _names(directory: Path) -> set[str]:
    """Names of all tensors, unread."""
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        except (OSError, SafetensorError) as error:
            raise UnreadableModel(f"{path} cannot be read: {error}; download it again") from error
    return names


def _name(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
