"""The router's tokens of Idefics3 and SmolVLM are those of their processors: tiles, marks and ends of lines.

Ends of lines are text between marks: a tokenizer may have one token for two of them.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from baton.services.router.vision.expansion.config_reader import UnknownProcessor
from baton.services.router.vision.expansion.image_tokens import ImageRules
from baton.services.router.vision.expansion.reader import read_image_rules
from baton.services.router.vision.image_model import ImageModel
from tests.contract.vision.test_image_tokens import check_tokens, encoder
from tests.unit.router.vision.pictures import picture

NAMES = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_tag": "<global-img>",
    "global_image_token": "<global-img>",
}
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
KINDS = {
    "idefics3": (Idefics3ImageProcessorPil, Idefics3Processor),
    "smolvlm": (SmolVLMImageProcessorPil, SmolVLMProcessor),
}
NUM_ROWS, TILE = 4, 56


def _sizes() -> list[tuple[int, int]]:
    rng = random.Random(9)
    edges = (1, 2, 3, 27, 28, 29, 55, 56, 57, 83, 84, 85, 111, 112, 113, 225, 400)
    sizes = [(a, b) for a in edges for b in edges if max(a, b) <= 200 * min(a, b)]
    sizes += [(1, 200), (200, 1), (3, 599), (599, 3), (1200, 700), (701, 1203), (1023, 1025), (1025, 1023)]
    return sizes[::3] + sizes[-8:] + [(rng.randint(1, 700), rng.randint(4, 700)) for _ in range(30)]


SIZES = _sizes()


def _tokenizer(*merges: tuple[str, str], special: tuple[str, ...] = tuple(NAMES.values())) -> Tokenizer:
    """Byte-level BPE."""
    vocab = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {a + b: len(vocab) + at for at, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocab, list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([*dict.fromkeys(special), *PLACES])
    return made


TOKENIZERS = (_tokenizer(), _tokenizer(("Ċ", "Ċ")))
"""The second has a token for two ends of lines."""


def _processor(kind: str, longest: int, tile: int = TILE, **more: Any) -> Any:
    return KINDS[kind][0](size={"longest_edge": longest}, max_image_size={"longest_edge": tile}, **more)


def _rules(
    directory: Path, image: Any, tokenizer: Tokenizer = TOKENIZERS[0], rows: int = NUM_ROWS, **change: Any
) -> ImageRules:
    """What the router reads from the files that transformers writes."""
    image.save_pretrained(directory)
    kind = next(kind for kind, (owner, _) in KINDS.items() if isinstance(image, owner))
    config = {"model_type": kind, "vision_config": {"patch_size": 14}, "scale_factor": 2, **change}
    placeholder = {"image_token_id": tokenizer.token_to_id("<image>")}
    (directory / "config.json").write_text(json.dumps(config | placeholder))
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_len": rows}))
    rules = read_image_rules(directory, tokenizer.token_to_id, encoder(tokenizer))
    assert rules is not None
    return rules


def _made(image: Any, size: tuple[int, int]) -> Any:
    blank = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    return image(blank, input_data_format="channels_last", return_tensors="np", return_row_col_info=True)


def _check(directory: Path, kind: str, image: Any, sizes: list[tuple[int, int]], **change: Any) -> set[tuple[int, int]]:
    """Compares with both tokenizers, and returns the grids of tiles that were seen."""
    both, grids = [(_rules(directory, image, tokenizer, **change), tokenizer) for tokenizer in TOKENIZERS], set()
    for size in sizes:
        made = _made(image, size)
        text = KINDS[kind][1].replace_image_token(SimpleNamespace(image_seq_len=NUM_ROWS, **NAMES), made, 0)
        for rules, tokenizer in both:
            check_tokens(rules, tokenizer, size, text)
            assert rules.expand(*size).num_rows == NUM_ROWS * made["pixel_values"].shape[1]
        grids.add((made["rows"][0][0], made["cols"][0][0]))
    return grids


@pytest.mark.parametrize(("longest", "step", "most"), [(56, 4, 0), (57, 1, 2), (112, 1, 2), (225, 1, 5), (449, 5, 9)])
def test_tokens_are_the_processors(tmp_path, longest, step, most):
    """`most`: tiles a side. The last has more rows and columns than there are marks: those become text."""
    grids = _check(tmp_path, "idefics3", _processor("idefics3", longest), SIZES[::step])
    assert max(map(max, grids)) == most
    assert len(grids) >= min(3, 1 + most)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_prompt_has_the_ids_of_the_whole_text(tmp_path, tokenizer):
    """As the processor makes it: tokens of images are put into the text, and then all of it is encoded."""
    image = _processor("idefics3", 112)
    model = ImageModel(_rules(tmp_path, image, tokenizer), "digest")
    sizes, text = [(90, 60), (20, 20), (40, 200)], "a\n<image>\n\nb <image><image>c"
    shown = [model.open_file(picture(*size), "", "p") for size in sizes]
    prompt, spans = model.place(tokenizer.encode(text).ids, shown)
    for size in sizes:
        names = SimpleNamespace(image_seq_len=NUM_ROWS, **NAMES)
        own = Idefics3Processor.replace_image_token(names, _made(image, size), 0)
        text = text.replace("<image>", own.replace("<image>", "<row>"), 1)
    assert list(prompt) == tokenizer.encode(text.replace("<row>", "<image>")).ids
    places = [at for span in spans for at in range(span.first, span.end)]
    assert places == [at for at, id in enumerate(prompt) if id == tokenizer.token_to_id("<image>")]


def test_smolvlm_has_the_same_rules(tmp_path):
    assert len(_check(tmp_path, "smolvlm", _processor("smolvlm", 168), SIZES[::2])) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_without_splitting_an_image_is_one_tile(tmp_path, kind):
    grids = _check(tmp_path, kind, _processor(kind, 225, do_image_splitting=False), SIZES[::9])
    assert grids == {(0, 0)}


def test_no_side_is_longer_than_the_processors_own_bound(tmp_path):
    image = _processor("idefics3", 5000, 512)
    sizes = [(900, 5), (5, 900), (300, 7)]
    assert (1, 8) in _check(tmp_path, "idefics3", image, sizes, vision_config={"patch_size": 128})


def test_low_detail_is_half_of_the_pixels(tmp_path):
    for longest in (40, 57, 225):
        half = min(longest, max(TILE, math.isqrt(longest**2 // 2)))
        rules, halved = (_rules(tmp_path, _processor("idefics3", length)) for length in (longest, half))
        for size in SIZES:
            assert rules.expand(*size, low_detail=True) == halved.expand(*size)


def test_smolvlm_may_name_its_marks(tmp_path):
    """Its processor takes them from the tokenizer's config; that of Idefics3 does not."""
    tokenizer = _tokenizer(special=("<pic>", "<around>", "<image>"))
    names = {"image_token": "<pic>", "extra_special_tokens": {"fake_image_token": "<around>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    _processor("smolvlm", 56).save_pretrained(tmp_path)
    config = {"vision_config": {"patch_size": 14}, "scale_factor": 2, "image_token_id": tokenizer.token_to_id("<pic>")}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "smolvlm"}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_len": NUM_ROWS}))
    rules = read_image_rules(tmp_path, tokenizer.token_to_id, encoder(tokenizer))
    assert rules is not None
    check_tokens(rules, tokenizer, (56, 56), "<around><global-img>" + "<pic>" * NUM_ROWS + "<around>")
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "idefics3"}))
    with pytest.raises(UnknownProcessor, match="does not keep <image> apart"):
        read_image_rules(tmp_path, tokenizer.token_to_id, encoder(tokenizer))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 5}, "5 rows for a tile of 4 x 4 patches, 2 merged"),
        ({"scale_factor": 3}, "4 rows for a tile of 4 x 4 patches, 3 merged"),
        ({"vision_config": {"patch_size": [14, 14]}}, r"patch_size is \[14, 14\]"),
    ],
)
def test_counts_that_do_not_fit_are_refused(tmp_path, change, why):
    with pytest.raises(UnknownProcessor, match=why):
        _rules(tmp_path, _processor("idefics3", 112), **change)


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ({"do_resize": False}, "does not resize"),
        ({"do_image_splitting": None}, "splits them in a way"),
        ({"size": {"height": 56, "width": 56}}, "longest_edge is None"),
        ({"size": {"longest_edge": 4000}}, "up to 5329 tiles"),
    ],
)
def test_processors_that_cannot_be_counted_are_refused(tmp_path, image, why):
    _rules(tmp_path, _processor("idefics3", 112))
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **image}))
    with pytest.raises(UnknownProcessor, match=why):
        read_image_rules(tmp_path, TOKENIZERS[0].token_to_id, encoder(TOKENIZERS[0]))
