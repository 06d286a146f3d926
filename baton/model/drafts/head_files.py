"""Files of a published drafting head: its config and its tensors. Read at load.

Those of an EAGLE head get the names of EAGLE-3. MTP layers lie among the tensors of a checkpoint: only they are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.config import read_raw_config

MTP_PREFIX = "model.mtp_layers."
"""Of MTP layers in the layout of MiMo."""
_FOREIGN_MTP = re.compile(r"(model\.layers\.\d+\.eh_proj|mtp\.|model\.mtp_block\.)")
"""Of layouts whose layers have experts, latents or a rotation that heads do not compute."""


def is_eagle_head(directory: Path) -> bool:
    """True if the weights in `directory` are a head's: no model has a matrix `fc` beside its layers."""
    return "fc.weight" in {_name(name) for name in _names(directory)}


def is_head(directory: Path, target: Path) -> bool:
    """True if what is in `directory` drafts for the model in `target` as a head.

    That is an EAGLE head, or the target itself with MTP layers; another model with such layers is a draft model.
    Raises `UnsupportedModel` for MTP layers of the target that are not computed here.
    """
    if directory.resolve() != target.resolve():
        return is_eagle_head(directory)
    names = _names(directory)
    if foreign := sorted(name for name in names if _FOREIGN_MTP.match(name)):
        raise UnsupportedModel(f"MTP layers with a tensor {foreign[0]} are not computed here; only those of MiMo are")
    return is_eagle_head(directory) or any(name.startswith(MTP_PREFIX) for name in names)


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


def read_mtp_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all MTP layers by their own names. Raises `UnreadableModel`."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith(MTP_PREFIX)]  # noqa: SIM118
                tensors |= {name: file.get_tensor(name) for name in names}
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
