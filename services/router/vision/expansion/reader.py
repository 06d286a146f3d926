"""Chooses the rules of a model's images from its files. Called once, when a router starts.

Reads `config.json`, `processor_config.json` and `preprocessor_config.json`; needs no torch and no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.services.router.vision.expansion.config_reader import Json, UnknownProcessor
from baton.services.router.vision.expansion.gemma import ImageTexts, read_gemma
from baton.services.router.vision.expansion.idefics import Encode, MarkTexts, read_idefics
from baton.services.router.vision.expansion.image_tokens import ImageRules
from baton.services.router.vision.expansion.internvl import read_internvl
from baton.services.router.vision.expansion.llava import read_llava
from baton.services.router.vision.expansion.pixtral import read_pixtral
from baton.services.router.vision.expansion.qwen import read_qwen

SERVED = ("gemma3", "idefics3", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
"""Model types whose images are counted. Workers have the same list."""

TokenId = Callable[[str], int | None]
"""The id of an added token of the tokenizer, by its text."""


def read_image_rules(directory: Path, token_id: TokenId, encode: Encode) -> ImageRules | None:
    """The rules of the model in `directory`; None for a model without images.

    Raises `UnknownProcessor` for a model whose images are not counted here, `OSError` and `ValueError` for files that
    cannot be read.
    """
    config = _read(directory, "config.json")
    if "vision_config" not in config:
        return None
    processor, image = _read(directory, "processor_config.json"), _read(directory, "preprocessor_config.json")
    image = processor.get("image_processor") or image
    kind = config.get("model_type")
    if kind not in SERVED:
        raise UnknownProcessor(f"model type {kind!r} is none of {', '.join(SERVED)}")
    if not image:
        raise UnknownProcessor("it has no preprocessor_config.json")
    return _rules(str(kind), config, image, processor, _Tokens(directory, token_id, encode))


class _Tokens:
    """The ids of the tokens of images. A tokenizer's config may name them."""

    def __init__(self, directory: Path, token_id: TokenId, encode: Encode) -> None:
        self._config = _read(directory, "tokenizer_config.json")
        self._token_id = token_id
        self.encode = encode

    def find(self, names: tuple[str, ...], text: str, processor: Json) -> int:
        """The token that a config has under one of `names`, else `text`. Raises `UnknownProcessor`."""
        text = self.text_of(names, text, processor)
        found = self._token_id(text)
        if found is None:
            raise UnknownProcessor(f"its tokenizer has no token {text}")
        return found

    def text_of(self, names: tuple[str, ...], text: str, processor: Json) -> str:
        """The text that a config has under one of `names`, else `text`."""
        extra = self._config.get("extra_special_tokens")
        places = (processor, self._config, extra if isinstance(extra, dict) else {})
        return next((place[name] for place in places for name in names if isinstance(place.get(name), str)), text)


def _gemma_texts(placeholder: int, tokens: _Tokens) -> ImageTexts:
    """Raises `UnknownProcessor` for marks that are no added tokens, which a tokenizer would join with text."""
    begin, row, end = (
        tokens.text_of((name,), text, {})
        for name, text in (
            ("boi_token", "<start_of_image>"),
            ("image_token", "<image_soft_token>"),
            ("eoi_token", "<end_of_image>"),
        )
    )
    ids = [tokens.find((), text, {}) for text in (begin, row, end)]
    if ids[1] != placeholder:
        raise UnknownProcessor(f"{row} is not its placeholder")
    return ImageTexts(begin, row, end)


def _rules(kind: str, config: Json, image: Json, processor: Json, tokens: _Tokens) -> ImageRules:
    placeholder = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(placeholder, int):
        raise UnknownProcessor("its config has no image_token_id")
    match kind:
        case "gemma3":
            return read_gemma(placeholder, image, processor, config, _gemma_texts(placeholder, tokens))
        case "idefics3":
            return read_idefics(placeholder, image, processor, config, MarkTexts(), tokens.encode)
        case "smolvlm":  # its processor lets the tokenizer's config name them
            usual = MarkTexts()
            texts = MarkTexts(
                tokens.text_of(("image_token",), usual.image, {}),
                tokens.text_of(("fake_image_token",), usual.around, {}),
                tokens.text_of(("global_image_token",), usual.whole, {}),
            )
            return read_idefics(placeholder, image, processor, config, texts, tokens.encode)
        case "llava":
            return read_llava(placeholder, image, processor, config)
        case "internvl":
            start = tokens.find(("start_image_token",), "<img>", processor)
            end = tokens.find(("end_image_token",), "</img>", processor)
            return read_internvl(placeholder, start, end, image, processor)
        case "mistral3":
            line_end = tokens.find(("image_break_token",), "[IMG_BREAK]", processor)
            image_end = tokens.find(("image_end_token",), "[IMG_END]", processor)
            return read_pixtral(placeholder, line_end, image_end, image, processor)
    return read_qwen(placeholder, image)


def _read(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object; empty for a file that is not there."""
    path = directory / name
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value
