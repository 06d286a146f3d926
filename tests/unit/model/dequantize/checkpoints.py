"""Tiny checkpoints in packed formats, each beside the plain model that it means, and a comparison of their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.domain.request import SamplingParams
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.config import DtypeChoice, read_config
from baton.model.loading.hf_weights import load_weights
from baton.model.loading.loader import load_model
from tests.exactness.test_runner_exactness import NUM_NEW_TOKENS, PAGE_SIZE, make_prompts, paged_scheduler, stock_tokens

Tensors = dict[str, torch.Tensor]
Pack = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor] | None]
"""From a weight's name and value to the tensors that store it and the weight that they mean; None leaves it plain."""


def write(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """A model directory."""
    directory.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def packed_copy(source: Path, directory: Path, pack: Pack, quantization: dict[str, Any]) -> tuple[Path, Path]:
    """`source` packed, and the plain model that the packed one means."""
    config = json.loads((source / "config.json").read_text())
    packed: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored, meant = pack(name, tensor) or ({name: tensor}, tensor)
        packed |= stored
        plain[name] = meant
    assert packed.keys() != plain.keys() or any(packed[name].dtype != plain[name].dtype for name in plain)
    return (
        write(directory / "packed", packed, config | {"quantization_config": quantization}),
        write(directory / "plain", plain, config),
    )


def changed_copy(source: Path, directory: Path, change: Callable[[Tensors], None], **quantization: Any) -> Path:
    """The packed checkpoint with changed tensors, and fields of its quantization config changed."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= quantization
    return write(directory, tensors, config)


def assert_serves(packed: Path, plain: Path) -> None:
    """Greedy tokens of the packed checkpoint over pages are those of `generate()` of the plain one, in float32."""
    prompts = make_prompts(PAGE_SIZE)[1::2]
    expected = stock_tokens(plain, prompts)
    model = load_model(packed, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE)
    assert model.report.checkpoint_note
    tokens = paged_scheduler(model, seed=3).generate(prompts, NUM_NEW_TOKENS, SamplingParams(temperature=0.0))
    assert tokens == expected
    assert len({token for output in expected for token in output}) > NUM_NEW_TOKENS, "greedy output is degenerate"


def loaded_weights(directory: Path, dtype: DtypeChoice = DtypeChoice.FLOAT32) -> Tensors:
    """Parameters of the stock model, by name."""
    module, _ = load_weights(read_config(directory, dtype=dtype))
    return dict(module.named_parameters())


def assert_same_weights(packed: Path, plain: Path) -> None:
    """Every parameter has the same float32 value, bit for bit."""
    ours, wanted = loaded_weights(packed), loaded_weights(plain)
    assert ours.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(ours[name], weight), name


def assert_refused(directory: Path, words: str) -> None:
    """Loading ends in one line that matches `words`."""
    with pytest.raises((UnsupportedModel, UnreadableModel), match=words) as info:
        load_weights(read_config(directory))
    assert "\n" not in str(info.value)


def quantize_rows(
    weight: torch.Tensor, bits: int, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned values [rows, columns], zeros and float16 scales [rows, groups], and `(value - zero) * scale`.

    `groups` [columns]: the group of each column.
    """
    num_groups, largest = int(groups.max()) + 1, 2**bits - 1
    zeros, scales = (torch.empty(len(weight), num_groups) for _ in range(2))
    values, meant = torch.empty_like(weight), torch.empty_like(weight)
    for group in range(num_groups):
        columns = groups == group
        low, high = weight[:, columns].amin(1), weight[:, columns].amax(1)
        scales[:, group] = ((high - low) / largest).half().float()
        zeros[:, group] = (-low / scales[:, group]).round().clamp(0, largest)
        scale, zero = scales[:, group, None], zeros[:, group, None]
        values[:, columns] = (weight[:, columns] / scale + zero).round().clamp(0, largest)
        meant[:, columns] = (values[:, columns] - zero) * scale
    return values.int(), zeros.int(), scales, meant


def as_int32(words: list[list[int]]) -> torch.Tensor:
    """Unsigned 32-bit words as the int32 tensor that holds the same bits."""
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def flip_first_bit(name: str) -> Callable[[Tensors], None]:
    """A change of one bit of a tensor."""

    def change(tensors: Tensors) -> None:
        tensors[name].view(-1).view(torch.uint8)[0] ^= 1

    return change


def packed_words(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """Columns of [rows, columns] in 32-bit words, the lowest bits first; the last word is filled with zeros."""
    rows, columns = matrix.shape
    per_word = 32 // bits
    words = [[0] * math.ceil(columns / per_word) for _ in range(rows)]
    for row, values in enumerate(matrix.tolist()):
        for column, value in enumerate(values):
            words[row][column // per_word] |= value << (bits * (column % per_word))
    return as_int32(words)
