"""FP8 checkpoints: the loaded weights are `value * scale`, and tokens are those of the model that they mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from baton.model.loading.config import DtypeChoice
from baton.model.loading.dequantize.fp8 import dequantize_blocks
from baton.model.loading.identity import checkpoint_root
from tests import tiny_models
from tests.unit.model.dequantize.checkpoints import (
    Pack,
    Tensors,
    assert_refused,
    assert_same_weights,
    assert_serves,
    changed_copy,
    loaded_weights,
    packed_copy,
)

BLOCK = (24, 40)
"""Divides none of the tiny models' matrices."""
LARGEST = 448.0
UP = "model.layers.0.mlp.up_proj"
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
WHOLE: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static"}


def is_linear(name: str) -> bool:
    return name.endswith("proj.weight") and "layers.1.self_attn" not in name


def in_blocks(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """Block by block, as section 3.3 of arXiv 2412.19437 has it."""
    if not is_linear(name):
        return None
    values, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    firsts = [range(0, size, side) for size, side in zip(weight.shape, BLOCK, strict=True)]
    scales = torch.empty([len(first) for first in firsts])
    for row, column in itertools.product(*firsts):
        place = slice(row, row + BLOCK[0]), slice(column, column + BLOCK[1])
        scale = weight[place].abs().max() / LARGEST
        values[place] = (weight[place] / scale).to(torch.float8_e4m3fn)
        meant[place] = values[place].float() * scale
        scales[row // BLOCK[0], column // BLOCK[1]] = scale
    return {name: values, f"{name}_scale_inv": scales}, meant


def as_a_whole(shape: Callable[[torch.Tensor], torch.Tensor], suffix: str) -> Pack:
    """A scale for the matrix or each row, by the shape that `shape` gives the rows' largest values."""

    def pack(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if not is_linear(name):
            return None
        scale = shape(weight.abs().amax(1, keepdim=True)) / LARGEST
        values = (weight / scale).to(torch.float8_e4m3fn)
        module = name.removesuffix(".weight")
        ignored = {f"{module}.input_scale": torch.tensor(0.3), f"{module}.k_scale": torch.tensor(7.0)}
        return {name: values, f"{name}{suffix}": scale, **ignored}, values.float() * scale

    return pack


WAYS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "blocks": (in_blocks, BLOCKS),
    "scalar": (as_a_whole(lambda rows: rows.max(), "_scale_inv"), WHOLE),
    "one": (as_a_whole(lambda rows: rows.max().reshape(1), "_scale"), WHOLE),
    "rows": (as_a_whole(lambda rows: rows, "_scale"), WHOLE),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def packed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_copy(llama, tmp_path_factory.mktemp("fp8"), in_blocks, BLOCKS)[0]


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_values_times_scales(llama: Path, tmp_path: Path, way: str) -> None:
    assert_same_weights(*packed_copy(llama, tmp_path, *WAYS[way]))


@pytest.mark.parametrize(("family", "way"), [("llama", "rows"), ("qwen3_moe", "blocks"), ("mistral", "scalar")])
def test_tokens_are_those_of_the_model_that_is_meant(family: str, way: str, tmp_path: Path) -> None:
    source = tiny_models.save_random_model(family, tmp_path / "source")
    assert_serves(*packed_copy(source, tmp_path, *WAYS[way]))


def test_a_deepseek_v3_with_a_layer_for_drafts_is_served(tmp_path: Path) -> None:
    """Latent attention, experts one by one, routers and norms that are not converted, and a layer that is not used."""
    shape = tiny_models.small_shape(num_hidden_layers=2, num_key_value_heads=4, head_dim=8)
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    config = DeepseekV3Config(**shape, **latent, **experts, n_group=1, topk_group=1, n_shared_experts=1)
    source = tiny_models.save_random_config(config, tmp_path / "source")
    packed, plain = packed_copy(source, tmp_path, in_blocks, BLOCKS)
    values = torch.zeros(48, 40, dtype=torch.float8_e4m3fn)

    def add_drafts(tensors: Tensors) -> None:
        tensors["model.layers.2.eh_proj.weight"] = values
        tensors["model.layers.2.eh_proj.weight_scale_inv"] = torch.ones(2, 1)

    with_drafts = changed_copy(packed, tmp_path / "drafts", add_drafts)
    assert_same_weights(with_drafts, plain)
    assert_serves(with_drafts, plain)


def test_experts_in_one_tensor_have_blocks_of_their_own() -> None:
    values, scales = torch.randn(3, 50, 70).to(torch.float8_e4m3fn), torch.rand(3, 3, 2) + 0.5
    ours = dequantize_blocks(values, scales, (24, 40))
    for expert, row, column in itertools.product(range(3), range(50), range(70)):
        assert (
            ours[expert, row, column] == values[expert, row, column].float() * scales[expert, row // 24, column // 40]
        )


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_agree_with_transformers_dequantizer(scale_dtype: torch.dtype) -> None:
    """Which takes the block's size from the shapes, and so knows whole blocks only."""
    values = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = (torch.rand(2, 3) + 0.1).to(scale_dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=torch.float32)
    assert torch.equal(dequantize_blocks(values, scales, (128, 128)), theirs)


def test_weights_are_rounded_once_into_the_served_dtype(llama: Path, tmp_path: Path) -> None:
    packed, plain = packed_copy(llama, tmp_path, in_blocks, BLOCKS)
    ours, wanted = loaded_weights(packed, DtypeChoice.BFLOAT16), loaded_weights(plain)
    assert all(torch.equal(ours[name], wanted[name].bfloat16()) for name in wanted)


def test_modules_that_are_not_converted_stay_as_they_are(llama: Path, packed: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(loaded_weights(packed)[name], loaded_weights(llama)[name])


def test_values_and_scales_are_part_of_the_identity(packed: Path, tmp_path: Path) -> None:
    def other(name: str) -> Callable[[Tensors], None]:
        def change(tensors: Tensors) -> None:
            tensors[name].view(torch.uint8).view(-1)[0] ^= 1

        return change

    copies = [
        changed_copy(packed, tmp_path / str(number), other(name))
        for number, name in enumerate((f"{UP}.weight", f"{UP}.weight_scale_inv"))
    ]
    assert len({checkpoint_root(directory) for directory in (packed, *copies)}) == 3


def without_scale(tensors: Tensors) -> None:
    del tensors[f"{UP}.weight_scale_inv"]


def scale_too_narrow(tensors: Tensors) -> None:
    tensors[f"{UP}.weight_scale_inv"] = tensors[f"{UP}.weight_scale_inv"][:, :-1]


def scale_of_bytes(tensors: Tensors) -> None:
    tensors[f"{UP}.weight_scale_inv"] = tensors[f"{UP}.weight_scale_inv"].to(torch.uint8)


def two_scales(tensors: Tensors) -> None:
    tensors[f"{UP}.weight_scale"] = torch.ones(1)


def plain_weight(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].float()


def scale_of_nothing(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.other.weight_scale"] = torch.ones(1)


def bytes_for_values(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].view(torch.int8)
    del tensors[f"{UP}.weight_scale_inv"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_scale, f"{UP}.weight is stored as F8_E4M3 with no scale"),
        (two_scales, f"{UP}.weight is stored as F8_E4M3 with two scales"),
        (scale_too_narrow, rf"{UP}.weight_scale_inv has shape \[4, 1\], and its weight needs \[4, 2\]"),
        (scale_of_bytes, f"{UP}.weight_scale_inv is stored as U8, and not as F32 or"),
        (plain_weight, f"{UP}.weight_scale_inv belongs to no weight that is stored as fp8"),
        (scale_of_nothing, "other.weight_scale belongs to no weight that is stored as fp8"),
        (bytes_for_values, f"{UP}.weight is stored as I8, which is not supported"),
    ],
)
def test_damaged_checkpoints_are_refused(packed: Path, tmp_path: Path, change: Callable[..., None], words: str) -> None:
    assert_refused(changed_copy(packed, tmp_path / "changed", change), words)


@pytest.mark.parametrize("block", [128, [128], [128, 0], ["a", "b"], [128, 128, 1]])
def test_a_block_has_two_sides(packed: Path, tmp_path: Path, block: Any) -> None:
    wrong = changed_copy(packed, tmp_path / "changed", lambda tensors: None, weight_block_size=block)
    assert_refused(wrong, "is not two positive numbers")
