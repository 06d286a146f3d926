"""compressed-tensors: float, integer and packed weights, in every strategy, symmetric and not; others refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from baton.model.loading.identity import checkpoint_root
from tests import tiny_models
from tests.unit.model.dequantize.checkpoints import (
    Pack,
    Tensors,
    assert_refused,
    assert_same_weights,
    assert_serves,
    changed_copy,
    flip_first_bit,
    loaded_weights,
    packed_copy,
    packed_words,
    quantize_rows,
)

GROUP = 32
BLOCK = (40, 24)
UP = "model.layers.0.mlp.up_proj"


def group_of(layout: str, strategy: str, bits: int = 8, **weights: Any) -> dict[str, Any]:
    """A config group for all linear layers."""
    kind = "float" if layout.startswith("float") else "int"
    sides: dict[str, dict[str, Any]] = {"group": {"group_size": GROUP}, "block": {"block_structure": list(BLOCK)}}
    scheme: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    return {"targets": ["Linear"], "weights": scheme | sides.get(strategy, {}) | weights, "input_activations": None}


def config(layout: str, strategy: str, bits: int = 8, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_of(layout, strategy, bits, **weights)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def places(shape: torch.Size, strategy: str) -> list[tuple[slice, slice, tuple[int, int]]]:
    """What shares a scale, and the scale's place."""
    sides = {"tensor": tuple(shape), "channel": (1, shape[1]), "group": (1, GROUP), "block": BLOCK}[strategy]
    rows, columns = (
        [slice(i, i + side) for i in range(0, size, side)] for size, side in zip(shape, sides, strict=True)
    )
    return [(row, column, (i, j)) for i, row in enumerate(rows) for j, column in enumerate(columns)]


def unpacked(strategy: str, dtype: torch.dtype) -> Pack:
    """Symmetric float8 or int8 values."""
    largest = 448 if dtype.is_floating_point else 127

    def pack_module(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if not name.endswith("proj.weight"):
            return None
        cells = places(weight.shape, strategy)
        scales = torch.empty(cells[-1][2][0] + 1, cells[-1][2][1] + 1)
        values, meant = torch.empty(weight.shape, dtype=dtype), torch.empty_like(weight)
        for row, column, place in cells:
            scales[place] = (weight[row, column].abs().max() / largest).bfloat16().float()
            scaled = weight[row, column] / scales[place]
            values[row, column] = (scaled if dtype.is_floating_point else scaled.round().clamp(-128, 127)).to(dtype)
            meant[row, column] = values[row, column].float() * scales[place]
        if strategy == "tensor":
            scales = scales.reshape(1)
        module = name.removesuffix(".weight")
        return {name: values, f"{name}_scale": scales.bfloat16(), f"{module}.input_scale": torch.ones(1)}, meant

    return pack_module


def asymmetric(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """int8 values and zero points of each output."""
    if not name.endswith("proj.weight"):
        return None
    values, zeros, scales, meant = quantize_rows(weight, 8, torch.zeros(weight.shape[1], dtype=torch.int64))
    stored = {
        name: (values - 128).to(torch.int8),
        f"{name}_scale": scales,
        f"{name}_zero_point": (zeros - 128).to(torch.int8),
    }
    return stored, meant


def packed(bits: int, strategy: str, *, symmetric: bool = True, shuffled: bool = False) -> Pack:
    """Integers in words: signed values plus half the range, as `pack_to_int32` of compressed-tensors does it."""

    def pack_module(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if not name.endswith("proj.weight"):
            return None
        rows, columns = weight.shape
        groups = torch.arange(columns) // (GROUP if strategy == "group" else columns)
        if shuffled:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        values, zeros, scales, meant = quantize_rows(weight, bits, groups)
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
            meant = (values - zeros[:, groups]) * scales[:, groups]
        stored = {
            "weight_packed": packed_words(values, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            stored["weight_zero_point"] = packed_words(zeros.t(), bits).t()
        if shuffled:
            stored["weight_g_idx"] = groups.int()
        module = name.removesuffix(".weight")
        return {f"{module}.{part}": tensor for part, tensor in stored.items()}, meant

    return pack_module


FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
WAYS: dict[str, tuple[Pack, dict[str, Any]]] = {
    **{
        f"float-{strategy}": (unpacked(strategy, FLOAT8), config("float-quantized", strategy))
        for strategy in ("tensor", "channel", "group", "block")
    },
    **{
        f"int-{strategy}": (unpacked(strategy, INT8), config("int-quantized", strategy))
        for strategy in ("tensor", "channel", "group")
    },
    "int-asymmetric": (asymmetric, config("int-quantized", "channel", symmetric=False)),
    "naive": (unpacked("channel", INT8), config("naive-quantized", "channel")),
    **{
        f"w{bits}a16-{strategy}{'' if symmetric else '-asymmetric'}": (
            packed(bits, strategy, symmetric=symmetric),
            config("pack-quantized", strategy, bits, symmetric=symmetric),
        )
        for bits in (4, 8)
        for strategy in ("channel", "group")
        for symmetric in (True, False)
    },
    "w4a16-actorder": (packed(4, "group", shuffled=True), config("pack-quantized", "group", 4, actorder="group")),
}  # fmt: skip
SERVED = ("float-channel", "int-asymmetric", "w4a16-group-asymmetric", "w4a16-actorder")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With sizes that fill no word, no group and no block."""
    shape = tiny_models.small_shape(hidden_size=60, intermediate_size=71, num_hidden_layers=2)
    return tiny_models.save_random_config(LlamaConfig(**shape), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_what_is_meant(llama: Path, tmp_path: Path, way: str) -> None:
    assert_same_weights(*packed_copy(llama, tmp_path, *WAYS[way]))


@pytest.mark.parametrize("way", SERVED)
def test_tokens_are_those_of_the_model_that_is_meant(llama: Path, tmp_path: Path, way: str) -> None:
    assert_serves(*packed_copy(llama, tmp_path, *WAYS[way]))


def test_config_groups_are_chosen_by_target(llama: Path, tmp_path: Path) -> None:
    """A module's name, a pattern or the end of a name come before the class."""
    four, eight, whole = packed(4, "group"), packed(8, "channel"), unpacked("tensor", FLOAT8)

    def pack_module(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        return (whole if "down_proj" in name else eight if "self_attn" in name else four)(name, weight)

    mixed = config("mixed-precision", "tensor")
    mixed["config_groups"] = {
        "group_0": group_of("pack-quantized", "group", 4) | {"format": "pack-quantized"},
        "group_1": group_of("pack-quantized", "channel", 8)
        | {"format": "pack-quantized", "targets": ["re:.*self_attn.*"]},
        "group_2": group_of("float-quantized", "tensor") | {"format": "float-quantized", "targets": ["down_proj"]},
    }
    assert_same_weights(*packed_copy(llama, tmp_path, pack_module, mixed))


@pytest.fixture(scope="module")
def words(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_copy(llama, tmp_path_factory.mktemp("words"), *WAYS["w4a16-group-asymmetric"])[0]


@pytest.fixture(scope="module")
def float8(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_copy(llama, tmp_path_factory.mktemp("float8"), *WAYS["float-channel"])[0]


def test_every_part_is_in_the_identity(words: Path, tmp_path: Path) -> None:
    parts = ("weight_packed", "weight_scale", "weight_zero_point")
    copies = [changed_copy(words, tmp_path / part, flip_first_bit(f"{UP}.{part}")) for part in parts]
    assert len({checkpoint_root(directory) for directory in (words, *copies)}) == 4


def without(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{UP}.{part}"]

    return change


def narrow(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{UP}.{part}"] = tensors[f"{UP}.{part}"][..., :-1]

    return change


def other_shape(tensors: Tensors) -> None:
    tensors[f"{UP}.weight_shape"] = torch.tensor([71, 56])


def indices_out_of_range(tensors: Tensors) -> None:
    tensors[f"{UP}.weight_g_idx"] = torch.full((60,), 2, dtype=torch.int32)


def plain_too(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = torch.ones(71, 60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("weight_scale"), f"{UP}.weight_scale is missing"),
        (without("weight_zero_point"), f"{UP}.weight_zero_point is missing"),
        (without("weight_shape"), f"{UP}.weight_shape is missing"),
        (without("weight_packed"), f"{UP}.weight_scale belongs to no weight that is stored as compressed-tensors"),
        (narrow("weight_scale"), rf"{UP}.weight_scale has shape \[71, 1\], and its weight needs \[71, 2\]"),
        (narrow("weight_zero_point"), rf"{UP}.weight_zero_point has shape \[9, 1\], and its weight needs \[9, 2\]"),
        (narrow("weight_shape"), rf"{UP}.weight_shape has shape \[1\], and its weight needs \[2\]"),
        (other_shape, rf"{UP}.weight do not fit: its weight_shape is \[71, 56\]"),
        (indices_out_of_range, f"{UP}.weight do not fit: g_idx names group 2, and there are 2"),
        (plain_too, f"{UP}.weight is there twice"),
    ],
)
def test_damaged_words_are_refused(words: Path, tmp_path: Path, change: Callable[..., None], message: str) -> None:
    assert_refused(changed_copy(words, tmp_path / "changed", change), message)


def as_bytes(tensors: Tensors) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].view(INT8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("weight_scale"), f"{UP}.weight_scale is missing"),
        (without("weight"), f"{UP}.weight_scale belongs to no weight that is stored as compressed-tensors"),
        (as_bytes, f"{UP}.weight is stored as I8, and not as F8_E4M3"),
    ],
)
def test_damaged_values_are_refused(float8: Path, tmp_path: Path, change: Callable[..., None], message: str) -> None:
    assert_refused(changed_copy(float8, tmp_path / "changed", change), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "group_0: format 'nvfp4-pack-quantized' is not supported; supported: "),
        ({"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ({"format": None}, "format None is not supported"),
        ({"quantization_status": "frozen"}, "status 'frozen'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity 'sparse-24-bitmask'"),
        ({"transform_config": {"R1": {}}}, "transforms"),
        ({"config_groups": {}}, "config_groups is missing"),
        ({"config_groups": {"g": {"weights": None}}}, "g has no weights"),
        ({"config_groups": {"g": group_of("pack-quantized", "group", 3)}}, "g: num_bits 3 is not supported"),
        ({"config_groups": {"g": group_of("pack-quantized", "tensor", 4)}}, "strategy 'tensor'"),
        ({"config_groups": {"g": group_of("pack-quantized", "group", 4, group_size=12)}}, "group of 12"),
        ({"config_groups": {"g": group_of("pack-quantized", "group", 4, group_size=None)}}, "no size of a group"),
        ({"config_groups": {"g": group_of("float-quantized", "channel")}}, "g: type 'float' is not supported"),
        ({"config_groups": {"g": group_of("pack-quantized", "group", 4) | {"targets": ["re:("]}}}, "expression"),
        ({"config_groups": {"g": group_of("pack-quantized", "group", 4) | {"targets": ["x"]}}}, "no config group"),
    ],
)  # fmt: skip
def test_other_variants_are_refused(words: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert_refused(changed_copy(words, tmp_path / "changed", lambda tensors: None, **changes), message)


def test_ignored_modules_stay_as_they_are(llama: Path, words: Path) -> None:
    assert torch.equal(loaded_weights(words)["lm_head.weight"], loaded_weights(llama)["lm_head.weight"])
