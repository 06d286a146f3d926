"""Tiny vision-language models, and chats with random pictures for them: what a processor would make of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from baton.domain.media.span import MediaGrid, MediaSpan
from tests.tiny_models import VOCAB_SIZE
from tests.unit.model.loading.test_multimodal import (
    CLIP,
    DEEPSTACK,
    GEMMA,
    INTERN,
    MROPE,
    PIXTRAL,
    QWEN2_VISION,
    QWEN_VISION,
    VISION,
    config_of,
    text,
)

IMAGE = VOCAB_SIZE - 1
BREAK = VOCAB_SIZE - 2
"""Between the rows of an image, in Mistral 3."""
CANVAS = 112
MERGE = 2


@dataclass(frozen=True)
class Picture:
    """One picture: its tensors for the model, how many embedding rows it has, and their grid or rows.

    `types`: the model's argument that tells rows from text.
    """

    number: int
    inputs: Mapping[str, torch.Tensor]
    runs: tuple[int, ...]
    grid: MediaGrid | None = None
    types: str = ""

    @property
    def identity(self) -> bytes:
        return self.number.to_bytes(16)


@dataclass
class Chat:
    """Token ids, spans, and the pictures in their order."""

    ids: list[int] = field(default_factory=list)
    media: list[MediaSpan] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    def say(self, rng: random.Random, num_tokens: int) -> None:
        self.ids += [rng.randrange(3, BREAK) for _ in range(num_tokens)]

    def show(self, picture: Picture) -> None:
        row = 0
        for number, run in enumerate(picture.runs):
            self.ids += [BREAK] if number else []
            self.media.append(MediaSpan(len(self.ids), run, picture.identity, picture.grid, row))
            self.ids += [IMAGE] * run
            row += run
        self.pictures.append(picture)

    def inputs(self) -> dict[str, torch.Tensor]:
        """What `generate()` takes beside the ids."""
        if not self.pictures:
            return {}
        names = self.pictures[0].inputs
        parts = {name: [one.inputs[name] for one in self.pictures] for name in names}
        made = {name: torch.cat(own, dim=1 if own[0].dim() == 5 else 0) for name, own in parts.items()}
        if types := self.pictures[0].types:
            made[types] = torch.tensor([[int(id == IMAGE) for id in self.ids]])
        return made


Draw = Callable[[int], Picture]


def _noise(number: int, *shape: int) -> torch.Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _llava(number: int) -> Picture:
    return Picture(number, {"pixel_values": _noise(number, 1, 3, 56, 56)}, (16,))


def _intern(number: int) -> Picture:
    """One tile or two; their rows follow each other."""
    tiles = 1 + number % 2
    return Picture(number, {"pixel_values": _noise(number, tiles, 3, CANVAS, CANVAS)}, (16 * tiles,))


def _split(number: int) -> Picture:
    """One tile, or several and a copy of the whole, with a mark between them."""
    tiles = (1, 3, 4)[number % 3]
    return Picture(number, {"pixel_values": _noise(number, 1, tiles, 3, CANVAS, CANVAS)}, (16,) * tiles)


def _gemma(number: int) -> Picture:
    return Picture(number, {"pixel_values": _noise(number, 1, 3, CANVAS, CANVAS)}, (16,), types="token_type_ids")


def _pixtral(number: int) -> Picture:
    """Of three sizes, on a canvas, with a mark between the rows."""
    height, width = [(2, 4), (3, 2), (4, 4)][number % 3]
    side = 14 * MERGE
    pixels = torch.zeros(1, 3, CANVAS, CANVAS)
    pixels[..., : height * side, : width * side] = _noise(number, 3, height * side, width * side)
    sizes = torch.tensor([[height * side, width * side]])
    return Picture(number, {"pixel_values": pixels, "image_sizes": sizes}, (width,) * height)


def _qwen(patch_size: int) -> Draw:
    def draw(number: int) -> Picture:
        height, width = [(4, 4), (3, 5), (5, 2)][number % 3]
        patches = _noise(number, MERGE * height * MERGE * width, 3 * 2 * patch_size * patch_size)
        grid = torch.tensor([[1, MERGE * height, MERGE * width]])
        inputs = {"pixel_values": patches, "image_grid_thw": grid}
        return Picture(number, inputs, (height * width,), MediaGrid(height, width), "mm_token_type_ids")

    return draw


@dataclass(frozen=True)
class VisionFamily:
    """A config, and pictures by number. Pictures whose numbers differ by a multiple of 6 are of equal size."""

    config: Callable[[], PreTrainedConfig]
    draw: Draw


def _config(family: str, vision: dict[str, Any], nested: dict[str, Any], **more: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: config_of(family, vision, nested, image_token_id=IMAGE, **more)


_M_ROPE = text(rope_parameters=MROPE)
_SPLIT = VISION | {"image_size": CANVAS}
_GEMMA = text(**GEMMA, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "gemma3": VisionFamily(
        _config("Gemma3", _SPLIT, _GEMMA, mm_tokens_per_image=16, tie_word_embeddings=False), _gemma
    ),
    "idefics3": VisionFamily(_config("Idefics3", _SPLIT, text("llama"), scale_factor=MERGE), _split),
    "smolvlm": VisionFamily(_config("SmolVLM", _SPLIT, text("llama"), scale_factor=MERGE), _split),
    "llava": VisionFamily(_config("Llava", CLIP | {"image_size": 56}, text("llama")), _llava),
    "internvl": VisionFamily(_config("InternVL", INTERN | {"image_size": [CANVAS, CANVAS]}, text("qwen2")), _intern),
    "mistral3": VisionFamily(_config("Mistral3", PIXTRAL | {"image_size": CANVAS}, text("mistral")), _pixtral),
    "qwen2_vl": VisionFamily(_config("Qwen2VL", QWEN2_VISION, _M_ROPE), _qwen(14)),
    "qwen2_5_vl": VisionFamily(_config("Qwen2_5_VL", QWEN_VISION, _M_ROPE), _qwen(14)),
    "qwen3_vl": VisionFamily(
        _config("Qwen3VL", QWEN_VISION | {**DEEPSTACK, "depth": 2, "deepstack_visual_indexes": [0, 1]},
                text(rope_parameters=MROPE) | {"num_hidden_layers": 3}),
        _qwen(16),
    ),
}  # fmt: skip


def make_chats(family: VisionFamily) -> list[Chat]:
    """One to three pictures, one of them shown twice; adjacent to nothing but text; and two chats of text."""
    rng, chats = random.Random(3), []
    for numbers in ((1,), (2, 3), (4, 1, 4), (), ()):
        chat = Chat()
        chat.say(rng, rng.randint(3, 14))
        for number in numbers:
            chat.show(family.draw(number))
            chat.say(rng, rng.randint(1, 9))
        chats.append(chat)
    chats[-1].say(rng, 40)
    return chats


def pictures_of(chats: Iterable[Chat]) -> list[Picture]:
    """Every picture once."""
    return list({one.number: one for chat in chats for one in chat.pictures}.values())
