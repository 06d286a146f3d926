"""Loading with images: what is refused, the tower's count, and decoders that the self-check must notice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.attention.base import StepMetadata
from baton.model.decoders.base import Decoder, LogitsReader
from baton.model.decoders.capture import HiddenCapture
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import DtypeChoice, read_config
from baton.model.loading.hf_weights import load_vision_weights
from baton.model.loading.image_check import check_image, image_reference
from baton.model.loading.loader import DecoderChoice, load_model
from baton.model.storage import PageStorage
from baton.model.vision.embedding import Embeds
from baton.model.vision.spec import NOT_SERVED, VISION
from baton.model.vision.tower import WrongRowCount
from tests.exactness.vision.families import FAMILIES, VisionFamily
from tests.kernels import kernel_levels
from tests.tiny_models import save_random_model
from tests.unit.model.dequantize.test_fp8 import BLOCKS
from tests.unit.model.loading.test_multimodal import CONFIGS, save, save_random

PAGE_SIZE = 8


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3_vl")
    save_random(FAMILIES["qwen3_vl"].config(), directory)
    return directory


def test_every_type_that_is_served_has_an_exactness_test():
    assert FAMILIES.keys() == VISION.keys()
    pairs = {(family.config().model_type, family.config().get_text_config().model_type) for family in FAMILIES.values()}
    assert pairs == {(spec.model_type, kind) for spec in VISION.values() for kind in spec.text_types}


@pytest.mark.parametrize("name", ["llava_next-llama"])
def test_types_that_are_served_on_text_only_are_refused_with_the_reason(name: str, tmp_path: Path):
    save(name, tmp_path)
    model_type = CONFIGS[name]().model_type
    with pytest.raises(UnsupportedModel, match=re.escape("is not served with images: " + NOT_SERVED[model_type])):
        load_model(tmp_path, vision=True)


def test_a_text_model_is_refused(tmp_path: Path):
    with pytest.raises(
        UnsupportedModel, match="'llama' is not served with images: it is none of gemma3, idefics3, internvl"
    ):
        load_model(save_random_model("llama", tmp_path), vision=True)


def test_another_text_model_is_refused_by_name(tmp_path: Path):
    save("llava-mistral", tmp_path)
    with pytest.raises(UnsupportedModel, match="images with text model 'mistral' in llava are not supported"):
        load_model(tmp_path, vision=True)


def test_quantised_checkpoints_are_refused(qwen: Path, tmp_path: Path):
    config = json.loads((qwen / "config.json").read_text()) | {"quantization_config": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="a quantised checkpoint is served on text only"):
        read_config(tmp_path, vision=True)


def test_a_missing_part_of_the_tower_is_named(qwen: Path, tmp_path: Path):
    tensors = load_file(qwen / "model.safetensors")
    name = next(name for name in sorted(tensors) if "visual" in name)
    save_file(
        {key: one for key, one in tensors.items() if key != name}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    with pytest.raises(UnreadableModel, match=r"1 tensors are missing from .*visual"):
        load_model(tmp_path, vision=True)


def test_without_asking_there_is_no_tower(qwen: Path):
    model = load_model(qwen, page_size=PAGE_SIZE)
    assert (model.tower, model.config.vision, model.config.media) == (None, None, None)


def test_a_tower_that_gives_another_number_of_rows_is_an_error(qwen: Path):
    model = load_model(qwen, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, vision=True)
    assert model.tower is not None
    picture = FAMILIES["qwen3_vl"].draw(1)
    (made,) = model.tower.encode(picture.inputs, [15])
    assert made.rows.shape == (15, 64)
    assert [one.shape for one in made.deep] == [(15, 64)] * 2
    with pytest.raises(WrongRowCount, match="15 rows for 14 placeholders"):
        model.tower.encode(picture.inputs, [14])


class FaultyDecoder:
    """A `Decoder` that changes what it is given."""

    def __init__(self, decoder: Decoder, change: Callable[[dict[str, Any]], None]) -> None:
        self._decoder = decoder
        self._change = change

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        keep: torch.Tensor,
        reader: LogitsReader | None = None,
        embeds: Embeds | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        given: dict[str, Any] = {"positions": positions, "embeds": embeds}
        if embeds is not None:
            self._change(given)
        return self._decoder.forward(input_ids, given["positions"], step, keep, reader, given["embeds"], capture)


def flat_positions(given: dict[str, Any]) -> None:
    given["positions"] = given["positions"][0]


def swapped_axes(given: dict[str, Any]) -> None:
    given["positions"] = given["positions"][[0, 2, 1]]


def no_rows(given: dict[str, Any]) -> None:
    given["embeds"] = None


def no_deep_rows(given: dict[str, Any]) -> None:
    given["embeds"] = replace(given["embeds"], deep=())


def shifted_rows(given: dict[str, Any]) -> None:
    given["embeds"] = replace(given["embeds"], rows=given["embeds"].rows.roll(1, 0))


@pytest.mark.parametrize("fault", [flat_positions, swapped_axes, no_rows, no_deep_rows, shifted_rows])
@pytest.mark.parametrize("choice", [DecoderChoice.LEAN, DecoderChoice.STOCK])
def test_the_self_check_notices_a_wrong_way_of_rows(fault: Any, choice: DecoderChoice, checked: Any):
    model, reference = checked[choice]

    def make(storage: PageStorage) -> Decoder:
        return FaultyDecoder(model.decoder(storage), fault)

    assert check_image(model.decoder, model.geometry, reference, "cpu").passed
    assert not check_image(make, model.geometry, reference, "cpu").passed


@pytest.fixture(scope="module")
def checked(qwen: Path) -> dict[DecoderChoice, Any]:
    """By decoder: the loaded model, and the reference of the stock text model."""
    config = read_config(qwen, dtype=DtypeChoice.FLOAT32, vision=True)
    text, tower = load_vision_weights(config)
    assert config.media is not None
    reference = image_reference(text, config.vocab_size, tower.depth, config.media, "cpu")
    options: dict[str, Any] = {"dtype": DtypeChoice.FLOAT32, "page_size": PAGE_SIZE, "vision": True}
    kinds = (DecoderChoice.LEAN, DecoderChoice.STOCK)
    return {kind: (load_model(qwen, decoder=kind, **options), reference) for kind in kinds}


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
@pytest.mark.parametrize("choice", [DecoderChoice.LEAN, DecoderChoice.STOCK])
def test_the_check_with_an_image_passes_with_packed_weights(choice: DecoderChoice, checked: Any):
    """Loading goes back to plain weights where it does not."""
    report = checked[choice][0].report
    assert report.weights.layout is WeightLayout.PANELS, report.weights.note


def test_more_deep_layers_than_the_text_model_has_are_refused(tmp_path: Path):
    family: VisionFamily = FAMILIES["qwen3_vl"]
    config = family.config()
    config.text_config.num_hidden_layers = 2
    save_random(config, tmp_path)
    with pytest.raises(UnsupportedModel, match="DeepStack rows for 2 layers of 2 are not supported"):
        load_model(tmp_path, vision=True)
