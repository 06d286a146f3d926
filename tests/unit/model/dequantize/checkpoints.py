"""Tiny checkpoints in packed formats, each beside the plain model that it means, and a comparison of their tokens."""

from __future__ import annotations

import json
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
