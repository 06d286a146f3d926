"""Vision-language model types whose text model may be fed by embeddings. Called by `read_config`.

For each pair of types a test compares the tokens of chats with images to those of the model's own `generate()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.domain.media.span import MediaRules
from baton.model.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A type of which `text_types` may be the text model. `has_grid`: positions have three axes.

    `has_blocks`: the tokens of an image attend to all of it, and images have one number of rows.
    `text_part`: the name of the text model in transformers' whole model.
    """

    model_type: str
    text_types: tuple[str, ...]
    has_grid: bool = False
    text_part: str = "language_model"
    has_blocks: bool = False

    def text_config(self, whole: Any) -> Any:
        """The config of the text model in `whole`, transformers' config. Raises `UnsupportedModel` for another one."""
        nested = whole.get_text_config()
        if nested.model_type not in self.text_types:
            raise UnsupportedModel(
                f"images with text model {nested.model_type!r} in {self.model_type} are not supported; supported: "
                + ", ".join(self.text_types)
            )
        return nested

    def rules(self, whole: Any) -> MediaRules:
        """What the model asks of media spans."""
        block_rows = int(whole.mm_tokens_per_image) if self.has_blocks else None
        return MediaRules(frozenset({int(whole.image_token_id)}), self.has_grid, block_rows)


VISION: Mapping[str, VisionSpec] = {
    spec.model_type: spec
    for spec in (
        VisionSpec("gemma3", ("gemma3_text",), has_blocks=True),
        VisionSpec("idefics3", ("llama",), text_part="text_model"),
        VisionSpec("internvl", ("qwen2",)),
        VisionSpec("llava", ("llama",)),
        VisionSpec("mistral3", ("mistral",)),
        VisionSpec("qwen2_vl", ("qwen2_vl_text",), has_grid=True),
        VisionSpec("qwen2_5_vl", ("qwen2_5_vl_text",), has_grid=True),
        VisionSpec("qwen3_vl", ("qwen3_vl_text",), has_grid=True),
        VisionSpec("smolvlm", ("llama",), text_part="text_model"),
    )
}

NOT_SERVED: Mapping[str, str] = {
    "llava_next": "its images have rows that are no placeholders' (image_newline)",
}
"""Types that are served on text only, with the reason."""


def vision_spec(model_type: str) -> VisionSpec:
    """The spec of a type. Raises `UnsupportedModel` with the reason where it is not served with images."""
    spec = VISION.get(model_type)
    if spec is None:
        reason = NOT_SERVED.get(model_type, "it is none of " + ", ".join(sorted(VISION)))
        raise UnsupportedModel(f"model type {model_type or 'unknown'!r} is not served with images: {reason}")
    return spec
