"""GPTQ checkpoints: both versions of zero points, groups in order and by activation, 2, 4 and 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
    packed_copy,
    packed_words,
    quantize_rows,
)

GROUP = 32
UP = "model.layers.0.mlp.up_proj"


def config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, **more}


def pack(bits: int = 4, group_size: int = GROUP, *, shuffled: bool = False, zero_offset: int = 1) -> Pack:
    """`zero_offset`: what the version of the format subtracts from a zero point before it is stored."""

    def pack_module(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if not name.endswith("proj.weight"):
            return None
        num_inputs = weight.shape[1]
        groups = torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
        if shuffled:
            groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))]
        values, zeros, scales, meant = quantize_rows(weight, bits, groups)
        module = name.removesuffix(".weight")
        stored = {
            "qweight": packed_words(values, bits).t(),
            "qzeros": packed_words((zeros.t() - zero_offset) % 2**bits, bits),
            "scales": scales.t().half(),
            "g_idx": groups.int(),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return {f"{module}.{part}": tensor for part, tensor in stored.items()}, meant

    return pack_module


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def packed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_copy(llama, tmp_path_factory.mktemp("gptq"), pack(), config())[0]


def test_tokens_by_activation_order_are_the_meant_models(llama: Path, tmp_path: Path) -> None:
    both = packed_copy(llama, tmp_path, pack(shuffled=True), config(desc_act=True))
    assert_same_weights(*both)
    assert_serves(*both)


def test_tokens_of_the_second_version_are_the_meant_models(llama: Path, tmp_path: Path) -> None:
    both = packed_copy(llama, tmp_path, pack(zero_offset=0), config(checkpoint_format="gptq_v2"))
    assert_same_weights(*both)
    assert_serves(*both)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [48, -1])
def test_all_widths_and_group_sizes(llama: Path, tmp_path: Path, bits: int, group_size: int) -> None:
    packing = pack(bits, group_size)
    assert_same_weights(*packed_copy(llama, tmp_path, packing, config(bits=bits, group_size=group_size)))


def test_without_indices_groups_are_in_order(packed: Path, tmp_path: Path) -> None:
    def without_indices(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    assert_same_weights(changed_copy(packed, tmp_path / "changed", without_indices), packed)


def test_the_version_changes_the_weights(packed: Path, tmp_path: Path) -> None:
    other = changed_copy(packed, tmp_path / "changed", lambda tensors: None, checkpoint_format="gptq_v2")
    with pytest.raises(AssertionError, match="proj"):
        assert_same_weights(other, packed)


def test_values_zeros_scales_and_indices_are_part_of_the_identity(packed: Path, tmp_path: Path) -> None:
    parts = ("qweight", "qzeros", "scales", "g_idx")
    copies = [changed_copy(packed, tmp_path / part, flip_first_bit(f"{UP}.{part}")) for part in parts]
    assert len({checkpoint_root(directory) for directory in (packed, *copies)}) == 5


def without_scales(tensors: Tensors) -> None:
    del tensors[f"{UP}.scales"]


def without_values(tensors: Tensors) -> None:
    del tensors[f"{UP}.qweight"]


def indices_of_other_inputs(tensors: Tensors) -> None:
    tensors[f"{UP}.g_idx"] = tensors[f"{UP}.g_idx"][:-8]


def zeros_of_other_outputs(tensors: Tensors) -> None:
    tensors[f"{UP}.qzeros"] = tensors[f"{UP}.qzeros"][:, :-1]


def group_that_does_not_exist(tensors: Tensors) -> None:
    tensors[f"{UP}.g_idx"][0] = 2


def negative_group(tensors: Tensors) -> None:
    tensors[f"{UP}.g_idx"][0] = -1


def bias_that_counts(tensors: Tensors) -> None:
    tensors[f"{UP}.bias"][0] = 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_scales, f"{UP}.scales is missing"),
        (without_values, f"{UP}.g_idx belongs to no weight that is stored as gptq"),
        (indices_of_other_inputs, rf"{UP}.g_idx has shape \[56\], and its weight needs \[64\]"),
        (zeros_of_other_outputs, rf"{UP}.qzeros has shape \[2, 11\], and its weight needs \[2, 12\]"),
        (group_that_does_not_exist, f"the tensors of {UP}.weight do not fit: g_idx names group 2"),
        (negative_group, f"the tensors of {UP}.weight do not fit: g_idx names group -1"),
        (bias_that_counts, f"{UP}.bias belongs to a weight"),
    ],
)
def test_damaged_checkpoints_are_refused(packed: Path, tmp_path: Path, change: Callable[..., None], words: str) -> None:
    assert_refused(changed_copy(packed, tmp_path / "changed", change), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 3}, "gptq: bits 3 is not supported; supported: 2, 4, 8"),
        ({"bits": None}, "gptq: bits None"),
        ({"bits": True}, "gptq: bits True"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2"),
        ({"dynamic": {"-:.*down.*": {}}}, "dynamic"),
        ({"group_size": 0}, "group_size 0"),
    ],
)
def test_other_parameters_are_refused(packed: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert_refused(changed_copy(packed, tmp_path / "changed", lambda tensors: None, **changes), words)
