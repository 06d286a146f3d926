"""MXFP4 checkpoints of gpt-oss: experts are e2m1 times a power of two, and tokens are those of the model they mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.model.errors import UnsupportedModel
from baton.model.loading.config import DtypeChoice
from baton.model.loading.dequantize.mxfp4 import dequantize_experts
from baton.model.loading.identity import checkpoint_root
from baton.model.loading.loader import load_model
from tests import tiny_models
from tests.unit.model.dequantize.checkpoints import (
    Tensors,
    assert_refused,
    assert_same_weights,
    assert_serves,
    changed_copy,
    loaded_weights,
    packed_copy,
)

EXPERTS = "model.layers.0.mlp.experts"
UP = f"{EXPERTS}.gate_up_proj"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def e2m1(code: int) -> float:
    """A sign, two bits of exponent with bias 1 (zero is subnormal) and one of mantissa (OCP MX 1.0, section 5.3.3)."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(size, -1 if code & 8 else 1)


VALUES = torch.tensor([e2m1(code) for code in range(16)])


def pack_experts(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
    """Groups of 32 inputs share 2 ** (floor(log2(largest)) - 2)."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return None
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    codes = (groups.unsqueeze(-1) / exponents.exp2()[..., None, None] - VALUES).abs().argmin(-1)
    meant = VALUES[codes] * exponents.exp2().unsqueeze(-1)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    stored = {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}
    return stored, meant.flatten(-2).transpose(1, 2)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    source = tiny_models.save_random_model("gpt_oss", tmp_path_factory.mktemp("source"))
    return packed_copy(source, tmp_path_factory.mktemp("mxfp4"), pack_experts, MXFP4)


@pytest.fixture(scope="module")
def packed(both: tuple[Path, Path]) -> Path:
    return both[0]


def test_tokens_are_those_of_the_model_that_is_meant(both: tuple[Path, Path]) -> None:
    assert_same_weights(*both)
    assert_serves(*both)


def test_bfloat16_holds_every_value_exactly(both: tuple[Path, Path]) -> None:
    ours = loaded_weights(both[0], DtypeChoice.BFLOAT16)[UP]
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours.float(), loaded_weights(both[1])[UP])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_agrees_with_transformers(dtype: torch.dtype) -> None:
    """All 256 bytes of values, under scales from 2 ** -60 to 2 ** 60."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(2 * 3 * 5).view(2, 48, 5, 16)
    scales = torch.randint(67, 188, (2, 48, 5), dtype=torch.uint8)
    ours, theirs = dequantize_experts(blocks, scales, dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert ours.shape == (2, 160, 48)
    assert torch.equal(ours, theirs)


def test_the_ends_of_the_scale_are_a_tiny_number_and_nan() -> None:
    blocks = torch.full((1, 2, 1, 16), 0x22, dtype=torch.uint8)
    weight = dequantize_experts(blocks, torch.tensor([[[0], [255]]], dtype=torch.uint8), torch.float32)
    assert weight[0, 0, 0] == 2.0**-127
    assert weight[0, :, 1].isnan().all()


def test_a_scale_that_is_not_a_number_is_not_served(packed: Path, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{UP}_scales"][:] = 255

    with pytest.raises(UnsupportedModel, match="differ"):
        load_model(changed_copy(packed, tmp_path / "changed", spoil))


def test_blocks_and_scales_are_part_of_the_identity(packed: Path, tmp_path: Path) -> None:
    def other(name: str) -> Callable[[Tensors], None]:
        def change(tensors: Tensors) -> None:
            tensors[name].view(-1)[0] ^= 1

        return change

    copies = [changed_copy(packed, tmp_path / part, other(f"{UP}_{part}")) for part in ("blocks", "scales")]
    assert len({checkpoint_root(directory) for directory in (packed, *copies)}) == 3


def without_scales(tensors: Tensors) -> None:
    del tensors[f"{UP}_scales"]


def without_blocks(tensors: Tensors) -> None:
    del tensors[f"{UP}_blocks"]


def scales_too_narrow(tensors: Tensors) -> None:
    tensors[f"{UP}_scales"] = tensors[f"{UP}_scales"][..., :-1]


def blocks_too_narrow(tensors: Tensors) -> None:
    tensors[f"{UP}_blocks"] = tensors[f"{UP}_blocks"][..., :-1]


def flat_blocks(tensors: Tensors) -> None:
    tensors[f"{UP}_blocks"] = tensors[f"{UP}_blocks"].flatten(2)


def blocks_of_another_module(tensors: Tensors) -> None:
    tensors["lm_head.weight_blocks"] = torch.zeros(4, 4, 2, 16, dtype=torch.uint8)


def plain_weight_too(tensors: Tensors) -> None:
    tensors[UP] = torch.ones(4, 64, 192)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_scales, f"{UP}_scales is missing"),
        (without_blocks, f"{UP}_scales belongs to no weight that is stored as mxfp4"),
        (scales_too_narrow, rf"{UP}_scales has shape \[4, 192, 1\], and its weight needs \[4, 192, 2\]"),
        (blocks_too_narrow, rf"{UP}_blocks has shape \[4, 192, 2, 15\], and its weight needs \[4, 192, 2, 16\]"),
        (flat_blocks, f"{UP}_blocks has shape .* and not .experts, outputs"),
        (blocks_of_another_module, "lm_head.weight_blocks is no gate_up_proj or down_proj"),
        (plain_weight_too, f"{UP} is there twice"),
    ],
)
def test_damaged_checkpoints_are_refused(packed: Path, tmp_path: Path, change: Callable[..., None], words: str) -> None:
    assert_refused(changed_copy(packed, tmp_path / "changed", change), words)
