"""Router and worker count the rows of an image alike: one by its size, the other by the tensors of its pixels."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from baton.model.vision.image_processor import ImageProcessor
from baton.model.vision.spec import VISION
from baton.services.router.vision.expansion.reader import SERVED, read_image_rules
from tests.exactness.vision.families import BREAK, CANVAS, FAMILIES, IMAGE, MERGE

SIZES = [
    (w, h) for w, h in ((1, 1), (1, 90), (90, 1), (3, 50), (50, 3), (2, 1), (28, 28), (27, 29), (41, 42), (112, 56))
]
SIZES += [(113, 55), (200, 1), (1, 200), (640, 480), (480, 640), (999, 15), (333, 777)]
PROCESSORS: dict[str, Any] = {
    "llava": lambda: CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
    "gemma3": lambda: Gemma3ImageProcessorPil(size={"height": CANVAS, "width": CANVAS}),
    "idefics3": lambda: Idefics3ImageProcessorPil(
        size={"longest_edge": 3 * CANVAS}, max_image_size={"longest_edge": CANVAS}
    ),
    "smolvlm": lambda: SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * CANVAS}, max_image_size={"longest_edge": CANVAS}
    ),
    "internvl": lambda: GotOcr2ImageProcessorPil(size={"height": CANVAS, "width": CANVAS}),
    "mistral3": lambda: PixtralImageProcessorPil(size={"longest_edge": 400}, patch_size=14),
    "qwen2_vl": lambda: Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 28 * 28 * 60}),
    "qwen2_5_vl": lambda: Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 28 * 28 * 60}),
    "qwen3_vl": lambda: Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4096, "longest_edge": 32 * 32 * 60}, patch_size=16
    ),
}
FILES = {
    "mistral3": f'{{"patch_size": 14, "spatial_merge_size": {MERGE}}}',
    "internvl": '{"image_seq_length": 16}',
    "gemma3": '{"image_seq_length": 16}',
    "idefics3": '{"image_seq_len": 16}',
    "smolvlm": '{"image_seq_len": 16}',
}


def token_id(text: str) -> int:
    """The id of an added token."""
    return IMAGE if text == "<image_soft_token>" else BREAK


def encode(text: str, /, *, add_special_tokens: bool) -> list[int]:
    """A tokenizer whose tokens are placeholders, other marks and the ends of lines."""
    ids = {"<image>": IMAGE, "\n": BREAK - 1}
    return [ids.get(token, BREAK) for token in re.findall(r"<[^>]+>|\n", text)]


@pytest.mark.parametrize("family", sorted(VISION))
def test_router_and_worker_count_the_same_rows(tmp_path, family):
    FAMILIES[family].config().save_pretrained(tmp_path)
    PROCESSORS[family]().save_pretrained(tmp_path)
    if family in FILES:
        (tmp_path / "processor_config.json").write_text(FILES[family])
    rules = read_image_rules(tmp_path, token_id, encode)
    assert rules is not None
    worker = ImageProcessor(tmp_path, VISION[family])
    for width, height in SIZES:
        for detail in ("", "low"):
            prepared = worker.prepare(width, height, bytes(3 * width * height), detail)
            tokens = rules.expand(width, height, low_detail=detail == "low")
            assert (prepared.num_rows, prepared.grid) == (tokens.num_rows, tokens.grid), (width, height, detail)


def test_router_and_worker_serve_the_same_types():
    assert set(SERVED) == set(VISION)
