"""Refuses checkpoints whose stored weights are not the numbers that the architecture computes with.

transformers loads float8 or packed weights as plain numbers and leaves out their scales, if it does not know the method
or the config names none. The stock model is wrong then as well, so the self-check agrees with it. Called by
`read_config` and `load_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from baton.model.errors import UnreadableModel, UnsupportedModel

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
PLAIN_DTYPES = frozenset({"F16", "BF16", "F32", "F64", "BOOL", "I64"})
"""Of weights, and of masks and positions that some checkpoints store."""
MAX_NESTING = 4
_SIZE_BYTES = 8
_ADVICE = "use an unquantised checkpoint, with --quantization int8 to save memory"


def refuse_quantized_config(raw: Mapping[str, Any]) -> None:
    """Raises `UnsupportedModel` if `config.json` names a quantisation, at the top or in a nested config."""
    for method in _methods(raw, MAX_NESTING):
        raise UnsupportedModel(f"quant_method {method!r} is not supported: {_ADVICE}")


def _methods(config: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, value in config.items():
        if key in QUANTIZATION_KEYS and value:
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            yield str(method or "unknown")
        elif isinstance(value, Mapping) and depth:
            yield from _methods(value, depth - 1)


def refuse_packed_tensors(directory: Path) -> None:
    """Raises `UnsupportedModel` for a matrix in float8 or packed integers, `UnreadableModel` for no header."""
    for path in sorted(directory.glob("*.safetensors")):
        for name, tensor in _header(path).items():
            packed = tensor["dtype"] not in PLAIN_DTYPES and len(tensor["shape"]) > 1
            if packed and not name.endswith("bias"):  # GPT-2's causal masks
                raise UnsupportedModel(
                    f"tensor {name} is stored as {tensor['dtype']}, which is not supported: {_ADVICE}"
                )


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


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(_SIZE_BYTES), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
        return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, AttributeError) as error:
        raise UnreadableModel(f"{path} is no safetensors file: {error}; download the model again") from error
