"""Checkpoints whose stored weights are not what the architecture computes with are refused, never served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.config import read_config
from baton.model.loading.dequantize.fp8 import Fp8Format
from baton.model.loading.dequantize.methods import METHODS
from baton.model.loading.hf_weights import load_weights
from tests import tiny_models

Tensors = dict[str, torch.Tensor]
PROJECTION = "model.layers.0.mlp.up_proj"
NAMES = {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes", "modelopt", "no-such-method"}
"""Every registered name, and others that configs have."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("llama", tmp_path_factory.mktemp("llama"))


def copy_of(source: Path, directory: Path, change: Callable[[Tensors], None], **config: Any) -> Path:
    """The checkpoint with changed tensors and config fields."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def unchanged(tensors: Tensors) -> None:
    pass


def quantize_and_scale(tensors: Tensors) -> None:
    """Weights as float8 with a scale each, as FP8 checkpoints have them."""
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.reshape(1)


def load(directory: Path) -> None:
    load_weights(read_config(directory))


@pytest.mark.parametrize("method", sorted(NAMES - METHODS.keys()))
def test_other_quantization_methods_are_refused_by_name(llama: Path, tmp_path: Path, method: str):
    directory = copy_of(llama, tmp_path, unchanged, quantization_config={"quant_method": method})
    words = f'^quant_method "{method}" is not supported; supported: {", ".join(sorted(METHODS))}$'
    with pytest.raises(UnsupportedModel, match=words):
        read_config(directory)


def test_every_supported_method_is_one_of_transformers():
    """Those have a dequantiser, and a test of their own beside this folder."""
    assert METHODS.keys() <= AUTO_QUANTIZATION_CONFIG_MAPPING.keys()
    for method in METHODS:
        assert (Path(__file__).parents[1] / "dequantize" / f"test_{method.partition('-')[0]}.py").is_file()


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"bits": 4}},
        {"quantization_config": "fp8"},
        {"compression_config": {"quant_method": "hqq"}},
        {"text_config": {"quantization_config": {"quant_method": "hqq"}}},
        {"quantization_config": {"quant_method": ["fp8"]}},
    ],
)
def test_a_method_is_found_wherever_a_config_has_it(llama: Path, tmp_path: Path, config: dict[str, Any]):
    with pytest.raises(UnsupportedModel, match="is not supported; supported: "):
        read_config(copy_of(llama, tmp_path, unchanged, **config))


def test_two_methods_in_a_config_are_refused(llama: Path, tmp_path: Path):
    fp8, blocks = {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [128, 128]}
    same = copy_of(llama, tmp_path, unchanged, quantization_config=fp8, draft={"quantization_config": fp8})
    assert read_config(same).weight_format == Fp8Format(None)
    with pytest.raises(UnsupportedModel, match="two different"):
        read_config(copy_of(llama, tmp_path, unchanged, quantization_config=fp8, compression_config=blocks))


def test_an_empty_method_is_none(llama: Path, tmp_path: Path):
    load(copy_of(llama, tmp_path, unchanged, quantization_config=None))


def test_float8_weights_without_a_method_are_refused(llama: Path, tmp_path: Path):
    """transformers loads them without their scales, and its own model agrees with the wrong result."""
    with pytest.raises(UnsupportedModel, match="is stored as F8_E4M3, which is not supported"):
        load(copy_of(llama, tmp_path, quantize_and_scale))


def scale_beside(tensors: Tensors) -> None:
    tensors[f"{PROJECTION}.weight_scale"] = torch.ones(1)


def bias_without_a_place(tensors: Tensors) -> None:
    tensors[f"{PROJECTION}.bias"] = torch.ones(tensors[f"{PROJECTION}.weight"].shape[0])


def scale_of_an_inner_name(tensors: Tensors) -> None:
    tensors[f"{PROJECTION}.inner.scale"] = torch.ones(1)


@pytest.mark.parametrize("change", [scale_beside, bias_without_a_place, scale_of_an_inner_name])
def test_a_tensor_that_belongs_to_a_weight_is_not_left_out(llama: Path, tmp_path: Path, change: Callable[..., None]):
    with pytest.raises(UnsupportedModel, match="belongs to a weight"):
        load(copy_of(llama, tmp_path, change))


def frequencies(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def tower(tensors: Tensors) -> None:
    tensors["vision_tower.layers.0.weight"] = torch.ones(4, 4)


def further_layer(tensors: Tensors) -> None:
    tensors["model.layers.99.mlp.up_proj.weight"] = torch.ones(4, 4)


def mask(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)


@pytest.mark.parametrize("change", [frequencies, tower, further_layer, mask])
def test_harmless_tensors_are_left_out(llama: Path, tmp_path: Path, change: Callable[..., None]):
    load(copy_of(llama, tmp_path, change))


def test_a_stored_head_of_tied_embeddings_is_no_foreign_tensor(llama: Path, tmp_path: Path):
    def tie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    load(copy_of(llama, tmp_path, tie, tie_word_embeddings=True))


def test_files_beside_the_index_are_not_read(llama: Path, tmp_path: Path):
    """Some repositories hold the same weights a second time, for another program."""
    directory = copy_of(llama, tmp_path, quantize_and_scale)
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    save_file(load_file(llama / "model.safetensors"), directory / "part.safetensors", metadata={"format": "pt"})
    weights = dict.fromkeys(load_file(llama / "model.safetensors"), "part.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    load(directory)
    index.write_text("[]")
    with pytest.raises(UnreadableModel, match="is no index"):
        load(directory)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_file_without_a_header_is_told(llama: Path, tmp_path: Path, content: bytes):
    directory = copy_of(llama, tmp_path, unchanged)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableModel, match="is no safetensors file"):
        load(directory)
