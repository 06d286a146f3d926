"""Reads what a checkpoint stores, and refuses numbers that are not those that the architecture computes with.

transformers loads float8 or packed weights as plain numbers and leaves out their scales, if it does not know the method
or the config names none. The stock model is wrong then as well, so the self-check agrees with it. Called by
`load_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.dequantize.plan import StoredTensor

PLAIN_DTYPES = frozenset({"F16", "BF16", "F32", "F64", "BOOL", "I64"})
"""Of weights, and of masks and positions that some checkpoints store."""
_SIZE_BYTES = 8
_ADVICE = "use an unquantised checkpoint, with --quantization int8 to save memory"


def stored_tensors(directory: Path) -> tuple[dict[str, StoredTensor], dict[str, Path]]:
    """Every tensor of the files that transformers would load, unread, and its file. Raises `UnreadableModel`."""
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, Path] = {}
    for path in _weight_files(directory):
        for name, tensor in _header(path).items():
            if name in files:
                raise UnreadableModel(f"tensor {name} is in {files[name].name} and in {path.name}; keep one of them")
            tensors[name], files[name] = tensor, path
    return tensors, files


def _weight_files(directory: Path) -> list[Path]:
    """`model.safetensors`, or the files of the index: other files may hold the same weights under other names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        return [directory / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UnreadableModel(f"{index} is no index of weights: {error}; download the model again") from error


def refuse_packed_tensors(stored: Mapping[str, StoredTensor]) -> None:
    """Raises `UnsupportedModel` for a matrix in float8 or packed integers."""
    for name, tensor in stored.items():
        packed = tensor.dtype not in PLAIN_DTYPES and len(tensor.shape) > 1
        if packed and not name.endswith("bias"):  # GPT-2's causal masks
            raise UnsupportedModel(f"tensor {name} is stored as {tensor.dtype}, which is not supported: {_ADVICE}")


def refuse_unused_tensors(model: torch.nn.Module, unused: Iterable[str]) -> None:
    """Raises `UnsupportedModel` if a tensor that was not loaded belongs to a module with weights, as a scale does.

    Other tensors are harmless: stored masks and frequencies, whole towers and layers that a text model leaves out.
    """
    modules = dict(model.named_modules())
    for name in sorted(unused):
        owner = name.rpartition(".")[0]
        while owner not in modules:
            owner = owner.rpartition(".")[0]
        if next(modules[owner].parameters(recurse=False), None) is not None:
            raise UnsupportedModel(
                f"tensor {name} belongs to a weight, and this architecture has no use for it: answers would be wrong"
            )


def without_zero_biases(names: Iterable[str], tensors: Mapping[str, Any]) -> list[str]:
    """`names` without biases that change nothing: GPTQ checkpoints have zeros for layers that know no bias.

    `tensors` by name, read when they are indexed.
    """
    return [name for name in names if not name.endswith(".bias") or name not in tensors or tensors[name][...].any()]


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(_SIZE_BYTES), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
        return {
            name: StoredTensor(str(tensor["dtype"]), tuple(map(int, tensor["shape"])))
            for name, tensor in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UnreadableModel(f"{path} is no safetensors file: {error}; download the model again") from error
