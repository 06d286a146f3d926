"""The router's prompts for Gemma 3 have the ids of the processor's text: line breaks around images join others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from baton.services.router.vision.expansion.config_reader import UnknownProcessor
from baton.services.router.vision.expansion.reader import read_image_rules
from baton.services.router.vision.image_model import ImageModel, MisplacedImage
from tests.contract.vision.test_image_tokens import encoder
from tests.unit.router.vision.pictures import picture

BEGIN, ROW, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
NUM_ROWS, SIDE = 4, 56
SIZES = [(90, 60), (1, 1), (1, 190), (640, 200)]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Byte-level BPE with tokens for two, three and four line breaks."""
    vocab = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"Ċ" * num: len(vocab) + num - 2 for num in (2, 3, 4)}
    made = Tokenizer(models.BPE(vocab, [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens([BEGIN, ROW, END])
    return made


def _read(directory: Path, tokenizer: Tokenizer, image: Any, rows: int = NUM_ROWS, **change: Any) -> ImageModel:
    image.save_pretrained(directory)
    config = {"model_type": "gemma3", "vision_config": {"image_size": SIDE}, "mm_tokens_per_image": NUM_ROWS}
    ids = {"image_token_id": tokenizer.token_to_id(ROW)}
    (directory / "config.json").write_text(json.dumps(config | ids | change))
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_length": rows}))
    rules = read_image_rules(directory, tokenizer.token_to_id, encoder(tokenizer))
    return ImageModel(rules, "digest")


def _image(**more: Any) -> Any:
    return Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}, **more)


@pytest.mark.parametrize(
    "text", [f"user\n{BEGIN}what?", f"a{BEGIN}\n{BEGIN}b", f"{BEGIN}{BEGIN}", f"\n\n{BEGIN} \n {BEGIN}\n\n\n{BEGIN}c"]
)
@pytest.mark.parametrize("pan_and_scan", [None, True])
def test_prompts_have_the_ids_of_the_processors_text(tmp_path, tokenizer, text, pan_and_scan):
    """The processor passes False for pan and scan, whatever the image processor's config says."""
    image = _image(do_pan_and_scan=pan_and_scan)
    model = _read(tmp_path, tokenizer, image)
    sizes = SIZES[: text.count(BEGIN)]
    prompt, spans = model.place(
        tokenizer.encode(model.mark(text)).ids, [model.open_file(picture(*size), "", "p") for size in sizes]
    )
    own = SimpleNamespace(full_image_sequence=f"\n\n{BEGIN}{ROW * NUM_ROWS}{END}\n\n")
    whole = text
    for width, height in sizes:
        blank = np.zeros((height, width, 3), dtype=np.uint8)
        made = image(blank, input_data_format="channels_last", **{"do_pan_and_scan": False})
        expanded = Gemma3Processor.replace_image_token(own, {"num_crops": made["num_crops"]}, 0)
        whole = whole.replace(BEGIN, expanded.replace(BEGIN, "<begin>"), 1)
    assert list(prompt) == tokenizer.encode(whole.replace("<begin>", BEGIN)).ids
    places = [at for span in spans for at in range(span.first, span.end)]
    assert places == [at for at, id in enumerate(prompt) if id == tokenizer.token_to_id(ROW)]
    assert all(span.num_tokens == NUM_ROWS for span in spans)


def test_the_default_of_the_processor_is_no_pan_and_scan() -> None:
    assert Gemma3Processor.images_kwargs["do_pan_and_scan"] is False


def test_a_mark_without_an_image_is_refused(tmp_path, tokenizer):
    model = _read(tmp_path, tokenizer, _image())
    prompt = tokenizer.encode(model.mark(f"a{BEGIN}b{BEGIN}")).ids
    with pytest.raises(MisplacedImage):
        model.place(prompt, [model.open_file(picture(8, 8), "", "p")])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 5}, "5 rows an image"),
        ({"vision_config": {"image_size": 28}}, "resize images to 28 x 28"),
        ({"image_token_id": 3}, "<image_soft_token> is not its placeholder"),
    ],
)
def test_counts_that_do_not_fit_are_refused(tmp_path, tokenizer, change, why):
    with pytest.raises(UnknownProcessor, match=why):
        _read(tmp_path, tokenizer, _image(), **change)
