"""The tower alone gives the numbers of the whole model's tower, bit for bit, and has no layer of the text model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.errors import UnreadableModel
from baton.model.loading.config import DtypeChoice, read_config
from baton.model.loading.hf_weights import load_tower, load_vision_weights
from tests.exactness.vision.families import FAMILIES
from tests.unit.model.loading.test_multimodal import save_random


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tower_alone_gives_the_whole_models_rows(name: str, tmp_path: Path):
    save_random(FAMILIES[name].config(), tmp_path)
    config = read_config(tmp_path, dtype=DtypeChoice.FLOAT32, vision=True)
    picture = FAMILIES[name].draw(3)
    _, whole = load_vision_weights(config)
    alone = load_tower(config)
    num_rows = [sum(picture.runs)]
    (expected,), (found,) = whole.encode(picture.inputs, num_rows), alone.encode(picture.inputs, num_rows)
    for one, other in zip((expected.rows, *expected.deep), (found.rows, *found.deep), strict=True):
        assert torch.equal(one, other)
    assert (alone.depth, alone.hidden_size) == (whole.depth, found.rows.shape[1])
    assert not [key for key, _ in alone._model.named_parameters() if "language_model" in key or "lm_head" in key]


def test_a_missing_part_of_the_tower_is_named(tmp_path: Path):
    save_random(FAMILIES["llava"].config(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(next(name for name in sorted(tensors) if "vision_tower" in name))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnreadableModel, match=r"1 tensors are missing from .*vision_tower"):
        load_tower(read_config(tmp_path, vision=True))
