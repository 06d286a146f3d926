"""AWQ checkpoints: weights are `(value - zero) * scale` in AutoAWQ's order, and tokens are the meant model's."""

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
    as_int32,
    assert_refused,
    assert_same_weights,
    assert_serves,
    changed_copy,
    flip_first_bit,
    packed_copy,
    quantize_rows,
)

GROUP = 32
UP = "model.layers.0.mlp.up_proj"
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
PUBLISHED_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in each field of a word, from the lowest bits (AutoAWQ, `WQLinear_GEMM`)."""


def words_of(matrix: torch.Tensor) -> torch.Tensor:
    """Each 8 columns of [rows, columns] in one word, one bit shift after the other."""
    rows, columns = matrix.shape
    words = [[0] * (columns // 8) for _ in range(rows)]
    for row in range(rows):
        for column in range(columns // 8):
            for field, output in enumerate(PUBLISHED_ORDER):
                words[row][column] |= int(matrix[row, 8 * column + output]) << (4 * field)
    return as_int32(words)


def pack(group_size: int) -> Pack:
    def pack_module(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if not name.endswith("proj.weight"):
            return None
        size = weight.shape[1] if group_size == -1 else group_size
        values, zeros, scales, meant = quantize_rows(weight, 4, torch.arange(weight.shape[1]) // size)
        module = name.removesuffix(".weight")
        stored = {"qweight": words_of(values.t()), "qzeros": words_of(zeros.t()), "scales": scales.t().half()}
        return {f"{module}.{part}": tensor for part, tensor in stored.items()}, meant

    return pack_module


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def both(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return packed_copy(llama, tmp_path_factory.mktemp("awq"), pack(GROUP), AWQ)


@pytest.fixture(scope="module")
def packed(both: tuple[Path, Path]) -> Path:
    return both[0]


def test_tokens_are_those_of_the_model_that_is_meant(both: tuple[Path, Path]) -> None:
    assert_same_weights(*both)
    assert_serves(*both)


@pytest.mark.parametrize("group_size", [40, -1])
def test_groups_may_be_cut_off_or_whole_rows(llama: Path, tmp_path: Path, group_size: int) -> None:
    assert_same_weights(*packed_copy(llama, tmp_path, pack(group_size), AWQ | {"group_size": group_size}))


def test_the_older_names_of_parameters_are_known(packed: Path, tmp_path: Path) -> None:
    older = changed_copy(packed, tmp_path / "older", lambda tensors: None, bits=4, w_bit=4, q_group_size=GROUP)
    assert_same_weights(older, packed)


def test_values_zeros_and_scales_are_part_of_the_identity(packed: Path, tmp_path: Path) -> None:
    copies = [
        changed_copy(packed, tmp_path / part, flip_first_bit(f"{UP}.{part}"))
        for part in ("qweight", "qzeros", "scales")
    ]
    assert len({checkpoint_root(directory) for directory in (packed, *copies)}) == 4


def without_zeros(tensors: Tensors) -> None:
    del tensors[f"{UP}.qzeros"]


def without_values(tensors: Tensors) -> None:
    del tensors[f"{UP}.qweight"]


def scales_of_other_groups(tensors: Tensors) -> None:
    tensors[f"{UP}.scales"] = tensors[f"{UP}.scales"].repeat(2, 1)


def flat_values(tensors: Tensors) -> None:
    tensors[f"{UP}.qweight"] = tensors[f"{UP}.qweight"].flatten()


def group_indices(tensors: Tensors) -> None:
    tensors[f"{UP}.g_idx"] = torch.zeros(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_zeros, f"{UP}.qzeros is missing"),
        (without_values, f"{UP}.qzeros belongs to no weight that is stored as awq"),
        (scales_of_other_groups, rf"{UP}.scales has shape \[4, 96\], and its weight needs \[2, 96\]"),
        (flat_values, f"{UP}.qweight has shape .* and is no matrix"),
        (group_indices, f"{UP}.g_idx belongs to a weight"),
    ],
)
def test_damaged_checkpoints_are_refused(packed: Path, tmp_path: Path, change: Callable[..., None], words: str) -> None:
    assert_refused(changed_copy(packed, tmp_path / "changed", change), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 3}, "awq: bits 3 is not supported; supported: 4"),
        ({"version": "gemv"}, "awq: version 'gemv' is not supported; supported: gemm"),
        ({"zero_point": False}, "zero_point False is not supported"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": "128"}, "group_size '128'"),
    ],
)
def test_other_parameters_are_refused(packed: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert_refused(changed_copy(packed, tmp_path / "changed", lambda tensors: None, **changes), words)
