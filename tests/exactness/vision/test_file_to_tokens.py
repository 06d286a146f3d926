"""From the file of an image to the tokens of `generate()`: the router's count, the worker's tensors, tower and handoff.

Families that `test_worker_vision` has no cluster of. Both engines run here, with their caches and transfer.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

from baton.domain.media.identity import media_identity
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from baton.model.vision.image_processor import ImageProcessor
from baton.model.vision.spec import VISION
from baton.services.local.pair import LocalPair, PairLimits
from baton.services.router.vision.expansion.reader import read_image_rules
from baton.services.router.vision.headers.reader import read_header
from baton.worker.media.image_decoder import MAX_PIXELS, ImageDecoder
from tests.contract.vision.test_router_and_worker import FILES, PROCESSORS, encode, token_id
from tests.exactness.vision.families import FAMILIES, IMAGE, MERGE, Chat
from tests.exactness.vision.test_vision_exactness import NUM_NEW_TOKENS, served_tokens
from tests.unit.model.loading.test_multimodal import save_random
from tests.unit.router.vision.pictures import picture, saved

pytestmark = pytest.mark.exactness

SIZE = (90, 60)
OPTIONS: dict[str, dict[str, Any]] = {"internvl": {"crop_to_patches": True}, "mistral3": {"patch_size": 14 * MERGE}}
"""What a type's processor for text and images passes to that for images."""


TYPES = dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), "mm_token_type_ids") | {"gemma3": "token_type_ids"}
"""The argument that tells rows from text."""


def tinted(colour: str, seed: int) -> bytes:
    """A file of noise and a colour. Random weights of Mistral 3 tell no noise from other noise."""
    noise = Image.open(io.BytesIO(picture(*SIZE, seed=seed)))
    return saved(Image.blend(noise, Image.new("RGB", SIZE, colour), 0.5), "PNG")


def own_tokens(model: Any, processor: Any, ids: list[int], files: list[bytes]) -> list[int]:
    """The whole model's greedy tokens, with tensors of its own image processor."""
    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    options = OPTIONS.get(model.config.model_type, {})
    inputs = dict(processor(images=images, return_tensors="pt", **options))
    for name in ("num_patches", "num_crops"):
        inputs.pop(name, None)
    if types := TYPES.get(model.config.model_type):
        inputs[types] = torch.tensor([[int(id == IMAGE) for id in ids]])
    model.model.rope_deltas = None
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW_TOKENS, pad_token_id=0)
    prompt = torch.tensor([ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **inputs)
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


def chat_of(directory: Path, files: list[bytes]) -> Chat:
    """What the router makes of the files: it reads their headers only."""
    rules = read_image_rules(directory, token_id, encode)
    assert rules is not None
    chat = Chat(ids=list(range(3, 14)))
    for file in files:
        tokens = rules.expand(*read_header(file).shown_size, low_detail=False)
        chat.media += tokens.spans(len(chat.ids), media_identity(file, "print"))
        chat.ids += [*tokens.ids, *range(20, 27)]
    return chat


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl", "mistral3", "idefics3", "smolvlm", "gemma3"])
async def test_files_give_the_models_own_tokens(family: str, tmp_path: Path) -> None:
    """One image, two, the first again; then another one of equal size behind the same words, on warm caches."""
    whole, processor = save_random(FAMILIES[family].config(), tmp_path), PROCESSORS[family]()
    processor.save_pretrained(tmp_path)
    if family in FILES:
        (tmp_path / "processor_config.json").write_text(FILES[family])
    model = load_model(tmp_path, dtype=DtypeChoice.FLOAT32, page_size=8, vision=True)
    assert model.tower is not None
    red, blue, green = (tinted(colour, seed) for seed, colour in enumerate(("red", "blue", "green")))
    worker, decoder, source = ImageProcessor(tmp_path, VISION[family]), ImageDecoder(MAX_PIXELS), {}
    for file in (red, blue, green):
        decoded = await decoder.decode(file)
        prepared = worker.prepare(decoded.width, decoded.height, decoded.pixels, "")
        (source[media_identity(file, "print")],) = model.tower.encode(prepared.inputs, [prepared.num_rows])
    decoder.close()
    pair = LocalPair(model, PairLimits(token_budget=16), source)
    answers = []
    for files in ([red], [red, blue], [red], [red, green]):
        chat = chat_of(tmp_path, files)
        expected = own_tokens(whole, processor, chat.ids, files)
        assert served_tokens(pair, [chat]) == [expected]
        answers.append(expected)
    assert answers[1] != answers[3], "the second picture does not show"
