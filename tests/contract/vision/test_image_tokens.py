"""The router's tokens of images are those of transformers' processors: ids, their order, grids, over many sizes.

The processors' own classes do the counting here: the image processor on a blank picture of each size, and the method
that writes an image's tokens as text, which a real tokenizer encodes.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.services.router.vision.expansion.config_reader import UnknownProcessor
from baton.services.router.vision.expansion.idefics import Encode
from baton.services.router.vision.expansion.image_tokens import ImageRules
from baton.services.router.vision.expansion.reader import read_image_rules

SPECIAL = ("<image>", "<|image_pad|>", "<IMG_CONTEXT>", "<img>", "</img>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
EDGES = (1, 2, 13, 14, 15, 27, 28, 29, 41, 42, 43, 55, 56, 57, 111, 112, 113, 223, 224, 225, 448, 449)
"""Around multiples of patches, halves of them included."""


def _sizes() -> list[tuple[int, int]]:
    rng = random.Random(5)
    sizes = [(a, b) for a in EDGES for b in EDGES if max(a, b) <= 200 * min(a, b)]
    sizes += [(1, 200), (200, 1), (7, 1400), (1400, 7), (2000, 900), (900, 2000), (1023, 1025)]
    return rng.sample(sizes[:-7], 60) + sizes[-7:] + [(rng.randint(1, 700), rng.randint(4, 700)) for _ in range(20)]


SIZES = _sizes()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(list(SPECIAL))
    return made


def _rules(
    tmp_path, tokenizer: Tokenizer, kind: str, image: Any, processor: dict[str, Any], **config: Any
) -> ImageRules:
    """What the router reads from the files that transformers writes."""
    image.save_pretrained(tmp_path)
    placeholder = {"llava": "<image>", "internvl": "<IMG_CONTEXT>", "mistral3": "[IMG]"}.get(kind, "<|image_pad|>")
    ids = {"image_token_id": tokenizer.token_to_id(placeholder)}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": {}, **ids, **config}))
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    rules = read_image_rules(tmp_path, tokenizer.token_to_id, encoder(tokenizer))
    assert rules is not None
    return rules


def encoder(tokenizer: Tokenizer) -> Encode:
    return lambda text, *, add_special_tokens: tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def check_tokens(rules: ImageRules, tokenizer: Tokenizer, size: tuple[int, int], text: str) -> None:
    width, height = size
    tokens = rules.expand(width, height)
    assert list(tokens.ids) == tokenizer.encode(text).ids, size
    places = [at + row for at, rows in tokens.runs for row in range(rows)]
    assert places == [at for at, id in enumerate(tokens.ids) if id == rules.placeholder], size


def _blank(size: tuple[int, int]) -> np.ndarray:
    return np.zeros((size[1], size[0], 3), dtype=np.uint8)


def test_llava(tmp_path, tokenizer):
    from transformers.models.llava.processing_llava import LlavaProcessor

    image = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    for strategy, extra in (("default", 1), ("default", 0), ("full", 0), ("full", 1)):
        config = {"patch_size": 14, "vision_feature_select_strategy": strategy, "num_additional_image_tokens": extra}
        rules = _rules(tmp_path, tokenizer, "llava", image, config)
        for size in SIZES[::9]:
            inputs = {
                "pixel_values": image(_blank(size), input_data_format="channels_last", return_tensors="np")[
                    "pixel_values"
                ]
            }
            this = SimpleNamespace(image_token="<image>", **config)
            check_tokens(rules, tokenizer, size, LlavaProcessor.replace_image_token(this, inputs, 0))


def test_llava_of_before_its_processor_had_a_config(tmp_path, tokenizer):
    image = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=336)
    vision = {"model_type": "clip_vision_model", "patch_size": 14}
    rules = _rules(
        tmp_path, tokenizer, "llava", image, {}, vision_config=vision, vision_feature_select_strategy="default"
    )
    assert rules.expand(640, 480).num_rows == 576  # of LLaVA 1.5


@pytest.mark.parametrize(("kind", "patch_size"), [("qwen2_vl", 14), ("qwen2_5_vl", 14), ("qwen3_vl", 16)])
def test_qwen(tmp_path, tokenizer, kind, patch_size):
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    owner = Qwen3VLProcessor if kind == "qwen3_vl" else Qwen2VLProcessor
    image = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 60}, patch_size=patch_size
    )
    rules = _rules(tmp_path, tokenizer, kind, image, {})
    for size in SIZES:
        grid = image(_blank(size), input_data_format="channels_last", return_tensors="pt")["image_grid_thw"]
        text = owner.replace_image_token(
            SimpleNamespace(image_token="<|image_pad|>", image_processor=image), {"image_grid_thw": grid}, 0
        )
        check_tokens(rules, tokenizer, size, text)
        tokens = rules.expand(*size)
        assert tokens.grid is not None
        assert [1, 2 * tokens.grid.height, 2 * tokens.grid.width] == torch.as_tensor(grid[0]).tolist()


def test_qwen_with_bounds_of_an_older_config(tmp_path, tokenizer):
    image = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=56 * 112)
    rules = _rules(tmp_path, tokenizer, "qwen2_vl", image, {})
    config = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 56 * 112}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert read_image_rules(tmp_path, tokenizer.token_to_id, encoder(tokenizer)) == rules
    assert rules.expand(500, 500).num_rows <= 8


def test_internvl(tmp_path, tokenizer):
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    names = {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"}
    for fewest, most in ((1, 12), (1, 1), (2, 5)):
        image = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, min_patches=fewest, max_patches=most)
        rules = _rules(tmp_path, tokenizer, "internvl", image, {"image_seq_length": 4})
        for size in SIZES[::2]:
            inputs = image(_blank(size), input_data_format="channels_last", **InternVLProcessor.images_kwargs)
            this = SimpleNamespace(image_seq_length=4, **names)
            check_tokens(rules, tokenizer, size, InternVLProcessor.replace_image_token(this, inputs, 0))


@pytest.fixture
def pixtral_processor(monkeypatch) -> Any:
    """transformers' class, whose module wants torchvision for a function that another module of it has, too."""
    stand_in: Any = ModuleType("image_processing_pixtral")
    stand_in.get_resize_output_image_size = image_processing_pil_pixtral.get_resize_output_image_size
    monkeypatch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", stand_in)
    monkeypatch.delitem(sys.modules, "transformers.models.pixtral.processing_pixtral", raising=False)
    module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    monkeypatch.delitem(sys.modules, "transformers.models.pixtral.processing_pixtral")
    return module.PixtralProcessor


@pytest.mark.parametrize(("patch_size", "merge"), [(14, 2), (16, 1)])
def test_pixtral(tmp_path, tokenizer, pixtral_processor, patch_size, merge):
    image = PixtralImageProcessorPil(size={"longest_edge": 280}, patch_size=patch_size)
    config = {"patch_size": patch_size, "spatial_merge_size": merge}
    rules = _rules(tmp_path, tokenizer, "mistral3", image, config)
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    for size in SIZES:
        inputs = image(_blank(size), input_data_format="channels_last", patch_size=patch_size * merge)
        text = pixtral_processor.replace_image_token(SimpleNamespace(**config, **names), inputs, 0)
        check_tokens(rules, tokenizer, size, text)


def test_low_detail_is_half_of_the_pixels(tmp_path, tokenizer):
    image = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 200})
    rules = _rules(tmp_path, tokenizer, "qwen2_vl", image, {})
    image.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 100}
    (tmp_path / "half").mkdir()
    half = _rules(tmp_path / "half", tokenizer, "qwen2_vl", image, {})
    for size in SIZES:
        assert rules.expand(*size, low_detail=True) == half.expand(*size)


def test_a_model_of_text_has_no_rules(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_image_rules(tmp_path, tokenizer.token_to_id, encoder(tokenizer)) is None


@pytest.mark.parametrize("kind", ["paligemma", "idefics2", "llava_next", "mllama"])
def test_other_processors_are_refused_by_name(tmp_path, tokenizer, kind):
    image = Qwen2VLImageProcessorPil()
    with pytest.raises(UnknownProcessor, match=f"'{kind}' is none of"):
        _rules(tmp_path, tokenizer, kind, image, {})


def test_absurd_configs_are_refused(tmp_path, tokenizer):
    image = Qwen2VLImageProcessorPil()
    with pytest.raises(UnknownProcessor, match="no preprocessor_config"):
        _rules_without_image(tmp_path, tokenizer)
    for change in (
        {"patch_size": 0},
        {"patch_size": "14"},
        {"merge_size": True},
        {"do_resize": False},
        {"max_pixels": 1},
    ):
        image.save_pretrained(tmp_path)
        path = tmp_path / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(UnknownProcessor):
            read_image_rules(tmp_path, tokenizer.token_to_id, encoder(tokenizer))


def _rules_without_image(tmp_path, tokenizer: Tokenizer) -> None:
    config = {"model_type": "qwen2_vl", "vision_config": {}, "image_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_image_rules(tmp_path, tokenizer.token_to_id, encoder(tokenizer))
