"""Gemma 3: every image has as many rows, and line breaks around its marks (`Gemma3Processor`).

The breaks are text: a tokenizer joins them with those of the chat template. So the marks are put into the prompt's text
before it is encoded, and only the rows of an image are expanded by ids. Crops of long images (pan and scan) are off, as
they are by default there.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.services.router.vision.expansion.config_reader import Json, UnknownProcessor, positive, side_lengths
from baton.services.router.vision.expansion.image_tokens import ImageTokens, one_run


@dataclass(frozen=True, slots=True)
class MarkedRules:
    """`num_rows` for an image of any size. `shown`: text that the chat template writes for an image.

    `marked`: what stands in its place before the prompt is encoded; it has one placeholder.
    """

    placeholder: int
    num_rows: int
    shown: str
    marked: str

    def expand(self, width: int, height: int, *, low_detail: bool = False) -> ImageTokens:
        """See `ImageRules`. There is no pixel bound to halve."""
        return one_run(self.placeholder, self.num_rows)

    def mark(self, prompt: str) -> str:
        """The prompt with the marks of its images."""
        return prompt.replace(self.shown, self.marked)


@dataclass(frozen=True, slots=True)
class ImageTexts:
    """Texts of the mark before the rows of an image, of a row, and of the mark behind them."""

    begin: str
    row: str
    end: str


def read_gemma(placeholder: int, image: Json, processor: Json, config: Json, texts: ImageTexts) -> MarkedRules:
    """Raises `UnknownProcessor`."""
    vision = config.get("vision_config") or {}
    side = positive(vision, "image_size", 224)
    if not image.get("do_resize", True) or side_lengths({"size": 224, **image}, "size") != (side, side):
        raise UnknownProcessor(f"its processor does not resize images to {side} x {side} pixels")
    num_rows = positive(processor, "image_seq_length", 256)
    if num_rows != positive(config, "mm_tokens_per_image", 256):
        raise UnknownProcessor(f"its processor has {num_rows} rows an image, its model another number")
    marked = f"\n\n{texts.begin}{texts.row}{texts.end}\n\n"
    return MarkedRules(placeholder, num_rows, texts.begin, marked)
