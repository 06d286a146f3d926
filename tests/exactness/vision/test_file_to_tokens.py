"""From the file of an image to the tokens of `generate()`: the router's count, the worker's tensors, tower and handoff.

Both engines run here, in one process, with their caches and transfer. `test_families_http` has clusters of these.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from baton.domain.media.identity import media_identity
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from baton.model.vision.image_processor import ImageProcessor
from baton.model.vision.spec import VISION
from baton.services.local.pair import LocalPair, PairLimits
from baton.services.router.vision.expansion.reader import read_image_rules
from baton.services.router.vision.headers.reader import read_header
from baton.worker.media.image_decoder import MAX_PIXELS, ImageDecoder
from tests.contract.vision.test_router_and_worker import encode, token_id
from tests.exactness.vision.families import Chat
from tests.exactness.vision.test_vision_exactness import NUM_NEW_TOKENS, served_tokens
from tests.exactness.vision.vision_reference import VisionReference
from tests.unit.router.vision.pictures import picture, saved

pytestmark = pytest.mark.exactness

SIZE = (90, 60)


def tinted(colour: str, seed: int) -> bytes:
    """A file of noise and a colour. Random weights of Mistral 3 tell no noise from other noise."""
    noise = Image.open(io.BytesIO(picture(*SIZE, seed=seed)))
    return saved(Image.blend(noise, Image.new("RGB", SIZE, colour), 0.5), "PNG")


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
    reference = VisionReference.save(family, tmp_path)
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
        expected = reference.generate(chat.ids, files, NUM_NEW_TOKENS)
        assert served_tokens(pair, [chat]) == [expected]
        answers.append(expected)
    assert answers[1] != answers[3], "the second picture does not show"
