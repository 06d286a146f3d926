"""The check of equal bits finds what it is for: native kernels keep them, and a decoder that does not is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.model.attention.base import StepMetadata
from baton.model.attention.native_backend import NativeAttention
from baton.model.decoders.base import Decoder
from baton.model.loading.bit_check import TREE_PARENTS, check_bits
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.loading.self_check import VerificationBits
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.kernels import kernel_levels

native = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")


@native
@pytest.mark.parametrize("page_size", [16])
@pytest.mark.parametrize("dtype", [DtypeChoice.FLOAT32, DtypeChoice.BFLOAT16])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_native_kernels_keep_the_bits(tmp_path: Path, family: str, dtype: DtypeChoice, page_size: int):
    directory = tiny_models.save_random_model(family, tmp_path)
    assert check_bits(load_model(directory, dtype=dtype, page_size=page_size)) is VerificationBits.EXACT


class RoundingDecoder:
    """Moves the logits of one token by one unit in the last place, in segments of one size, or in trees only."""

    def __init__(self, decoder: Decoder, size: int, trees: bool = False) -> None:
        self._decoder = decoder
        self._size = size
        self._trees = trees

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata, keep: torch.Tensor
    ) -> torch.Tensor:
        logits = self._decoder.forward(input_ids, positions, step, keep).clone()
        for segment in step.segments:
            if segment.num_tokens == self._size and (segment.parents or not self._trees):
                last = logits[segment.offset + segment.num_tokens - 1]
                last[0] = torch.nextafter(last[0], last[0] + 1)
        return logits


@native
@pytest.mark.parametrize(("size", "trees"), [(1, False), (2, False), (7, False), (16, False), (16, True)])
def test_one_unit_in_the_last_place_is_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, trees: bool
):
    model = load_model(tiny_models.save_random_model("qwen3", tmp_path), kernels=KernelUse.AUTO)
    make = LoadedModel.decoder

    def rounding(self: LoadedModel, storage: PageStorage) -> RoundingDecoder:
        return RoundingDecoder(make(self, storage), size, trees)

    monkeypatch.setattr(LoadedModel, "decoder", rounding)
    assert check_bits(model) is VerificationBits.ROUNDING


@native
def test_a_tree_whose_nodes_see_their_siblings_is_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The mask of a tree is checked, not only its arithmetic."""
    model = load_model(tiny_models.save_random_model("qwen3", tmp_path), kernels=KernelUse.AUTO)
    assert check_bits(model) is VerificationBits.EXACT
    chain = tuple(range(-1, len(TREE_PARENTS) - 1))
    monkeypatch.setattr(NativeAttention, "begin", _with_parents(NativeAttention.begin, chain))
    assert check_bits(model) is VerificationBits.ROUNDING


def _with_parents(begin: Any, parents: tuple[int, ...]) -> Any:
    """`begin` of a backend, with other parents in place of a tree's."""

    def changed(self: NativeAttention, step: StepMetadata) -> None:
        segments = [replace(segment, parents=parents if segment.parents else ()) for segment in step.segments]
        begin(self, replace(step, segments=tuple(segments)))

    return changed


def test_a_model_without_trees_is_checked_without_one(tmp_path: Path):
    seen: list[bool] = []
    model = load_model(tiny_models.save_random_model("gemma2", tmp_path))
    make = LoadedModel.decoder

    class Watched(RoundingDecoder):
        def forward(self, input_ids, positions, step, keep):
            seen.append(step.has_trees)
            return super().forward(input_ids, positions, step, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedModel, "decoder", lambda self, storage: Watched(make(self, storage), 0))
        check_bits(model)
    assert not any(seen)


def test_the_checked_tokens_lie_behind_the_windows(tmp_path: Path):
    seen: list[Sequence[int]] = []
    model = load_model(tiny_models.save_random_model("gemma2", tmp_path))
    make = LoadedModel.decoder

    class Watched(RoundingDecoder):
        def forward(self, input_ids, positions, step, keep):
            seen.append([segment.start for segment in step.segments])
            return super().forward(input_ids, positions, step, keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadedModel, "decoder", lambda self, storage: Watched(make(self, storage), 0))
        check_bits(replace(model))
    assert len(set(seen[-1])) == 1
    assert seen[-1][0] > tiny_models.WINDOW
